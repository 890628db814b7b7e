"""The database's cost of a job, from enqueue to settle."""

from __future__ import annotations

from typing import Any

from ..bench import Bench
from .drain import progress


def cost(bench: Bench, jobs: int = 10_000, size: int = 512) -> dict[str, Any]:
    """Return the cost of a job with ``size`` bytes of arguments.

    Jobs are enqueued one by one and run under load, without vacuum in between.
    """
    bench.log_statements()
    already = bench.ended(jobs)
    with bench.counting() as enqueued:
        bench.drive("enqueue", function="carry", jobs=jobs, size=size)
    with bench.counting() as run, bench.worker(1, 8):
        ended = [each for _, each in progress(bench, jobs, already)][-1]
    return {
        "wal": enqueued["wal"] / jobs + run["wal"] / ended,
        **{f"{name}_to_enqueue": value / jobs for name, value in enqueued.items()},
        **{f"{name}_to_run": value / ended for name, value in run.items()},
    }
