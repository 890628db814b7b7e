"""Measured systems: one small file each, with the production settings of its documentation."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Any

OURS = ["dbqueue"]
LIMITS = ["pgbench", "psycopg_loop", "orm_loop"]
RIVALS = [
    "django_ox",
    "dj_queue",
    "steady_queue",
    "django_tasks_db",
    "procrastinate",
    "oban",
    "pgqueuer",
    "django_q2",
    "celery_redis",
]


class Unsupported(Exception):
    """A system lacks the measured feature."""


class System:
    """Interface of a queue under test. The defaults are those of Django's Tasks framework.

    Methods import the system themselves: it is installed for the driver, not for the benchmark.
    """

    # Requirements for pip, beside Django and psycopg.
    requires: tuple[str, ...] = ()
    apps: tuple[str, ...] = ()
    # Django settings; CONN_MAX_AGE in seconds (None: for ever), or the connection pool's options.
    settings: dict[str, Any] = {}
    conn_max_age: int | None = 0
    pool: dict[str, int] | None = None
    # Statement that counts ended jobs.
    ended = ""
    # Whether its worker waits when there is nothing to do.
    waits = True
    # Largest number of jobs at the start of a drain.
    backlog = 1_000_000

    def lacks(self) -> str:
        """Return the missing requirement; empty if there is none."""
        return ""

    @contextmanager
    def beside(self) -> Iterator[dict[str, str]]:
        """Run services that it needs beside the database. Yields their environment variables."""
        yield {}

    def count_ended(self, query: Callable[[str], Any], jobs: int) -> int:
        """Return the number of ended jobs."""
        return int(query(self.ended))

    def task(self, function: Callable[..., Any]) -> Any:
        """Return the function as a task. Raises Unsupported."""
        from django.tasks import task

        return task(function)

    def limited(self, function: Callable[..., Any]) -> Any:
        """Return the function as a task with a limit of one job. Raises Unsupported."""
        raise Unsupported(f"{self.__module__} is not set up with limits.")

    def limited_by_key(self, function: Callable[..., Any]) -> Any:
        """Return the function as a task with a limit of two jobs for each value of its argument.

        Raises Unsupported.
        """
        raise Unsupported(f"{self.__module__} is not set up with limits by key.")

    def prepare(self) -> None:
        """Create its tables in an empty database."""
        from django.core.management import call_command

        call_command("migrate", run_syncdb=True, verbosity=0)

    def enqueue(self, task: Any, *args: Any) -> None:
        task.enqueue(*args)

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        """Enqueue many jobs: one by one, unless the system has a better way."""
        for call in calls:
            self.enqueue(task, *call)

    def fill(self, kind: str, jobs: int) -> None:
        """Fill the database with jobs of a kind. Raises Unsupported.

        kind: "ready", "finished", "unserved" (in a queue that the worker does not serve),
            "tomorrow", or "lanes" (ready, in 20 queues with 10 priorities each).
        """
        raise Unsupported(f"{self.__module__} cannot be filled.")

    def work(self, processes: int, threads: int) -> None:
        """Run jobs until SIGTERM."""
        raise NotImplementedError


class Rival(System):
    """Another project's queue, in its own environment.

    Its connections are kept, which is its best setting. A drain begins with fewer jobs than ours,
    about as many as end during the measurement: some systems have to enqueue them one by one.
    """

    conn_max_age = None
    backlog = 12_000

    def lacks(self) -> str:
        return "" if sys.version_info >= (3, 12) else "Django 6 needs Python 3.12."


# Functions that an event loop would wait for.
BLOCKING = ("pay", "sleep")


def in_event_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as a coroutine function, for systems that run only these.

    A thread runs it if it blocks. The others run in the loop, which is faster.
    """
    if iscoroutinefunction(function):
        return function

    @wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        if function.__name__ in BLOCKING:
            return await asyncio.to_thread(function, *args, **kwargs)
        return function(*args, **kwargs)

    return run


def fork(processes: int) -> None:
    """Fork into several processes, for systems that leave that to their users."""
    for _ in range(processes - 1):
        if not os.fork():
            break


@cache
def system(name: str) -> System:
    return import_module(f"{__name__}.{name}").Adapter()  # type: ignore[no-any-return]
