"""What the whole way of a job costs the database: it is enqueued, claimed and settled."""

from __future__ import annotations

from typing import Any

from ..bench import Bench
from .drain import progress


def cost(bench: Bench, jobs: int = 10_000, size: int = 512) -> dict[str, Any]:
    """Of a job with so many bytes of arguments, enqueued by itself and run under load. Nothing is vacuumed in between."""
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
