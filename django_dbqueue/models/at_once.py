"""A claim in one statement, for a worker that has nothing to do: its jobs start milliseconds earlier. PostgreSQL only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .process import Process
from .states import State

if TYPE_CHECKING:
    from .job import Job
    from .jobs import JobQuerySet

CLAIM = """
UPDATE {table} SET state = %s, process_id = %s, attempt = attempt + 1, started_at = statement_timestamp(), has_begun = false,
    asked_again = false, stop_asked_at = NULL
WHERE id = ANY(ARRAY({wanted} FOR UPDATE SKIP LOCKED)) RETURNING *
"""


class ClaimAtOnce:
    """Makes up to ``limit`` of the jobs that are wanted and ready the process's own, oldest first.

    Those with limits, or that were asked for again, are left to the claim that can do all. The ORM takes longer to compose
    the statement than the database to run it: it is kept.
    """

    def __init__(self, wanted: JobQuerySet, process: Process, limit: int) -> None:
        self._process, self._jobs = process, wanted.model._base_manager.using(wanted.db)
        plain = wanted.ready().filter(limits__isnull=True, asked_again=False).order_by("run_after", "id")
        # Not select_for_update(), which Django refuses outside of a transaction: this statement is one.
        sql, values = plain.values("pk")[:limit].query.sql_with_params()
        self._sql = CLAIM.format(table=f'"{wanted.model._meta.db_table}"', wanted=sql)
        self._values = (State.RUNNING.value, process.pk, *values)

    def __call__(self) -> list[Job]:
        jobs = sorted(self._jobs.raw(self._sql, self._values), key=lambda job: (job.run_after, job.id))
        clock = time.monotonic()
        for job in jobs:
            job.belong_to(self._process, job.started_at, clock)
        return jobs
