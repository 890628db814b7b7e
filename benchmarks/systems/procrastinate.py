"""Procrastinate with its Django app: an event loop that runs functions in threads; or forks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

from . import Rival, fork


class Adapter(Rival):
    requires = ("procrastinate[django]",)
    apps = ("procrastinate.contrib.django",)
    ended = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('succeeded', 'failed')"

    def task(self, function: Callable[..., Any]) -> Any:
        from procrastinate.contrib.django import app

        return app.task(function)

    def enqueue(self, task: Any, *args: Any) -> None:
        task.defer(**_named(task, args))

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        task.batch_defer(*[_named(task, call) for call in calls])

    def work(self, processes: int, threads: int) -> None:
        from django.core.management import call_command

        fork(processes)
        call_command(
            "procrastinate",
            "worker",
            "--concurrency",
            os.environ.get("BENCH_COROUTINES", str(threads)),
        )


def _named(task: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments by name, as it requires."""
    return dict(zip(signature(task.func).parameters, args, strict=True)) if args else {}
