"""Enqueue jobs from one client: their rate and their cost."""

from __future__ import annotations

from typing import Any

from ..bench import Bench


def enqueue(bench: Bench, jobs: int) -> dict[str, Any]:
    """Enqueue jobs one by one, each in its own commit."""
    with bench.counting() as used:
        took = bench.drive("enqueue", function="noop", jobs=jobs)
    return {**_figures(took, jobs), **{name: value / jobs for name, value in used.items()}}


def enqueue_many(
    bench: Bench, jobs: int, task: str = "noop", batch: int | None = None, **given: Any
) -> dict[str, Any]:
    """Enqueue ``batch`` jobs with each call, or all with one."""
    jobs = min(jobs, bench.system.backlog)
    return _figures(
        bench.drive("enqueue_many", function=task, jobs=jobs, batch=batch, **given), jobs
    )


def _figures(took: dict[str, Any], jobs: int) -> dict[str, Any]:
    return {"rate": jobs / took["seconds"], "cpu_us": took["cpu"] / jobs * 1e6}
