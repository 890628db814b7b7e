"""Scenarios by name. Each function takes a system's bench and returns the figures of one run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..bench import Bench
from .cost import cost
from .drain import drain, snapshot, waiting
from .enqueue import enqueue, enqueue_many
from .scale import BESIDE, scale
from .worker import idle, latency

Scenario = Callable[[Bench], dict[str, Any]]

# Processes and threads.
GRID = [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (4, 4)]
# The kinds of jobs: the function of each, and the number of jobs of a drain.
KINDS = {
    "drain": ("noop", 100_000),
    "compute": ("compute", 100_000),
    "append": ("append", 200_000),
    "work": ("pay", 20_000),
    "sleep": ("sleep", 40_000),
}
# The most common of them.
SHAPES = [(1, 1), (1, 8), (2, 4)]
# The numbers of threads with which one process runs each kind.
THREADS = [t for p, t in GRID if p == 1]
# Sizes of arguments in bytes, and numbers of jobs.
SIZES = {"100 B": (100, 20_000), "10 kB": (10_000, 5000), "1 MB": (1_000_000, 100)}
# Numbers of keys with a limit of two jobs each.
KEYS = [50, 1000]
# Jobs per call, and total number of jobs.
BATCHES = {1: 2000, 10: 10_000, 100: 50_000, 1000: 50_000, 10_000: 50_000}

SCENARIOS: dict[str, Scenario] = {
    "enqueue": partial(enqueue, jobs=5000),
    "enqueue many": partial(enqueue_many, jobs=20_000),
    **{
        f"{kind} {p} × {t}": partial(drain, processes=p, threads=t, jobs=jobs, task=function)
        for kind, (function, jobs) in KINDS.items()
        for p, t in GRID
    },
    "latency": latency,
    "idle": idle,
    "cost": cost,
    **{f"scale, {beside}": partial(scale, beside=beside) for beside in BESIDE},
    "snapshot, none": partial(snapshot, held=False),
    "snapshot, held": partial(snapshot, held=True),
    "hot key": partial(drain, processes=1, threads=8, jobs=4000, task="limited"),
    **{
        f"{customers:,} keys": partial(
            drain, processes=1, threads=8, jobs=20_000, task="of_customer", customers=customers
        )
        for customers in KEYS
    },
    "waiting 0.1 s": partial(waiting, seconds=0.1),
    "waiting 1 s": partial(waiting, seconds=1.0),
    **{
        f"enqueue by {batch:,}": partial(enqueue_many, jobs=jobs, batch=batch)
        for batch, jobs in BATCHES.items()
    },
    **{
        f"enqueue {name}": partial(enqueue_many, jobs=jobs, task="carry", size=size)
        for name, (size, jobs) in SIZES.items()
    },
    **{
        f"drain {name}": partial(drain, processes=1, threads=8, jobs=jobs, task="carry", size=size)
        for name, (size, jobs) in SIZES.items()
    },
}

# Scenarios that are measured by default.
USUAL = [
    *[
        "enqueue",
        "enqueue many",
        *(f"{what} {p} × {t}" for what in ("append", "work") for p, t in SHAPES),
    ],
    *["latency", "idle"],
]
# Scenarios that are measured by default on other databases than PostgreSQL.
PORTABLE = ["enqueue", "enqueue many", "drain 1 × 1", "drain 1 × 8", "drain 2 × 4", "latency"]
