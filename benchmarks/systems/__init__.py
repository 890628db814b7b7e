"""The systems that are measured: one small file each, with the settings that its documentation has for production."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

OURS = ["dbqueue"]
LIMITS = ["pgbench", "psycopg_loop", "orm_loop"]
RIVALS = [
    "django_ox",
    "dj_queue",
    "steady_queue",
    "django_tasks_db",
    "procrastinate",
    "django_q2",
    "celery_redis",
]


class Unsupported(Exception):
    """A system cannot do what is measured."""


class System:
    """What a benchmark asks of a queue; where there is a default, it is that of Django's Tasks. Whatever imports the system
    itself does so inside the methods, as the driver has it installed, and the benchmark has not.
    """

    # What pip installs for it, beside Django and psycopg.
    requires: tuple[str, ...] = ()
    apps: tuple[str, ...] = ()
    # Of Django's settings; of these, for how many seconds a connection is kept (None: for ever), or the pool of connections.
    settings: dict[str, Any] = {}
    conn_max_age: int | None = 0
    pool: dict[str, int] | None = None
    # The statement that says how many jobs have ended.
    ended = ""
    # Whether its worker waits when there is nothing to do.
    waits = True
    # With how many jobs a drain begins, at the most.
    backlog = 1_000_000

    def lacks(self) -> str:
        """What it needs that is not here, if anything."""
        return ""

    @contextmanager
    def beside(self) -> Iterator[dict[str, str]]:
        """Run what it needs beside the database, and yield how to reach that, as environment variables."""
        yield {}

    def count_ended(self, query: Callable[[str], Any], jobs: int) -> int:
        """How many of so many jobs have ended."""
        return int(query(self.ended))

    def task(self, function: Callable[..., Any]) -> Any:
        """The function as a task. Raises Unsupported."""
        from django.tasks import task

        return task(function)

    def limited(self, function: Callable[..., Any]) -> Any:
        """As a task of which one job runs at a time. Raises Unsupported."""
        raise Unsupported(f"{self.__module__} is not set up with limits.")

    def prepare(self) -> None:
        """Make what it needs in an empty database."""
        from django.core.management import call_command

        call_command("migrate", run_syncdb=True, verbosity=0)

    def enqueue(self, task: Any, *args: Any) -> None:
        task.enqueue(*args)

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        """One by one, where it has nothing better."""
        for call in calls:
            self.enqueue(task, *call)

    def fill(self, kind: str, jobs: int) -> None:
        """Put so many jobs into the database: "ready", "finished", "unserved" (in a queue that the worker leaves alone),
        "tomorrow", or ready in 200 "lanes" (20 queues with 10 priorities each). Raises Unsupported.
        """
        raise Unsupported(f"{self.__module__} cannot be filled.")

    def work(self, processes: int, threads: int) -> None:
        """Run jobs until the process is told to end."""
        raise NotImplementedError


class Rival(System):
    """Another project's queue, in an environment of its own. Its connections are kept, as that is its best setting. Fewer jobs
    wait than for ours, as many as it ends while it is watched: some have to be enqueued one by one.
    """

    conn_max_age = None
    backlog = 12_000

    def lacks(self) -> str:
        return "" if sys.version_info >= (3, 12) else "Django 6 needs Python 3.12."


def fork(processes: int) -> None:
    """Go on in so many processes, where a system leaves it to its users to start more than one."""
    for _ in range(processes - 1):
        if not os.fork():
            break


@cache
def system(name: str) -> System:
    return import_module(f"{__name__}.{name}").Adapter()  # type: ignore[no-any-return]
