"""django-ox: worker processes under a supervisor, with a pool of threads each."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from . import Rival


class Adapter(Rival):
    requires = ("django-ox",)
    apps = ("django_ox",)
    settings = {"TASKS": {"default": {"BACKEND": "django_ox.backend.OxBackend"}}}
    ended = "SELECT count(*) FROM django_ox_oxtask WHERE status IN ('SUCCESSFUL', 'FAILED', 'LOST')"

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        from django_ox.bulk import enqueue_many

        enqueue_many(task, [(call, {}) for call in calls])

    def work(self, processes: int, threads: int) -> None:
        from django.core.management import call_command

        # Its supervisor starts processes with its own command line, and accepts only Django's.
        sys.argv[0] = "django-admin"
        call_command("ox_worker", processes=processes, concurrency=threads)
