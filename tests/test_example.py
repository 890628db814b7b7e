"""The example project, in a process of its own, as it has settings of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent / "example_cases.py"


def test_the_example_project_does_what_it_shows():
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--ds",
            "example_project.settings",
            "-p",
            "no:xdist",
            str(CASES),
        ],
        # An empty DATABASE_URL means SQLite to the suite's settings; the example's want none.
        env={
            name: value
            for name, value in os.environ.items()
            if value and not name.startswith("PYTEST_")
        },
        capture_output=True,
        text=True,
        cwd=CASES.parent.parent,
    )

    assert found.returncode == 0, found.stdout + found.stderr
