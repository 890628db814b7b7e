"""SKIP LOCKED row locks; on MySQL and MariaDB, only primary keys are locked.

InnoDB locks the index entry that leads to a row, then the row. A transaction that changes the row
locks both in the opposite order. When InnoDB skips a locked row, it keeps the lock of the index
entry. On MySQL and MariaDB, rows are therefore found without locks, and locked or deleted by
primary key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections, models
from django.db.models.sql.datastructures import BaseTable

from .expressions import Sql, by_index, composed

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

K = TypeVar("K")
QS = TypeVar("QS", bound=models.QuerySet[models.Model, object])

# Rows that the first statement finds for each row that it may lock: other claims hold the first.
MARGIN = 4
# Limits on skipping more rows that other transactions hold: number of parts, and rows in one part.
PARTS = 50
MOST_IN_A_PART = 1000


def lock(rows: QS) -> QS:
    """SELECT … FOR UPDATE SKIP LOCKED; no-op on SQLite, which locks the whole database.

    For rows that are found by primary key, or that are few.
    """
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked)


def by_primary_key(rows: QS) -> QS:
    """Return rows that are filtered by their primary keys, found by these alone.

    Of a small table, MySQL would else read all rows or another index, and lock what it reads.
    """
    return by_index(rows, "PRIMARY")


def lock_waiting(rows: QS) -> QS:
    """SELECT … FOR UPDATE, which waits for other transactions; no-op on SQLite."""
    return rows.select_for_update() if connections[rows.db].features.has_select_for_update else rows


def lock_first(rows: QS, limit: int) -> list[Any]:
    """Lock and return the first rows that no other transaction has locked.

    ``rows`` are instances or lists of values; the first value is the primary key.
    """
    found: list[Any] = []
    for part in locked_parts(rows, limit, found):
        found += part
    return found


def lock_first_part(rows: QS, limit: int) -> QS:
    """Lock some of the first rows that no other transaction has locked; there may be more.

    It takes one statement.
    """
    return lock(_first(rows, MARGIN * limit) if _is_mysql(rows) else rows)[:limit]


def locked_parts(rows: QS, limit: int, found: list[Any]) -> Iterator[QS]:
    """Yield the first rows that no other transaction has locked, in parts, and lock them.

    The caller adds each part to ``found`` before it takes the next.
    """
    try:
        yield lock_first_part(rows, limit)
    except EmptyResultSet:  # By their filter or the limit there are none.
        return
    if not _is_mysql(rows):
        return
    prepare = rows.model._meta.pk.get_db_prep_value
    passed = {str(prepare(_key_of(row), connections[rows.db])) for row in found}
    size = limit
    for _ in range(PARTS):
        if len(found) == limit:
            return
        # Most of the rows passed by are gone: other transactions have claimed them. Excluding all
        # of them in SQL would take longer.
        keys = [str(key) for key in _stored_keys(rows)[: size + len(passed)]]
        if new := [key for key in keys if key not in passed]:
            yield lock(_by_key(rows, new))[: limit - len(found)]
        if len(keys) < size + len(passed):
            return
        passed.update(new)
        size = min(2 * size, MOST_IN_A_PART)


def _key_of(row: Any) -> object:
    if isinstance(row, models.Model):
        return row.pk
    return row[0] if isinstance(row, tuple) else row


def lock_keys(rows: QS, keys: Sequence[K], lock: Callable[[QS], QS] = lock) -> list[K]:
    """Lock the rows with these keys, and return their keys.

    ``lock`` skips rows that other transactions have locked, or waits for them.
    """
    if _is_mysql(rows):
        field = rows.model._meta.pk
        wanted = _by_key(rows, [field.get_db_prep_value(key, connections[rows.db]) for key in keys])
    else:
        wanted = rows.filter(pk__in=keys)
    return list(lock(wanted).order_by("pk").values_list("pk", flat=True))


def is_of_one_table(rows: models.QuerySet[models.Model, object]) -> bool:
    """Return True if the query reads each row of one table, and nothing beside it."""
    query = rows.query
    joined = [alias for alias in query.alias_map if query.alias_refcount[alias]]
    return len(joined) <= 1 and not (query.distinct or query.annotations or query.extra_tables)


def delete(rows: models.QuerySet[models.Model, object]) -> int:
    """Delete rows that nothing refers to, on MySQL in the order of their keys.

    Return their number.
    """
    if not _is_mysql(rows):
        return rows._raw_delete(rows.db)
    if not (keys := list(_stored_keys(rows.order_by("pk")))):
        return 0
    connection = connections[rows.db]
    table = _JoinedToKeys(rows.model, _listed(keys))
    source, values = table.as_sql(None, connection)
    with connection.cursor() as cursor:
        cursor.execute(
            f"DELETE {connection.ops.quote_name(table.table_name)} FROM {source}", values
        )
        return int(cursor.rowcount)


def _stored_keys(
    rows: models.QuerySet[models.Model, object],
) -> models.QuerySet[models.Model, object]:
    """Primary keys in the database's form. The conversion to UUID and back takes 10 µs a key."""
    key = models.Func(models.F("pk"), template="%(expressions)s", output_field=models.TextField())
    return rows.values_list(key, flat=True)


def _by_key(rows: QS, keys: Sequence[object]) -> QS:
    """Return those of the rows that have these keys, in the order of the keys."""
    return _joined(rows, _listed(keys))


def _listed(keys: Sequence[object]) -> Sql:
    return f"SELECT %s AS wanted{' UNION ALL SELECT %s' * (len(keys) - 1)}", tuple(keys)


def _first(rows: QS, limit: int) -> QS:
    """Return the first of the rows in their order. A lock on the result locks no others."""
    return _joined(rows, composed(rows.values(wanted=models.F("pk"))[:limit]))


def _joined(rows: QS, keys: Sql) -> QS:
    found = rows.all()
    # The keys are in order. A sort would come after the locks, and a LIMIT after the sort.
    found.query.clear_ordering(force=True)
    found.query.alias_map[found.query.get_initial_alias()] = _JoinedToKeys(rows.model, keys)
    return found


class _JoinedToKeys(BaseTable):
    """A table in a FROM clause, joined after a table of its primary keys in the database's form.

    With the keys in a WHERE clause, the optimizer may read, and lock, all rows of a small table,
    or entries of another index.
    """

    def __init__(self, model: type[models.Model], keys: Sql) -> None:
        super().__init__(model._meta.db_table, model._meta.db_table)
        self._column: Any = model._meta.pk.column
        self._keys = keys

    def as_sql(self, compiler: SQLCompiler | None, connection: BaseDatabaseWrapper) -> Sql:
        table, column = map(connection.ops.quote_name, (self.table_name, self._column))
        keys, values = self._keys
        sql = (
            f"({keys}) AS wanted STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY)"
            f" ON {table}.{column} = wanted.wanted"
        )
        return sql, values


def _is_mysql(rows: models.QuerySet[models.Model, object]) -> bool:
    return connections[rows.db].vendor == "mysql"
