"""Tasks that make trouble on purpose, so that the admin can be watched answering."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from django.db import connection

from django_dbqueue import Exponential, limit, task

TROUBLE = "trouble"  # The queue of all of them.


@task(queue_name=TROUBLE, max_attempts=3, backoff=Exponential(first=20))
def call_tax_office(order: int, country: str) -> str:
    """Fail for one country: the admin shows what the failures have in common."""
    if country == "IT":
        raise TimeoutError(f"The tax office did not answer for order {order}.")
    return country


@task(queue_name=TROUBLE)
def hang() -> None:
    """Wait for something that never comes. It is stopped in the admin."""
    while True:
        time.sleep(1.0)


@task(queue_name=TROUBLE, concurrency=limit(1))
def print_label(parcel: int) -> int:
    """Use a printer that prints one label at a time: the others wait in line."""
    time.sleep(2.0)
    return parcel


@task(queue_name=TROUBLE, on_lost="fail")
def kill_worker() -> None:
    """Kill the process that runs this job. Its other jobs are recovered."""
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    countries = ("DE", "FR", "IT", "ES")
    call_tax_office.enqueue_many([(order, countries[order % 4]) for order in range(1000)])


class Trouble(NamedTuple):
    """A kind of trouble, with the page of the admin that answers it."""

    label: str
    enqueue: Callable[[], Any]
    page: str


def kinds() -> dict[str, Trouble]:
    """Return what can be made here. On SQLite, the workers are in one process with all the rest."""
    found = {
        "fail": Trouble("Fail 250 of 1,000 jobs", _fail, "failure"),
        "hang": Trouble("Hang a job", hang.enqueue, "hangedjob"),
        "line": Trouble(
            "Have 30 jobs wait in line",
            lambda: print_label.enqueue_many([(parcel,) for parcel in range(30)]),
            "semaphore",
        ),
        "kill": Trouble("Kill a worker", kill_worker.enqueue, "process"),
    }
    if connection.vendor == "sqlite":
        del found["kill"]
    return found
