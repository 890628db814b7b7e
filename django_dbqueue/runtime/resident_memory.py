"""Resident memory of the processes of this host."""

from __future__ import annotations

import os
import subprocess

from .process_identity import PROC

MB = 1024 * 1024


def resident_mb(pid: int) -> float | None:
    """Return the resident memory of a process in MB.

    Read from /proc on Linux, and from ``ps`` on macOS and BSD. None if the process has ended, or
    on Windows.
    """
    try:
        if (PROC / "self/statm").exists():
            pages = (PROC / str(pid) / "statm").read_text().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE") / MB
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return int(said.stdout) * 1024 / MB
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None
