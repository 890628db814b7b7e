"""This project, with its defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import System


class Adapter(System):
    requires = ("-e", ".")
    apps = ("django_dbqueue",)
    settings = {"TASKS": {"default": {"BACKEND": "django_dbqueue.backend.DatabaseBackend"}}}
    ended = "SELECT count(*) FROM dbqueue_job WHERE state IN ('successful', 'failed')"

    def task(self, function: Callable[..., Any]) -> Any:
        from django_dbqueue import task

        return task(function)

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        task.enqueue_many(calls)

    def work(self, processes: int, threads: int) -> None:
        from django.core.management import call_command

        call_command("runqueue", processes=processes, threads=threads)
