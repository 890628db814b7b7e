"""No queue: the cost of the same work with Django's ORM, as a loop, and of creating one row."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from . import System, Unsupported, fork


class Adapter(System):
    apps = ("django_dbqueue",)
    waits = False
    # A payment adds one to an account.
    ended = "SELECT sum(balance) FROM project_account"

    def task(self, function: Callable[..., Any]) -> Any:
        if function.__name__ not in ("noop", "pay"):
            raise Unsupported("It only pays, and creates rows.")
        return function

    def enqueue(self, task: Any, *args: Any) -> None:
        """Create the row of a job of this project."""
        from django_dbqueue.models import Job

        Job.objects.create(
            task=f"{task.__module__}.{task.__name__}", queue="default", args=list(args)
        )

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        if task.__name__ != "pay":
            raise Unsupported("It only pays, and its payments need no jobs.")

    def work(self, processes: int, threads: int) -> None:
        from ..driver import ACCOUNTS
        from ..project.tasks import pay

        def loop(first: int) -> None:
            for number in itertools.count(first, threads):
                pay(number % ACCOUNTS + 1)

        fork(processes)
        for first in range(1, threads):
            threading.Thread(target=loop, args=(first,), daemon=True).start()
        loop(0)
