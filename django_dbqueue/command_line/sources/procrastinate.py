"""procrastinate: one table on PostgreSQL, whose models are read-only by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connections

from ...limits import LONGEST_GROUP, limit
from .source import Source, Waiting

# Its own tasks, such as the deletion of old jobs.
BUILT_IN = "builtin:"


class Procrastinate(Source):
    name, app = "procrastinate", "procrastinate"
    order = ("-priority", "pk")

    def parts(self) -> list[Any]:
        rows = self.model("ProcrastinateJob").objects.filter(status="todo")
        return [rows.exclude(task_name__startswith=BUILT_IN)]

    def read(self, row: Any) -> Waiting:
        options: dict[str, Any] = {}
        if row.lock:  # Jobs with one lock run one after the other.
            options["concurrency"] = limit(1, group=row.lock[:LONGEST_GROUP])
        if row.queueing_lock:  # One job with it waits.
            options["key"] = row.queueing_lock
        return Waiting(
            task=row.task_name,
            kwargs=row.args,
            queue=row.queue_name,
            priority=row.priority,
            run_after=row.scheduled_at,
            options=options,
        )

    def remove(self, rows: Sequence[Any]) -> None:
        # The log of a periodic task stays: it keeps the same time from being deferred again.
        with connections[rows[0]._state.db].cursor() as cursor:
            cursor.execute(
                "DELETE FROM procrastinate_jobs WHERE id = ANY(%s)", [[row.pk for row in rows]]
            )
