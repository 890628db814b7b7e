"""This project, with its defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from . import System, Unsupported

# By number, one a millisecond up to now: version 7 (RFC 9562 §5.7).
ID = """(
    lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint - {jobs} + number), 12, '0')
    || '7' || substr(replace(gen_random_uuid()::text, '-', ''), 14)
)::uuid"""
EARLIER = "now() - interval '3 days'"
# Columns of each kind of job that differ from a new job's.
KINDS = {
    "ready": {},
    "finished": {
        "state": "'successful'",
        "attempt": "1",
        **dict.fromkeys(["enqueued_at", "run_after", "started_at", "finished_at"], EARLIER),
    },
    "unserved": {"queue": "'other'"},
    "tomorrow": {"state": "'scheduled'", "run_after": "now() + interval '1 day'"},
    "lanes": {"queue": "'queue' || mod(number, 20)", "priority": "mod(number / 20, 10)"},
}
EXECUTIONS = """
INSERT INTO dbqueue_execution
    (job_id, attempt, outcome, process, claimed_at, started_at, finished_at,
    error_type, message, traceback, log)
SELECT id, attempt, state, 'worker@benchmark:1:abc', started_at, started_at, finished_at,
    '', '', '', ''
FROM dbqueue_job WHERE state = 'successful'
"""


class Adapter(System):
    requires = ("-e", ".")
    apps = ("django_dbqueue",)
    settings = {
        "TASKS": {
            "default": {
                "BACKEND": "django_dbqueue.backend.DatabaseBackend",
                "QUEUES": [] if os.environ.get("BENCH_ANY_QUEUE") else ["default"],
                "OPTIONS": {"coroutines": int(os.environ.get("BENCH_COROUTINES", "1000"))},
            }
        }
    }
    # Each job has one execution. The query runs ten times a second, and a count of a million rows
    # would keep a core busy.
    ended = "SELECT coalesce(max(id), 0) FROM dbqueue_execution"

    def task(self, function: Callable[..., Any]) -> Any:
        from django_dbqueue import task

        return task(function)

    def limited(self, function: Callable[..., Any]) -> Any:
        from django_dbqueue import limit, task

        return task(concurrency=limit(1))(function)

    def limited_by_key(self, function: Callable[..., Any]) -> Any:
        from django_dbqueue import limit, task

        return task(concurrency=limit(2, key=lambda customer: customer))(function)

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        task.enqueue_many(calls)

    def fill(self, kind: str, jobs: int) -> None:
        """Insert copies of an enqueued job."""
        from django.db import connection, transaction

        from django_dbqueue.models import Job

        from ..project.tasks import noop

        if connection.vendor != "postgresql":
            raise Unsupported("Only PostgreSQL is filled.")
        columns = {field.column: f'job."{field.column}"' for field in Job._meta.concrete_fields}
        columns |= {"id": ID.format(jobs=jobs), **KINDS[kind]}
        names = ", ".join(f'"{name}"' for name in columns)
        with transaction.atomic(), connection.cursor() as cursor:
            one = noop.enqueue().id
            source = f"FROM dbqueue_job job, generate_series(1, {jobs}) AS number WHERE job.id = %s"
            cursor.execute(
                f"INSERT INTO dbqueue_job ({names}) SELECT {', '.join(columns.values())} {source}",
                [one],
            )
            cursor.execute("DELETE FROM dbqueue_job WHERE id = %s", [one])
            if kind == "finished":
                cursor.execute(EXECUTIONS)

    def work(self, processes: int, threads: int) -> None:
        from django.core.management import call_command

        call_command("runqueue", processes=processes, threads=threads)
