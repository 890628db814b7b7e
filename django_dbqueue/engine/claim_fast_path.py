"""Claim in a single statement, for an idle worker: its jobs start milliseconds earlier.

PostgreSQL only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from django.db import connections
from django.db.backends.utils import CursorWrapper
from django.db.models import Exists

from ..models import ClaimedJob, Process
from ..models.document import DocumentField, decoded
from ..models.enums import State
from ..models.expressions import composed
from ..models.job import JobQuerySet
from .claim_size import is_small

CLAIM = """
UPDATE {table} SET state = %s, process_id = %s, attempt = attempt + 1,
    started_at = statement_timestamp(), has_begun = false
WHERE id = ANY(ARRAY({wanted} """
UP_TO = "LIMIT %s FOR UPDATE SKIP LOCKED)) RETURNING {columns}"


class SingleStatementClaim:
    """Claim wanted ready jobs for the process, up to a limit, oldest first.

    Jobs with limits or large arguments are left to the claim that handles all jobs.
    """

    def __init__(self, wanted: JobQuerySet, process: Process) -> None:
        self._process, self._model, self._database = process, wanted.model, wanted.db
        fields = wanted.model._meta.concrete_fields
        self._names = [field.attname for field in fields]
        self._documents = [field.attname for field in fields if isinstance(field, DocumentField)]
        owner = Exists(Process.objects.using(wanted.db).filter(pk=process.pk))
        plain = wanted.ready().filter(
            owner, is_small("args"), is_small("kwargs"), limits__isnull=True
        )
        # Not select_for_update(): Django refuses it outside a transaction. This statement is one.
        sql, values = composed(plain.order_by("run_after", "id").values("pk"))
        columns = ", ".join(f'"{field.column}"' for field in fields)
        claim = CLAIM.format(table=f'"{wanted.model._meta.db_table}"', wanted=sql)
        values = (State.RUNNING.value, process.pk, *values)
        self._sql = _quoted(self._database, claim, values) + UP_TO.format(columns=columns)

    def __call__(self, limit: int) -> list[ClaimedJob]:
        with _preparing_cursor(self._database) as cursor:
            cursor.execute(self._sql, [limit])
            rows = cursor.fetchall()
        clock = time.monotonic()
        jobs: list[Any] = [self._model.from_db(self._database, self._names, row) for row in rows]
        for job in jobs:
            loaded = {
                name: decoded(text)
                for name in self._documents
                if (text := getattr(job, name)) is not None
            }
            job.__dict__.update(loaded)
            job.belong_to(self._process, job.started_at, clock)
        return sorted(jobs, key=lambda job: (job.run_after, job.id))


def _quoted(database: str, sql: str, values: Sequence[object]) -> str:
    """Return the statement with its values inlined.

    The statement is prepared, and the planner must know which partial index holds the rows.
    """
    from psycopg import ClientCursor

    connections[database].ensure_connection()
    return ClientCursor(connections[database].connection).mogrify(sql, values).replace("%", "%%")


def _preparing_cursor(database: str) -> CursorWrapper:
    """Return a cursor whose statements the server plans once, if the connection allows that.

    This saves 0.5 ms of 2.2 ms after a pause.
    """
    from django.db.backends.postgresql import base

    connection = connections[database]
    connection.ensure_connection()
    bound_by_server: Any = base.ServerBindingCursor
    make = connection.make_debug_cursor if connection.queries_logged else connection.make_cursor
    return make(bound_by_server(connection.connection))
