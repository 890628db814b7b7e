"""Locks that step over rows which others hold, and on MySQL and MariaDB take no lock but those of primary keys.

InnoDB locks the index entry by which it finds a row, then the row; who changes that row locks them the other way round. Where it
steps over a row, it keeps the lock of the entry. So rows are found without locks there, and locked or deleted by primary key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from django.db import connections, models
from django.db.models.sql.datastructures import BaseTable

QS = TypeVar("QS", bound=models.QuerySet[Any])

# So often rows that others hold are passed by, and so many at a time.
PARTS = 50
MOST_IN_A_PART = 1000


def lock(rows: QS) -> QS:
    """Lock the rows, stepping over those that somebody else holds. SQLite locks as a whole and needs nothing said.

    For rows that are found by their primary key, or that are few.
    """
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked)


def lock_first(rows: QS, limit: int) -> list[Any]:
    """Lock the first rows that no other transaction has locked. Returns them."""
    found: list[Any] = []
    for part in locked_parts(rows, limit):
        found += part[: limit - len(found)]
        if len(found) == limit:
            break
    return found


def locked_parts(rows: QS, limit: int) -> Iterator[QS]:
    """Yield locked rows in parts. The caller reads each part before the next, and stops when it has enough rows."""
    if not _is_mysql(rows):
        yield lock(rows)[:limit]
        return
    passed: set[Any] = set()
    size = limit
    for _ in range(PARTS):
        # Most of those that were passed are gone: others have claimed them. To exclude them all would take longer.
        found = list(_stored_keys(rows)[: size + len(passed)])
        if keys := [key for key in found if key not in passed]:
            yield lock(_by_key(rows, keys))
        if len(found) < size + len(passed):
            return
        passed.update(keys)
        size = min(2 * size, MOST_IN_A_PART)


def lock_keys(rows: QS, keys: Sequence[Any]) -> list[Any]:
    """Lock the rows with these keys, without those that other transactions have locked. Returns the keys of the locked rows."""
    if _is_mysql(rows):
        field: Any = rows.model._meta.pk
        wanted = _by_key(rows, [field.get_db_prep_value(key, connections[rows.db]) for key in keys])
    else:
        wanted = rows.filter(pk__in=keys)
    return list(lock(wanted).order_by("pk").values_list("pk", flat=True))


def delete(rows: models.QuerySet[Any]) -> int:
    """Delete rows that nothing refers to. Returns how many."""
    if not _is_mysql(rows):
        return rows._raw_delete(rows.db)
    if not (keys := list(_stored_keys(rows.order_by()))):
        return 0
    connection: Any = connections[rows.db]
    table = _JoinedToKeys(rows.model, keys)
    source, values = table.as_sql(None, connection)
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE {connection.ops.quote_name(table.table_name)} FROM {source}", values)
        return int(cursor.rowcount)


def _stored_keys(rows: models.QuerySet[Any]) -> Any:
    """As the database has them: to make UUIDs of them and back takes 10 µs for each."""
    key = models.Func(models.F("pk"), template="%(expressions)s", output_field=models.TextField())
    return rows.values_list(key, flat=True)


def _by_key(rows: QS, keys: Sequence[Any]) -> QS:
    found = rows.all()
    found.query.alias_map[found.query.get_initial_alias()] = _JoinedToKeys(rows.model, keys)
    return found


class _JoinedToKeys(BaseTable):
    """A table in a FROM, joined with some of its keys as the database has them, these first.

    With the keys in a WHERE, the optimizer may read, and lock, all rows of a small table, or entries of another index.
    """

    def __init__(self, model: type[models.Model], keys: Sequence[Any]) -> None:
        super().__init__(model._meta.db_table, model._meta.db_table)
        self._column: Any = model._meta.pk.column
        self._keys = keys

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        table, column = map(connection.ops.quote_name, (self.table_name, self._column))
        keys = " UNION ALL ".join(["SELECT %s AS wanted", *["SELECT %s"] * (len(self._keys) - 1)])
        sql = f"({keys}) AS wanted STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON {table}.{column} = wanted.wanted"
        return sql, list(self._keys)


def _is_mysql(rows: models.QuerySet[Any]) -> bool:
    return connections[rows.db].vendor == "mysql"
