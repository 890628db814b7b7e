"""A claim in one statement, for a worker that has nothing to do: its jobs start milliseconds earlier. PostgreSQL only."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from django.db import connections, models

from .process import Process
from .states import State

if TYPE_CHECKING:
    from .job import Job
    from .jobs import JobQuerySet

CLAIM = """
UPDATE {table} SET state = %s, process_id = %s, attempt = attempt + 1, started_at = statement_timestamp(), has_begun = false,
    asked_again = false, stop_asked_at = NULL
WHERE id = ANY(ARRAY({wanted} FOR UPDATE SKIP LOCKED)) RETURNING {columns}
"""


class ClaimAtOnce:
    """Makes up to ``limit`` of the jobs that are wanted and ready the process's own, oldest first.

    Those with limits, or that were asked for again, are left to the claim that can do all. The ORM takes longer to compose
    the statement than the database to run it: it is kept.
    """

    def __init__(self, wanted: JobQuerySet, process: Process, limit: int) -> None:
        self._process, self._model, self._database = process, wanted.model, wanted.db
        fields = wanted.model._meta.concrete_fields
        self._names = [field.attname for field in fields]
        self._documents = [field.attname for field in fields if isinstance(field, models.JSONField)]
        plain = wanted.ready().filter(limits__isnull=True, asked_again=False).order_by("run_after", "id")
        # Not select_for_update(), which Django refuses outside of a transaction: this statement is one.
        sql, values = plain.values("pk")[:limit].query.sql_with_params()
        columns = ", ".join(f'"{field.column}"' for field in fields)
        self._sql = CLAIM.format(table=f'"{wanted.model._meta.db_table}"', wanted=sql, columns=columns)
        self._values = (State.RUNNING.value, process.pk, *values)

    def __call__(self) -> list[Job]:
        with connections[self._database].cursor() as cursor:
            cursor.execute(self._sql, self._values)
            rows = cursor.fetchall()
        clock = time.monotonic()
        jobs = [self._model.from_db(self._database, self._names, row) for row in rows]
        for job in jobs:
            loaded = {name: json.loads(text) for name in self._documents if (text := getattr(job, name)) is not None}
            job.__dict__.update(loaded)
            job.belong_to(self._process, job.started_at, clock)
        return sorted(jobs, key=lambda job: (job.run_after, job.id))
