"""Facts about the machine, and the cost of its processes. Needs Linux."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")


def facts() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "?",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory": f"{memory:.0f} GB",
        "kernel": platform.release(),
    }
    versions = {name: version(name) for name in ("django-dbqueue-tasks", "django", "psycopg")}
    return {
        "day": date.today().isoformat(),
        **machine,
        "python": platform.python_version(),
        **versions,
    }


def tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and all its descendants."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in thread.read_text().split():
            yield from tree(int(child))


def cpu(pid: int) -> float:
    """Return the processor seconds of a process and its descendants."""
    return sum(_cpu(each) for each in tree(pid))


def memory(pid: int) -> dict[str, list[float]]:
    """Return the RSS and the PSS (proportional share) of each process, in MB."""
    found: dict[str, list[float]] = {"rss": [], "pss": []}
    for each in tree(pid):
        lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        found["rss"].append(sizes["Rss"] / 1024)
        found["pss"].append(sizes["Pss"] / 1024)
    return found


def _cpu(pid: int) -> float:
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(int(each) for each in values[11:15]) / _TICK
