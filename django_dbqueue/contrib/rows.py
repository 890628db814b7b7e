"""Rows of a SQL statement as JSON."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
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
# What ends or begins a transaction, at the beginning of a statement. It would commit the effects of
# a job that then fails.
TRANSACTION = re.compile(
    r"(?:^|;)\s*(commit|rollback|abort|begin|end|start\s+transaction|savepoint|release|"
    r"prepare\s+transaction|set\s+transaction|set\s+session\s+characteristics|"
    # MariaDB and MySQL; LOCK TABLE of PostgreSQL has other modes.
    r"set\s+(?:session\s+|@@session\.|@@)?autocommit|lock\s+tables?\s[^;]*\s(?:read|write))\b",
    re.I,
)
# Comments, strings, quoted names, and PostgreSQL's dollar-quoted strings. Whether a backslash
# escapes a quote depends on the database and its settings.
NOT_CODE = [
    re.compile(rf"--[^\n]*|/\*.*?\*/|{text}|\"[^\"]*\"|`[^`]*`|\$(\w*)\$.*?\$\1\$", re.DOTALL)
    for text in (r"'[^']*'", r"'(?:[^'\\]|\\.)*'")
]
# The body of a function or a procedure.
BODY = re.compile(r"\bcreate\s[^;]*\bbegin\b", re.I)
# A comment of MySQL, a string or a quoted name, or other characters.
TOKEN = re.compile(
    r"(?P<comment>--\s[^\n]*|#[^\n]*|/\*(?!M?!).*?\*/)"
    r"""|'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*"|`[^`]*`"""
    r"""|[^\s'"`#/-]+|\S""",
    re.DOTALL,
)


def run(
    sql: str, parameters: Any, database: str, keep: int, header: bool, timeout: timedelta | None
) -> Json:
    """Run the SQL and return the first ``keep`` rows of the last statement.

    The rows are dicts, or with ``header`` lists below the columns. For a statement that returns no
    rows, return the number of changed rows. Raises ValueError for several statements where the
    driver takes one, and for columns of the same name.
    """
    connection = connections[database]
    with connection.cursor() as cursor:
        before = _prepare(cursor, timeout) if connection.vendor == "postgresql" else None
        if connection.vendor == "mysql":
            sql = _without_last_comment(sql)
        _execute(cursor, sql, parameters)
        while True:
            columns, changed = cursor.description, cursor.rowcount
            found = cursor.fetchmany(keep) if columns is not None and keep else []
            # SQLite refuses several statements itself.
            if connection.vendor == "sqlite" or not cursor.nextset():
                break
        if before:
            # The job ends in this transaction, as the role of the alias.
            cursor.execute(
                "SELECT set_config('role', %s, true), set_config('search_path', %s, true)", before
            )
    if columns is None:
        return changed
    names = [column[0] for column in columns]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(
            f"Several columns are named {twice[0]!r}, but each name must be unique. "
            "Rename them with AS."
        )
    values = [[as_json(value) for value in row] for row in found]
    if not header:
        return [dict(zip(names, row, strict=True)) for row in values]
    types = _type_names(connection, [column[1] for column in columns])
    return {
        "columns": [{"name": name, "type": each} for name, each in zip(names, types, strict=True)],
        "rows": values,
    }


def check_transaction(sql: str) -> None:
    """Raise ValueError for a statement that would end the transaction of the job, or change it."""
    found = None
    for not_code in NOT_CODE:
        code = not_code.sub(" ", sql)
        found = None if BODY.search(code) else TRANSACTION.search(code)
        if not found:
            break
    if found:
        raise ValueError(
            f"run_sql: sql must not have {' '.join(found[1].upper().split())}: the statements and "
            "the end of their job are one transaction. Leave it out."
        )


def _prepare(cursor: CursorWrapper, timeout: timedelta | None) -> Any:
    """Set the server's timeout, and have values read that Python cannot hold.

    Return the role and the search path.
    """
    from .postgresql_values import load_as_text

    load_as_text(cursor.cursor)
    limit = math.ceil((timeout.total_seconds() + AFTER) * 1000) if timeout else 0
    cursor.execute(
        "SELECT current_setting('role'), current_setting('search_path'), "
        "set_config('statement_timeout', CASE %s WHEN 0 THEN current_setting('statement_timeout') "
        "ELSE %s END, true)",
        [limit, str(limit)],
    )
    return cursor.fetchone()[:2]


def _execute(cursor: CursorWrapper, sql: str, parameters: Any) -> None:
    try:
        cursor.execute(sql, parameters)
    except Exception as error:
        # SQLite, and PostgreSQL with the option server_side_binding.
        if re.search("one statement at a time|cannot insert multiple commands", str(error)):
            raise ValueError(
                "run_sql: this database's driver takes one statement at a time, but sql has "
                "several. Enqueue a job for each."
            ) from error
        if "COPY cannot be used" in str(error):  # psycopg.
            raise ValueError(
                "run_sql: COPY has its own protocol, which run_sql does not have. Write SELECT or "
                "INSERT, or copy in a task of your own."
            ) from error
        raise


def _without_last_comment(sql: str) -> str:
    """Remove comments after the last semicolon: MySQL takes them for a statement."""
    end = 0
    for token in TOKEN.finditer(sql):
        if not token["comment"]:
            end = token.end()
    return sql[:end] if sql[:end].endswith(";") else sql


def _type_names(connection: Any, codes: list[Any]) -> Sequence[str | None]:
    """Name the types of a cursor's description, None for each that the driver does not tell."""
    if connection.vendor == "mysql":
        # Of two names for one code, the first is the current one.
        constants = reversed(vars(connection.Database.constants.FIELD_TYPE).items())
        known = {code: name for name, code in constants if isinstance(code, int)}
        return [known.get(code) for code in codes]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_catalog.format_type(code, NULL) "
                "FROM unnest(%s::oid[]) WITH ORDINALITY AS types (code, number) ORDER BY number",
                [codes],
            )
            return [name for (name,) in cursor.fetchall()]
    return [None] * len(codes)


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
