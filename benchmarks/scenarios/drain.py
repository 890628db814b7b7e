"""Run waiting jobs: their rate and their cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from .. import machine
from ..bench import Bench

# Longest measurement of a drain, and longest wait for its first job, in seconds.
WINDOW, START = 10.0, 60.0

Times = list[tuple[float, int]]


def drain(
    bench: Bench, processes: int, threads: int, jobs: int, task: str = "noop", **given: Any
) -> dict[str, Any]:
    jobs = min(jobs, bench.system.backlog)
    bench.drive("enqueue_many", function=task, jobs=jobs, **given)
    return run(bench, processes, threads, jobs)[0]


def snapshot(bench: Bench, held: bool, jobs: int = 200_000, window: float = 60.0) -> dict[str, Any]:
    """Drain while another session holds a snapshot, so that vacuum cannot remove dead rows."""
    jobs = min(jobs, bench.system.backlog)
    bench.drive("enqueue_many", function="noop", jobs=jobs)
    with ExitStack() as stack:
        if held:
            other = stack.enter_context(bench.server.connect(bench.database))
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT count(*) FROM pg_class")
        figures, times = run(bench, 1, 8, jobs, window)
    return {**figures, "rates": rates(times)}


def waiting(
    bench: Bench, seconds: float, jobs: int = 100_000, coroutines: int = 4000
) -> dict[str, Any]:
    """Return the rate of coroutines that wait, and the largest number at a time."""
    jobs = min(jobs, bench.system.backlog)
    bench.drive("enqueue_many", function="wait", jobs=jobs, seconds=seconds)
    figures, _ = run(bench, 1, 8, jobs, BENCH_COROUTINES=str(coroutines))
    return {**figures, "at_a_time": max(bench.stamps())}


def run(
    bench: Bench, processes: int, threads: int, jobs: int, window: float = WINDOW, **env: str
) -> tuple[dict[str, Any], Times]:
    """Run the enqueued jobs. Returns the figures, and the number of ended jobs at each time.

    Rates count from the first ended job on.
    """
    bench.settle()
    already = bench.ended(jobs)
    with bench.counting() as used, bench.worker(processes, threads, **env) as pid:
        watched = progress(bench, jobs, already, window)
        times, cost = [next(watched)], -machine.cpu(pid)
        times += watched
        cost += machine.cpu(pid)
    (begin, first), (end, last) = times[0], times[-1]
    if end == begin:
        raise ValueError(
            f"{jobs} jobs are too few: {bench.name} had ended them before the first poll."
        )
    rates = {"rate": (last - first) / (end - begin), "worker_cpu_ms": cost * 1000 / (last - first)}
    return {**rates, **{name: value / last for name, value in used.items()}}, times


def progress(
    bench: Bench, jobs: int, already: int, window: float = WINDOW
) -> Iterator[tuple[float, int]]:
    """Yield times with the number of ended jobs, from the first ended job on."""
    deadline, began, ended = time.monotonic() + START, None, 0
    while ended < jobs and time.monotonic() < (deadline if began is None else began + window):
        now, ended = time.monotonic(), bench.ended(jobs) - already
        if ended:
            began = began or now
            yield now, ended
        time.sleep(0.1 if ended else 0.02)
    if began is None:
        raise TimeoutError(f"{bench.name} has ended no job within {START:g} s.")


def rates(times: Times, seconds: float = 5.0) -> list[float]:
    """Return the rate in each interval; the rest at the end counts from one second on."""
    found, (begin, first) = [], times[0]
    for now, ended in times[1:]:
        is_last = now == times[-1][0]
        if now - begin >= seconds or (is_last and now - begin >= 1.0):
            found.append((ended - first) / (now - begin))
            begin, first = now, ended
    return found
