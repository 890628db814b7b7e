"""Rows of a SQL statement as JSON."""

from __future__ import annotations

import math
from collections import Counter
from datetime import date, datetime, time, timedelta
from typing import Any

from django.db import connections
from django.db.backends.utils import CursorWrapper
from django.utils.duration import duration_iso_string

from ..core.serialization import Json

# Number of rows to keep by default.
KEPT = 1000
# Seconds between the task's timeout and the server's. The server's timeout frees the thread for the
# exception that was raised in it.
AFTER = 0.5


def run(sql: str, parameters: Any, database: str, keep: int, timeout: timedelta | None) -> Json:
    """Run a statement and return its first ``keep`` rows as dicts.

    For a statement that returns no rows, return the number of changed rows. Raises ValueError for
    several statements, and for columns of the same name, as part of their result would be lost.
    """
    connection = connections[database]
    with connection.cursor() as cursor:
        if timeout and connection.vendor == "postgresql":
            limit = math.ceil((timeout.total_seconds() + AFTER) * 1000)
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [str(limit)])
        cursor.execute(sql, parameters)
        result = cursor.rowcount if cursor.description is None else _rows(cursor, keep)
        # SQLite refuses several statements itself.
        if connection.vendor != "sqlite" and cursor.nextset():
            raise ValueError(
                "run_sql takes one statement, but got several. Enqueue a job for each."
            )
        return result


def _rows(cursor: CursorWrapper, keep: int) -> list[dict[str, Json]]:
    names = [column[0] for column in cursor.description]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(
            f"Several columns are named {twice[0]!r}, but a row is a dict. Rename them with AS."
        )
    found = cursor.fetchmany(keep) if keep else []
    return [dict(zip(names, map(as_json, row), strict=True)) for row in found]


def as_json(value: object) -> Json:
    """Convert a database value to JSON. Values without a JSON type become text."""
    match value:
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return value.replace("\x00", "")
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return duration_iso_string(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case list() | tuple():
            return [as_json(each) for each in value]
        case dict():
            return {str(name): as_json(each) for name, each in value.items()}
    return str(value)
