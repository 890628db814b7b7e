"""``python -m benchmarks.driver VERB …``: what is done with a system, in an environment where it is installed.

Prints what it measured, or what the system cannot do, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from .systems import Unsupported, system


def prepare() -> dict[str, Any]:
    from .project.models import Account

    here().prepare()
    Account.objects.bulk_create([Account() for _ in range(1000)])
    return {}


def enqueue(function: str, number: int, *args: Any) -> dict[str, Any]:
    """One by one, each committed by itself."""
    one = task(function)
    here().enqueue(one, *args)  # The first one connects.
    return timed(lambda: [here().enqueue(one, *args) for _ in range(number)])


def enqueue_many(function: str, number: int, *args: Any) -> dict[str, Any]:
    return timed(lambda: here().enqueue_many(task(function), [tuple(args)] * number))


def ping(number: int, pause: float) -> dict[str, Any]:
    """Enqueue now and then. Returns when each was committed."""
    committed = []
    for each in range(number):
        time.sleep(pause)
        here().enqueue(task("stamp"), each)
        committed.append(time.monotonic())
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


def timed(action: Callable[[], object]) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    action()
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.project.settings"
    import django

    django.setup()
    verb, *rest = sys.argv[1:]
    try:
        found = globals()[verb](*(json.loads(each) for each in rest))
    except Unsupported as error:
        found = {"unsupported": str(error)}
    print(json.dumps(found))
