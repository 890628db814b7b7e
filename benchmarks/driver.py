"""``python -m benchmarks.driver VERB '{…}'``: one action of a system, in its own environment.

Prints the measured figures, or a missing feature of the system, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import string
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from .systems import Unsupported, system

ACCOUNTS = 1000


def prepare() -> dict[str, Any]:
    from .project.models import Account

    here().prepare()
    Account.objects.bulk_create([Account() for _ in range(ACCOUNTS)])
    return {}


def fill(kind: str, jobs: int) -> dict[str, Any]:
    """Write rows beside the measured jobs."""
    return timed(lambda: here().fill(kind, jobs))


def enqueue(function: str, jobs: int, **given: Any) -> dict[str, Any]:
    """Enqueue jobs one by one, each in its own commit."""
    one, calls = task(function), calls_of(function, jobs, given)
    here().enqueue(one, *calls[0])  # The first one connects.
    return timed(lambda: [here().enqueue(one, *call) for call in calls])


def enqueue_many(
    function: str, jobs: int, batch: int | None = None, **given: Any
) -> dict[str, Any]:
    """Enqueue jobs in batches, or all at once."""
    one, calls, size = task(function), calls_of(function, jobs, given), batch or jobs
    return timed(
        lambda: [
            here().enqueue_many(one, calls[start : start + size]) for start in range(0, jobs, size)
        ]
    )


def ping(jobs: int, pause: float) -> dict[str, Any]:
    """Enqueue jobs with pauses. Returns the time of each commit.

    Without a transaction, that is the time at which the call returned.
    """
    from django.db import transaction

    committed: list[float] = []
    for each in range(jobs):
        time.sleep(pause)
        with transaction.atomic():
            # Registered first, so it runs before the queue's own callbacks.
            transaction.on_commit(lambda: committed.append(time.monotonic()))
            here().enqueue(task("stamp"), each)
    return {"committed": committed}


def work(processes: int, threads: int) -> dict[str, Any]:
    here().work(processes, threads)
    return {}


def here() -> Any:
    return system(os.environ["BENCH_SYSTEM"])


def task(function: str) -> Any:
    from .project import tasks

    found = getattr(tasks, function)
    if isinstance(found, Unsupported):
        raise found
    return found


def calls_of(function: str, jobs: int, given: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the arguments of each job of the function."""
    return [CALLS.get(function, lambda _: ())(number, **given) for number in range(jobs)]


@cache
def text(size: int) -> str:
    """Return text that compresses poorly."""
    return "".join(random.Random(size).choices(string.ascii_letters, k=size))


CALLS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "pay": lambda number: (number % ACCOUNTS + 1,),
    "wait": lambda _, seconds: (seconds,),
    "carry": lambda _, size: (text(size),),
    "of_customer": lambda number, customers: (f"customer {number % customers}",),
}


def timed(action: Callable[[], object]) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    action()
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.project.settings"
    import django

    django.setup()
    verb, given = sys.argv[1:]
    try:
        found = globals()[verb](**json.loads(given))
    except Unsupported as error:
        found = {"unsupported": str(error)}
    print(json.dumps(found))
