"""dj-queue: a supervisor with workers, a dispatcher and a scheduler, each a process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import Rival


class Adapter(Rival):
    requires = ("dj-queue",)
    apps = ("dj_queue",)
    settings = {
        "TASKS": {
            "default": {"BACKEND": "dj_queue.backend.DjQueueBackend", "QUEUES": [], "OPTIONS": {}}
        },
        "DATABASE_ROUTERS": ["dj_queue.routers.DjQueueRouter"],
    }
    ended = """
        SELECT (SELECT count(*) FROM dj_queue_jobs WHERE finished_at IS NOT NULL)
            + (SELECT count(*) FROM dj_queue_failed_executions)
    """

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        task.get_backend().enqueue_all([(task, list(call), {}) for call in calls])

    def work(self, processes: int, threads: int) -> None:
        from django.conf import settings
        from django.core.management import call_command

        settings.TASKS["default"]["OPTIONS"]["workers"] = [
            {"processes": processes, "threads": threads}
        ]
        call_command("dj_queue")
