"""steady-queue: a supervisor with workers, a dispatcher and a scheduler, each a process.

It closes its connections after each job, so only a connection pool keeps them. It enqueues many
jobs one by one, and runs no coroutines.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

from . import Rival, Unsupported


class Adapter(Rival):
    requires = ("steady-queue", "psycopg[pool]")
    apps = ("steady_queue",)
    backlog = 3000
    settings = {
        "TASKS": {
            "default": {
                "BACKEND": "steady_queue.backend.SteadyQueueBackend",
                "QUEUES": ["default"],
                "OPTIONS": {},
            }
        }
    }
    conn_max_age = 0
    # Its README: two more than a worker has threads.
    pool = {"max_size": 10}
    ended = """
        SELECT (SELECT count(*) FROM steady_queue_job WHERE finished_at IS NOT NULL)
            + (SELECT count(*) FROM steady_queue_failedexecution)
    """

    def task(self, function: Callable[..., Any]) -> Any:
        if iscoroutinefunction(function):
            raise Unsupported("steady-queue runs no coroutines.")
        return super().task(function)

    def work(self, processes: int, threads: int) -> None:
        from django.conf import settings
        from django.core.management import call_command
        from steady_queue.configuration import Configuration

        workers = [Configuration.Worker(processes=processes, threads=threads)]
        settings.STEADY_QUEUE = Configuration.Options(workers=workers)
        call_command("steady_queue")
