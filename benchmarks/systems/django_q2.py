"""Django Q2 with its ORM broker: its workers are processes, as many as others have threads.

It enqueues many jobs one by one, and runs no coroutines.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

from . import Rival, Unsupported


class Adapter(Rival):
    requires = ("django-q2",)
    apps = ("django_q",)
    backlog = 5000
    # The settings of its page on brokers. It keeps all jobs, as the others do: its default keeps
    # the last 250, locks all of these for every job, and has a third of the rate.
    settings = {
        "Q_CLUSTER": {
            "name": "DjangORM",
            "timeout": 90,
            "retry": 120,
            "queue_limit": 50,
            "bulk": 10,
            "save_limit": 0,
            "orm": "default",
            "log_level": "WARNING",
        }
    }

    def count_ended(self, query: Callable[[str], Any], jobs: int) -> int:
        return jobs - int(query("SELECT count(*) FROM django_q_ormq"))

    def task(self, function: Callable[..., Any]) -> Any:
        if iscoroutinefunction(function):
            raise Unsupported("Django Q2 runs no coroutines.")
        return function

    def enqueue(self, task: Any, *args: Any) -> None:
        from django_q.tasks import async_task

        async_task(task, *args)

    def work(self, processes: int, threads: int) -> None:
        from django.core.management import call_command
        from django_q.conf import Conf

        Conf.WORKERS = processes * threads
        call_command("qcluster")
