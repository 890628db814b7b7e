"""An idle worker: its latency and its cost."""

from __future__ import annotations

import time
from statistics import median, quantiles
from typing import Any

from .. import machine
from ..bench import Bench
from ..systems import Unsupported


def latency(bench: Bench, jobs: int = 300, pause: float = 0.1) -> dict[str, Any]:
    """Return the time from the commit of a job to the start of its function, in milliseconds."""
    with bench.worker(1, 8):
        time.sleep(5)
        committed = bench.drive("ping", jobs=jobs, pause=pause)["committed"]
        time.sleep(2)
    started = bench.stamps()
    waits = sorted((started[number] - at) * 1000 for number, at in enumerate(committed))
    return {
        "p50": median(waits),
        "p95": quantiles(waits, n=20)[-1],
        "p99": quantiles(waits, n=100)[-1],
    }


def idle(bench: Bench, seconds: float = 20.0) -> dict[str, Any]:
    """Return the cost per second, and the memory in MB beside that of Django's shell."""
    if not bench.system.waits:
        raise Unsupported("It is never idle.")
    bench.log_statements()
    with bench.worker(1, 8) as pid:
        time.sleep(8)
        cpu = machine.cpu(pid)
        with bench.counting() as used:
            time.sleep(seconds)
        cost, sizes = machine.cpu(pid) - cpu, machine.memory(pid)
    return {
        **{name: value / seconds for name, value in used.items() if name != "wal"},
        "cpu_percent": cost / seconds * 100,
        "processes": len(sizes["rss"]),
        "rss": sum(sizes["rss"]),
        "rss_most": max(sizes["rss"]),
        "pss": sum(sizes["pss"]),
        "shell_rss": sum(bench.memory_of_a_shell()["rss"]),
    }
