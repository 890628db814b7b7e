"""Virtual environments of the rivals, rebuilt when their requirements change."""

from __future__ import annotations

import platform
import subprocess
import sys
import venv
from pathlib import Path

from .systems import RIVALS, system

FOLDER = Path(__file__).parent.parent / ".venv-bench"
COMMON = ("django", "psycopg[binary]>=3.2", "django-environ>=0.12")


def python(name: str) -> str:
    """Return the interpreter of the system, with the newest Django that it supports."""
    if name not in RIVALS:
        return sys.executable
    folder = FOLDER / name
    found, stamp = folder / "bin" / "python", folder / "requires.txt"
    requires = [*COMMON, *system(name).requires]
    wanted = "\n".join([f"# Python {platform.python_version()}", *requires, ""])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"Setting up {folder.relative_to(FOLDER.parent)} ...", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run(
            [found, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requires],
            check=True,
        )
        stamp.write_text(wanted)
    return str(found)


def packages(name: str) -> list[str]:
    """Return the installed packages of a rival."""
    done = subprocess.run(
        [python(name), "-m", "pip", "freeze"], stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout.splitlines()
