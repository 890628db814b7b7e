"""A statement's rows as JSON."""

from __future__ import annotations

import math
from collections import Counter
from datetime import date, datetime, time, timedelta
from typing import Any

from django.db import connections
from django.utils.duration import duration_iso_string

# How many rows are kept, unless the call says otherwise.
KEPT = 1000
# The server's limit comes so many seconds after the task's own: it frees the thread for what was raised in it.
AFTER = 0.5


def run(sql: str, parameters: Any, database: str, keep: int, timeout: timedelta | None) -> Any:
    """The first ``keep`` rows of a statement as dicts; of a statement that has none, how many it changed.

    Raises ValueError for several statements, and for columns of one name: a part of what they give would be lost.
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
            raise ValueError("run_sql takes one statement, and was given several. Enqueue a job for each.")
        return result


def _rows(cursor: Any, keep: int) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(f"Several columns are called {twice[0]!r}, and a row is a dict. Give them different names with AS.")
    found = cursor.fetchmany(keep) if keep else []
    return [dict(zip(names, map(as_json, row), strict=True)) for row in found]


def as_json(value: Any) -> Any:
    """A value that a database has given. What JSON has no type for is text."""
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
