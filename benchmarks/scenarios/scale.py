"""Drains beside very many rows, all of the same number of jobs, so that rates are comparable."""

from __future__ import annotations

from typing import Any

from ..bench import Bench
from .drain import run

MILLION, JOBS = 1_000_000, 100_000

# Kind (see System.fill) and number of the rows beside the measured jobs.
BESIDE = {
    "nothing else": ("", 0),
    "1M ready": ("ready", MILLION),
    "1M finished": ("finished", MILLION),
    "1M in another queue": ("unserved", MILLION),
    "1M tomorrow": ("tomorrow", MILLION),
    "200 lanes": ("lanes", JOBS),
}


def scale(bench: Bench, beside: str, jobs: int = JOBS, of_a_million: float = 1.0) -> dict[str, Any]:
    """Drain jobs beside other rows. ``of_a_million`` scales the number of rows, for tests."""
    kind, number = BESIDE[beside]
    jobs = min(jobs, bench.system.backlog)
    if kind == "lanes":
        bench.drive("fill", kind=kind, jobs=jobs)
        return run(bench, 1, 8, jobs, BENCH_ANY_QUEUE="1")[0]
    if kind:
        bench.drive("fill", kind=kind, jobs=int(number * of_a_million))
    bench.drive("enqueue_many", function="noop", jobs=jobs)
    return run(bench, 1, 8, jobs)[0]
