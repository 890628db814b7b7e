"""Identity of the processes of this host, and whether they still run."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def identity() -> dict[str, str | int]:
    """Return the identity of this process.

    Others on its host use it to detect later that the process is gone. Empty without /proc.

    boot and space: the boot of the machine, and the process id namespace. They differ between two
    containers with the same hostname.
    born: the start time of the process in kernel ticks. Another process may have its id later.
    """
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return {
            "boot": boot,
            "space": os.readlink(PROC / "self/ns/pid"),
            "born": _born(os.getpid()),
        }
    return {}


def is_gone(pid: int, noted: dict[str, str | int]) -> bool:
    """Return whether a process certainly ran here and has ended. False if this is unknown here."""
    own = identity()
    if not own or any(noted.get(key) != own[key] for key in ("boot", "space")):
        return False
    try:
        os.kill(pid, 0)
        return _is_zombie(pid) or _born(pid) != noted.get("born")
    except ProcessLookupError:
        return True
    except OSError:  # It belongs to another user, and is hidden.
        return False


def lives(pid: int, since: float) -> bool:
    """Return whether the process that had this id at a time, as of ``time.time()``, still runs.

    Without /proc, any process with the id counts.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # It belongs to another user.
        pass
    with suppress(OSError):
        booted = time.time() - float((PROC / "uptime").read_text().split()[0])
        # Both clocks are rough: the process may seem to be a second younger than its file.
        began = booted + _born(pid) / os.sysconf("SC_CLK_TCK")
        return not _is_zombie(pid) and began < since + 1.0
    return True


def show_title(title: str) -> None:
    """Set this process's title in ``ps``, if setproctitle is installed."""
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)


def _born(pid: int) -> int:
    return int(_stat(pid)[19])


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[0] == "Z"


def _stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) from field 3 on.

    The name before them, in parentheses, may contain anything.
    """
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
