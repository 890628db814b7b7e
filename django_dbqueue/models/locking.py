"""Locks that step over rows which others hold, and on MySQL and MariaDB take no lock but those of primary keys.

InnoDB locks the index entry by which it finds a row, then the row; who changes that row locks them the other way round. Where it
steps over a row, it keeps the lock of the entry. So rows are found without locks there, and locked or deleted by primary key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from django.db import connections, models

QS = TypeVar("QS", bound=models.QuerySet[Any])

# So often rows that others hold are passed by, and so many at a time.
PARTS = 50
MOST_IN_A_PART = 1000


def lock(rows: QS, **options: Any) -> QS:
    """Lock the rows, stepping over those that somebody else holds. SQLite locks as a whole and needs nothing said.

    For rows that are found by their primary key, or that are few.
    """
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked, **options)


def lock_first(rows: QS, limit: int) -> list[Any]:
    """The first of these rows that nobody else holds, locked."""
    found: list[Any] = []
    for part in locked_parts(rows, limit):
        found += part[: limit - len(found)]
        if len(found) == limit:
            break
    return found


def locked_parts(rows: QS, limit: int) -> Iterator[QS]:
    """As lock_first, for a caller who reads each part before the next, and stops when there is enough."""
    if not _is_mysql(rows):
        yield lock(rows)[:limit]
        return
    passed: list[Any] = []
    size = limit
    for _ in range(PARTS):
        keys = list(rows.exclude(pk__in=passed).values_list("pk", flat=True)[:size])
        # Read once more: what has changed before it was locked is left out.
        yield rows.filter(pk__in=_lock_keys(rows, keys))
        if len(keys) < size:
            return
        passed += keys
        size = min(2 * size, MOST_IN_A_PART)


def lock_keys(rows: QS, keys: Sequence[Any]) -> list[Any]:
    """Lock those of these rows that have one of the keys and that nobody else holds. Returns their keys."""
    if not _is_mysql(rows):
        return list(lock(rows.filter(pk__in=keys).order_by("pk")).values_list("pk", flat=True))
    return list(rows.filter(pk__in=_lock_keys(rows, keys)).values_list("pk", flat=True))


def delete(rows: models.QuerySet[Any]) -> int:
    """Delete rows that nothing refers to. Returns how many."""
    if not _is_mysql(rows):
        return rows._raw_delete(rows.db)
    if not (keys := list(rows.order_by().values_list("pk", flat=True))):
        return 0
    table, source, values = _by_key(rows, keys)
    with connections[rows.db].cursor() as cursor:
        cursor.execute(f"DELETE {table} FROM {source}", values)
        return int(cursor.rowcount)


def _lock_keys(rows: models.QuerySet[Any], keys: Sequence[Any]) -> list[Any]:
    if not keys:
        return []
    table, source, values = _by_key(rows, keys)
    column = connections[rows.db].ops.quote_name(rows.model._meta.pk.column)
    skip = " SKIP LOCKED" if connections[rows.db].features.has_select_for_update_skip_locked else ""
    found = rows.model._base_manager.using(rows.db).raw(f"SELECT {table}.{column} FROM {source} FOR UPDATE{skip}", values)
    return [row.pk for row in found]


def _by_key(rows: models.QuerySet[Any], keys: Sequence[Any]) -> tuple[str, str, list[Any]]:
    """The table, and it joined with the keys: with them in a WHERE, all rows of a small table are read, and locked."""
    connection: Any = connections[rows.db]
    field: Any = rows.model._meta.pk
    table, column = map(connection.ops.quote_name, (rows.model._meta.db_table, field.column))
    wanted = " UNION ALL ".join(["SELECT %s AS wanted", *["SELECT %s"] * (len(keys) - 1)])
    source = f"({wanted}) AS wanted STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON {table}.{column} = wanted.wanted"
    return table, source, [field.get_db_prep_value(key, connection) for key in keys]


def _is_mysql(rows: models.QuerySet[Any]) -> bool:
    return connections[rows.db].vendor == "mysql"
