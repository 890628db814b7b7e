"""Jobs are enqueued by one client: how many in a second, and at which cost."""

from __future__ import annotations

from typing import Any

from ..bench import Bench


def enqueue(bench: Bench, jobs: int) -> dict[str, Any]:
    """One by one, each committed by itself."""
    with bench.counting() as used:
        took = bench.drive("enqueue", function="noop", jobs=jobs)
    return {**_figures(took, jobs), **{name: value / jobs for name, value in used.items()}}


def enqueue_many(
    bench: Bench, jobs: int, task: str = "noop", batch: int | None = None, **given: Any
) -> dict[str, Any]:
    """So many with each call, or all with one."""
    jobs = min(jobs, bench.system.backlog)
    return _figures(
        bench.drive("enqueue_many", function=task, jobs=jobs, batch=batch, **given), jobs
    )


def _figures(took: dict[str, Any], jobs: int) -> dict[str, Any]:
    return {"rate": jobs / took["seconds"], "cpu_us": took["cpu"] / jobs * 1e6}
