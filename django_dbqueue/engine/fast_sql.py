"""Write rows like the ORM, but much faster: a busy queue does this more than anything else.

Figures are per row, on two cores shared with the database.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any
from uuid import UUID

from django.db import connections, models
from django.db.models.expressions import DatabaseDefault
from django.db.models.sql import UpdateQuery

from ..core.serialization import Json
from ..models.enums import State
from ..models.expressions import Sql
from ..models.statement_size import in_statements

# The number of rows up to which COPY takes longer than INSERT: it has one more round trip.
FEW = 4


def create(database: str, new: models.Model, given: Sequence[str], *, ahead: Sql) -> None:
    """Insert a new row and read back the ``given`` fields, which the database may set.

    given: some fields. Those without a value have the same default, and the first of them is read.
    ahead: another INSERT. On PostgreSQL both are one statement; elsewhere the caller has begun a
    transaction.

    On PostgreSQL 310 µs, of which Python takes 70; with save() 700 and 370.
    """
    connection = connections[database]
    meta: Any = new._meta
    if connection.vendor != "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(*ahead)
        # Not save(): it calls the project's receivers of pre_save and post_save.
        type(new)._base_manager.using(database).bulk_create([new])
        if not connection.features.can_return_columns_from_insert or any(
            hasattr(getattr(new, name), "resolve_expression") for name in given
        ):
            new.refresh_from_db(using=database, fields=given)
        return
    row, columns, places, values = new.__dict__, [], [], [*ahead[1]]
    for name, column, is_document in _columns(meta):
        value = row[name]
        if value is None or isinstance(value, DatabaseDefault):
            continue
        columns.append(column)
        # Quoting takes the driver 5 µs a value, and these need none.
        if type(value) in (int, bool):
            places.append(str(value))
        elif is_document and value in ({}, []):
            places.append(f"'{value}'")
        elif isinstance(value, State):
            places.append(f"'{value.value}'")
        elif is_document:
            places.append("%s")
            values.append(_as_text(value))
        elif hasattr(value, "resolve_expression"):
            query = type(new)._base_manager.using(database).query
            place, more = query.get_compiler(database).compile(value.resolve_expression(query))
            places.append(place)
            values += more
        else:
            places.append("%s")
            values.append(value)
    defaults = [name for name in given if isinstance(row[name], DatabaseDefault)]
    back = [name for name in given if row[name] is not None and name not in defaults[1:]]
    returning = ", ".join(f'"{meta.get_field(name).column}"' for name in back)
    with connection.cursor() as cursor:
        cursor.execute(
            f'WITH ahead AS ({ahead[0]}) INSERT INTO "{meta.db_table}" ({", ".join(columns)}) '
            f"VALUES ({', '.join(places)}) RETURNING {returning}",
            values,
        )
        row.update(zip(back, cursor.fetchone(), strict=True))
    for name in defaults[1:]:
        row[name] = row[defaults[0]]
    new._state.adding, new._state.db = False, database


def update(rows: models.QuerySet[Any], changes: Mapping[str, object], *, ahead: Sql | None) -> None:
    """Update rows.

    ahead: another statement. On PostgreSQL both are one, which saves a round trip.
    """
    connection = connections[rows.db]
    if ahead and connection.vendor != "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(*ahead)
        ahead = None
    if not ahead:
        rows.update(**changes)
        return
    query: Any = rows.query.chain(UpdateQuery)
    query.add_update_values(changes)
    statement, values = query.get_compiler(rows.db).as_sql()
    with connection.cursor() as cursor:
        cursor.execute(f"WITH ahead AS ({ahead[0]}) {statement}", (*ahead[1], *values))


def insert(
    rows: models.QuerySet[Any], names: Sequence[str], values: Sequence[Sequence[object]]
) -> None:
    """Insert rows with these fields; other columns get database defaults. Nothing is read back.

    For an execution 9 µs on PostgreSQL, with COPY; with unnest() 25, with bulk_create() 50.
    """
    if not values:
        return
    connection, meta = connections[rows.db], rows.model._meta
    fields = [meta.get_field(name) for name in names]
    with connection.cursor() as cursor:
        # psycopg 3: values need no conversion for PostgreSQL, except JSON.
        if hasattr(cursor, "copy"):
            _copy(cursor, meta.db_table, fields, values)
        else:
            _insert_converted(cursor, meta.db_table, fields, values)


def _copy(
    cursor: Any, table: str, fields: Sequence[Any], values: Sequence[Sequence[object]]
) -> None:
    target, places = _target(cursor, table, fields)
    documents = [place for place, field in enumerate(fields) if isinstance(field, models.JSONField)]
    rows: Iterable[Sequence[Any]] = (
        _with_text(each, documents) if documents else each for each in values
    )
    if len(values) <= FEW:
        all_places = ", ".join([places] * len(values))
        cursor.execute(f"INSERT INTO {target} VALUES {all_places}", list(chain.from_iterable(rows)))
        return
    # Django does not wrap copy(): it raises the driver's errors.
    with cursor.db.wrap_database_errors, cursor.copy(f"COPY {target} FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def _insert_converted(
    cursor: Any, table: str, fields: Sequence[Any], values: Sequence[Sequence[object]]
) -> None:
    """Insert the rows. A value that all of them share is converted and, on MariaDB, sent once.

    For a job 44 µs on MariaDB, 36 of which are the server's; 100 if all are sent.
    """
    own: list[tuple[Any, list[Any]]] = []
    shared: list[tuple[Any, list[Any]]] = []
    for field, column in zip(fields, zip(*values, strict=True), strict=True):
        # The first column is never shared: it counts the rows.
        is_shared = field is not fields[0] and len(set(map(id, column))) == 1
        found = column[:1] if is_shared else column
        converted = [field.get_db_prep_save(value, cursor.db) for value in found]
        (shared if is_shared else own).append((field, converted))
    target, places = _target(cursor, table, [field for field, _ in [*own, *shared]])
    rows = zip(*(column for _, column in own), strict=True)
    common = [value for _, (value,) in shared]
    if not (common and cursor.db.vendor == "mysql" and cursor.db.mysql_is_mariadb):
        cursor.executemany(
            f"INSERT INTO {target} VALUES {places}", [(*row, *common) for row in rows]
        )
        return
    own_names = [f"c{number}" for number in range(len(own))]
    own_places = _places(own)
    for part in in_statements(rows):
        all_places = ", ".join([own_places] * len(part))
        cursor.execute(
            f"INSERT INTO {target} WITH own ({', '.join(own_names)}) AS (VALUES {all_places}) "
            f"SELECT {', '.join([*own_names, *['%s'] * len(common)])} FROM own",
            [*chain.from_iterable(part), *common],
        )


def _target(cursor: Any, table: str, fields: Sequence[Any]) -> tuple[str, str]:
    """Return the table with its columns, and the places of one row's values."""
    quote = cursor.db.ops.quote_name
    columns = ", ".join(quote(field.column) for field in fields)
    return f"{quote(table)} ({columns})", _places(fields)


