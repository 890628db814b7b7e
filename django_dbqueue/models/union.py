"""Many small selects in few statements, by UNION ALL: each statement costs a round trip."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.db import connections, models

from .expressions import Sql

# Selects in one statement. SQLite takes 500, and 999 values for them.
TOGETHER = 300


def union_all(database: str, selects: Sequence[Sql]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of all selects, as the database's driver returns them.

    A select with ORDER BY or LIMIT must be a subselect of another: SQLite takes neither in a part
    of a union.
    """
    for start in range(0, len(selects), TOGETHER):
        part = selects[start : start + TOGETHER]
        sql = " UNION ALL ".join(sql for sql, _values in part)
        with connections[database].cursor() as cursor:
            cursor.execute(sql, [value for _sql, values in part for value in values])
            rows = cursor.fetchall()
        yield from rows


def time_converter(database: str) -> Callable[[Any], Any]:
    """Return the function that makes a time of what the database's driver returns."""
    connection = connections[database]
    time = models.Value(None, output_field=models.DateTimeField())
    converters = connection.ops.get_db_converters(time)

    def convert(value: Any) -> Any:
        for each in converters:
            value = each(value, time, connection)
        return value

    return convert
