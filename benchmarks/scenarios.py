"""What is measured. Each function takes a system's bench, and returns the figures of one run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

from . import machine
from .bench import Bench

# At the longest, in seconds, that a drain is watched, and that its first job is waited for.
WINDOW, START = 10.0, 60.0


def drain(
    bench: Bench, processes: int, threads: int, jobs: int, task: str = "noop", args: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """Jobs that wait are run to their end: how many in a second, from the first that has ended on, and at which cost."""
    jobs = min(jobs, bench.system.backlog)
    bench.drive("enqueue_many", task, jobs, *args)
    bench.settle()
    before = bench.server.counters(bench.database)
    with bench.worker(processes, threads) as pid:
        times = list(_progress(bench, jobs))
        cost = machine.cpu(pid)
    (begin, first), (end, last) = times[0], times[-1]
    used = bench.server.counters(bench.database).since(before)
    return {
        "rate": (last - first) / (end - begin),
        "worker_cpu_ms": cost / last * 1000,
        "commits": used["commits"] / last,
        "wal": used["wal"] / last,
    }


def enqueue(bench: Bench, jobs: int) -> dict[str, Any]:
    """One by one, each committed by itself."""
    before = bench.server.counters(bench.database)
    took = bench.drive("enqueue", "noop", jobs)
    used = bench.server.counters(bench.database).since(before)
    return {"rate": jobs / took["seconds"], "cpu_us": took["cpu"] / jobs * 1e6, "wal": used["wal"] / jobs}


def enqueue_many(bench: Bench, jobs: int) -> dict[str, Any]:
    took = bench.drive("enqueue_many", "noop", jobs)
    return {"rate": jobs / took["seconds"], "cpu_us": took["cpu"] / jobs * 1e6}


def latency(bench: Bench, jobs: int = 100, pause: float = 0.2) -> dict[str, Any]:
    """From the commit of a job to the start of its function, with an idle worker. In milliseconds."""
    with bench.worker(1, 8):
        time.sleep(5)
        committed = bench.drive("ping", jobs, pause)["committed"]
        time.sleep(2)
    started = bench.stamps()
    waits = sorted((started[number] - at) * 1000 for number, at in enumerate(committed))
    return {"p50": median(waits), "p95": quantiles(waits, n=20)[-1], "p99": quantiles(waits, n=100)[-1]}


def idle(bench: Bench, seconds: float = 20.0) -> dict[str, Any]:
    """What a worker costs that has nothing to do."""
    with bench.worker(1, 8) as pid:
        time.sleep(8)
        before, cpu = bench.server.counters(bench.database), machine.cpu(pid)
        time.sleep(seconds)
        used, cost = bench.server.counters(bench.database).since(before), machine.cpu(pid) - cpu
        sizes = machine.memory(pid)
    return {
        "commits": used["commits"] / seconds,
        "cpu_percent": cost / seconds * 100,
        "processes": len(sizes["rss"]),
        "rss": sum(sizes["rss"]),
        "pss": sum(sizes["pss"]),
    }


def _progress(bench: Bench, jobs: int) -> Iterator[tuple[float, int]]:
    """When how many had ended, from the first on."""
    deadline, began, ended = time.monotonic() + START, None, 0
    while ended < jobs and time.monotonic() < (deadline if began is None else began + WINDOW):
        now, ended = time.monotonic(), bench.ended(jobs)
        if ended:
            began = began or now
            yield now, ended
        time.sleep(0.1)
    if began is None:
        raise TimeoutError(f"{bench.name} has ended no job within {START:g} s.")
