"""Which processes are those of this host, and whether they still run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

PROC = Path("/proc")


def identity() -> dict[str, Any]:
    """What a process notes of itself, for others on its host to know later that it is gone; empty where there is no /proc.

    boot and space: which start of which machine, and which of its spaces of process ids; two containers with one host
    name have different ones.
    born: when it started, in the kernel's ticks: another process may have its id later.
    """
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "space": os.readlink(PROC / "self/ns/pid"), "born": _born(os.getpid())}
    return {}


def is_gone(pid: int, noted: dict[str, Any]) -> bool:
    """Whether a process surely ran here and does not any more. False if that cannot be known from here."""
    own = identity()
    if not own or any(noted.get(key) != own[key] for key in ("boot", "space")):
        return False
    try:
        os.kill(pid, 0)
        return _is_zombie(pid) or _born(pid) != noted.get("born")
    except ProcessLookupError:
        return True
    except OSError:  # It is somebody else's, and hidden.
        return False


def _born(pid: int) -> int:
    return int(_stat(pid)[19])


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[0] == "Z"


def _stat(pid: int) -> list[str]:
    """See proc_pid_stat(5), from field 3 on. The name before it, in parentheses, may hold anything."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