def _places(columns: Sequence[object]) -> str:
    return f"({', '.join(['%s'] * len(columns))})"


def set_json(rows: models.QuerySet[Any], name: str, values: Mapping[UUID, Json]) -> None:
    """Set a JSON field of each row to its own value, by primary key.

    On PostgreSQL 6 µs, on SQLite 4, on MariaDB 40; with bulk_update() and its CASE, 130 on all.
    """
    connection, meta = connections[rows.db], rows.model._meta
    field, key = meta.get_field(name), meta.pk
    table, column, id_ = map(connection.ops.quote_name, (meta.db_table, field.column, key.column))
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            each = "SELECT key::uuid AS id, value FROM jsonb_each(%s::jsonb)"
            document = json.dumps({pk.hex: value for pk, value in values.items()})
            cursor.execute(
                f"UPDATE {table} SET {column} = v.value FROM ({each}) v WHERE {table}.{id_} = v.id",
                [document],
            )
        else:
            pairs = [
                (field.get_db_prep_save(value, connection), key.get_db_prep_save(pk, connection))
                for pk, value in values.items()
            ]
            cursor.executemany(f"UPDATE {table} SET {column} = %s WHERE {id_} = %s", pairs)


_encode = json.JSONEncoder().encode


def _as_text(document: object) -> str:
    # Most jobs have no keyword arguments, and none has metadata.
    return "{}" if document == {} else _encode(document)


def _with_text(values: Sequence[object], documents: Sequence[int]) -> list[object]:
    """Return the row with its JSON values as text."""
    row = list(values)
    for place in documents:
        if (document := row[place]) is not None:
            row[place] = _as_text(document)
    return row


@cache
def _columns(meta: models.options.Options[models.Model]) -> list[tuple[str, str, bool]]:
    """Return name, column and whether it holds JSON, for each field."""
    return [
        (field.attname, f'"{field.column}"', isinstance(field, models.JSONField))
        for field in meta.concrete_fields
    ]
