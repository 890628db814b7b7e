"""The queue's database as a value: a step begins with some rows, and ends with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import DatabaseError, connection
from django.db.models import F

from django_dbqueue.models import Execution, Job, Process, Semaphore, Slot

# What the database takes for the time, always: time passes as all stored times move back. Six digits, as Django writes them.
NOW = "2030-01-01 12:00:00.500000"
TABLES = [Process, Job, Execution, Semaphore, Slot]
# What decides nothing is left out, so that rows which differ by nothing else are equal.
LEFT_OUT = {
    Execution: dict.fromkeys(["claimed_at", "started_at", "finished_at"], NOW)
    | dict.fromkeys(["error_type", "message", "traceback", "log"], "")
}
UNREAD = {"id", "failure_id"}
ORDER = {Execution: "job_id, attempt", Slot: "semaphore_id, job_id"}
TIMES = {
    Process: ["started_at", "heartbeat_at", "expires_at"],
    Job: ["enqueued_at", "run_after", "expires_at", "started_at", "finished_at", "stop_asked_at"],
}
Rows = tuple[tuple[tuple[Any, ...], ...], ...]


class Violation(Exception):
    """A property does not hold."""


class Row(NamedTuple):
    """What the properties look at in a job."""

    state: str
    attempt: int
    process: int | None
    args: str
    stop: str | None

    @property
    def runs(self) -> bool:
        return self.state == "running"


class Table:
    def __init__(self, model: Any) -> None:
        meta, left_out = model._meta, LEFT_OUT.get(model, {})
        self.columns = [
            field.column for field in meta.concrete_fields if field.column not in left_out
        ]
        if model in ORDER:
            self.columns = [name for name in self.columns if name not in UNREAD]
        names = ", ".join(f'"{name}"' for name in [*self.columns, *left_out])
        places = ", ".join(
            ["?"] * len(self.columns) + [f"'{value}'" for value in left_out.values()]
        )
        # Each job has a slot group of its own here, as nothing follows it on its slot.
        columns = ", ".join(
            "job_id" if name == "slot_group" else f'"{name}"' for name in self.columns
        )
        self.select = (
            f'SELECT {columns} FROM "{meta.db_table}" ORDER BY {ORDER.get(model, meta.pk.column)}'
        )
        self.delete = f'DELETE FROM "{meta.db_table}"'
        self.insert = f'INSERT INTO "{meta.db_table}" ({names}) VALUES ({places})'


class Database:
    """A database in memory behind Django's connection. What is done to equal rows once is not done again."""

    def __init__(self) -> None:
        self._tables = [Table(model) for model in TABLES]
        job = self._tables[1].columns
        self._of_a_row = [
            job.index(name) for name in ("state", "attempt", "process_id", "args", "stop_asked_at")
        ]
        self._executed = [
            self._tables[2].columns.index(name) for name in ("job_id", "attempt", "outcome")
        ]
        self._limits = job.index("limits")
        self._rows: Rows | None = None
        self._done: dict[Any, tuple[Any, Rows]] = {}
        self.calls = 0

    @contextmanager
    def in_memory(self) -> Iterator[Database]:
        """Have Django's connection lead to a copy of the test database, with a clock that stands still."""
        connection.ensure_connection()
        disk = connection.connection
        memory = connection.get_new_connection(
            {**connection.get_connection_params(), "database": ":memory:"}
        )
        memory.isolation_level = None
        disk.backup(memory)
        memory.create_function("STRFTIME", 2, lambda form, when: NOW)
        connection.connection, self._raw = memory, memory
        try:
            yield self
        finally:
            connection.connection = disk
            memory.close()

    def do(self, rows: Rows, key: Any, action: Callable[[], Any]) -> tuple[Any, Rows]:
        """What an action of the engine returns, and the rows after it. Equal keys are equal actions."""
        if (rows, key) not in self._done:
            self._load(rows)
            self.calls += 1
            self._rows = None
            try:
                returned = action()
            except DatabaseError as error:
                raise Violation(f"the database refuses it: {error}") from error
            self._done[rows, key] = returned, self.rows()
        return self._done[rows, key]

    def rows(self) -> Rows:
        self._rows = tuple(
            tuple(self._raw.execute(table.select).fetchall()) for table in self._tables
        )
        return self._rows

    def _load(self, rows: Rows) -> None:
        if self._rows is rows:
            return
        self._raw.execute("BEGIN")
        for table, those in zip(self._tables, rows, strict=True):
            self._raw.execute(table.delete)
            self._raw.executemany(table.insert, those)
        self._raw.execute("COMMIT")

    def later(self, seconds: int) -> None:
        """Time passes."""
        step = timedelta(seconds=seconds)
        for model, names in TIMES.items():
            model.objects.update(**{name: F(name) - step for name in names})

    def jobs(self, rows: Rows) -> list[Row]:
        """In the order of their ids, which is that of their calls."""
        return [Row(*(row[place] for place in self._of_a_row)) for row in rows[1]]

    def ids(self, rows: Rows) -> list[UUID]:
        return [UUID(hex=row[0]) for row in rows[1]]

    def executions(self, rows: Rows) -> dict[tuple[UUID, int], str]:
        """The outcomes of attempts."""
        found = [[row[place] for place in self._executed] for row in rows[2]]
        return {(UUID(hex=job), attempt): outcome for job, attempt, outcome in found}

    def limited_and_running(self, rows: Rows) -> int:
        return sum(
            row.runs and limits[self._limits] is not None
            for row, limits in zip(self.jobs(rows), rows[1], strict=True)
        )

    def processes(self, rows: Rows) -> set[int]:
        return {row[0] for row in rows[0]}
