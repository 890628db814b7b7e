"""The database as a value: a step starts with some rows and ends with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import DatabaseError, connection
from django.db.models import F

from django_dbqueue.models import Execution, Job, Process, Semaphore, Slot

# The database's constant time, with six digits as Django writes it. Stored times move back instead.
NOW = "2030-01-01 12:00:00.500000"
TABLES = [Process, Job, Execution, Semaphore, Slot]
# Columns without influence are left out, so that equivalent rows are equal.
LEFT_OUT = {
    Execution: dict.fromkeys(["claimed_at", "started_at", "finished_at"], NOW)
    | dict.fromkeys(["error_type", "message", "traceback", "log"], "")
}
UNREAD = {"id", "failure_id"}
ORDER = {Execution: "job_id, attempt", Slot: "semaphore_id, job_id"}
TIMES = {
    Process: ["started_at", "heartbeat_at", "expires_at"],
    Job: [
        "enqueued_at",
        "run_after",
        "expires_at",
        "started_at",
        "finished_at",
        "stop_requested_at",
    ],
}
Rows = tuple[tuple[tuple[Any, ...], ...], ...]


class Violation(Exception):
    """A property is violated."""


class Row(NamedTuple):
    """The columns of a job that the properties read."""

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
        # Each job has its own slot group here: no other job shares its slot.
        columns = ", ".join(
            "job_id" if name == "slot_group" else f'"{name}"' for name in self.columns
        )
        self.select = (
            f'SELECT {columns} FROM "{meta.db_table}" ORDER BY {ORDER.get(model, meta.pk.column)}'
        )
        self.delete = f'DELETE FROM "{meta.db_table}"'
        self.insert = f'INSERT INTO "{meta.db_table}" ({names}) VALUES ({places})'


class Database:
    """An in-memory database behind Django's connection. Actions on equal rows run once."""

    def __init__(self) -> None:
        self._tables = [Table(model) for model in TABLES]
        job = self._tables[1].columns
        self._of_a_row = [
            job.index(name)
            for name in ("state", "attempt", "process_id", "args", "stop_requested_at")
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
        """Point Django's connection at a copy of the test database with a constant clock."""
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
        """Return the action's result and the rows after it. Equal keys are equal actions."""
        if (rows, key) not in self._done:
            self._load(rows)
            self.calls += 1
            self._rows = None
            try:
                returned = action()
            except DatabaseError as error:
                raise Violation(f"the database refuses the step: {error}") from error
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
        """Let time pass: move all stored times back."""
        step = timedelta(seconds=seconds)
        for model, names in TIMES.items():
            model.objects.update(**{name: F(name) - step for name in names})

    def jobs(self, rows: Rows) -> list[Row]:
        """Return jobs in the order of their ids, which is the order of their calls."""
        return [Row(*(row[place] for place in self._of_a_row)) for row in rows[1]]

    def ids(self, rows: Rows) -> list[UUID]:
        return [UUID(hex=row[0]) for row in rows[1]]

    def executions(self, rows: Rows) -> dict[tuple[UUID, int], str]:
        """Return the outcome of each attempt."""
        found = [[row[place] for place in self._executed] for row in rows[2]]
        return {(UUID(hex=job), attempt): outcome for job, attempt, outcome in found}

    def count_limited_running(self, rows: Rows) -> int:
        return sum(
            row.runs and limits[self._limits] is not None
            for row, limits in zip(self.jobs(rows), rows[1], strict=True)
        )

    def processes(self, rows: Rows) -> set[int]:
        return {row[0] for row in rows[0]}
