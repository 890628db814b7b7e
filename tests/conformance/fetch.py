"""``python -m tests.conformance.fetch``: download the tests of Django's Tasks framework.

They are in Django's source distribution, and not in its wheel. For Django 5.2, whose backport has
no published tests, those of 6.0 are used with the backport's names.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import django

HERE = Path(__file__).parent
VERSION = django.__version__ if django.VERSION >= (6, 0) else "6.0.10"
FOLDER = HERE / "source" / f"{VERSION}-on-{django.__version__}"


def main() -> None:
    if (FOLDER / "tasks").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--ignore-requires-python",
        ]
        subprocess.run([*pip, "-d", scratch, f"django=={VERSION}"], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as files:
            for member in files.getmembers():
                if re.search(r"/tests/tasks/\w+\.py$", member.name):
                    _write(Path(member.name).name, files.extractfile(member).read().decode())


def _write(name: str, text: str) -> None:
    if django.VERSION < (6, 0):
        text = text.replace("django.tasks", "django_tasks")
        if name == "test_tasks.py" or name == "test_immediate_backend.py":
            text = text.replace("InvalidTaskBackend", "InvalidTaskBackendError")
            text = re.sub(r"InvalidTask\b", "InvalidTaskError", text)
    target = FOLDER / "tasks" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


if __name__ == "__main__":
    main()
