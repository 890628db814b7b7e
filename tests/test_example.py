"""The example project, in its own process because of its own settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent / "example_cases.py"


def test_example_project_passes_its_cases():
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
        # Drop an empty DATABASE_URL: it means SQLite to the suite, and is invalid for the example.
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
