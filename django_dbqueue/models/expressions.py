"""ORM extensions for a queue on three databases: the database's time, partial indexes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from django.db import connections, models
from django.db.models import functions, lookups
from django.db.models.sql.datastructures import BaseTable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.backends.ddl_references import Statement
    from django.db.models.sql.compiler import SQLCompiler

# SQL with placeholders, and the values for them.
Sql = tuple[str, tuple[Any, ...]]
QS = TypeVar("QS", bound=models.QuerySet[models.Model, object])


class Now(functions.Now):
    """The database's time.

    On MySQL and MariaDB in UTC, as Django stores times, whatever the server's time zone is.
    """

    def as_mysql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **context: Any
    ) -> Sql:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


class Among(lookups.In):
    """Membership of an id in a list of very many ids.

    On PostgreSQL the list is one value: 1 µs for each id in Python, 6 µs with IN.
    """

    def __init__(self, ids: Sequence[UUID]) -> None:
        super().__init__(models.F("pk"), ids)

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> Sql:
        column, values = compiler.compile(self.lhs)
        return f"{column} = ANY(%s::uuid[])", (
            *values,
            f"{{{','.join(each.hex for each in self.rhs)}}}",
        )


def set_if(name: str, condition: lookups.Lookup[Any]) -> lookups.Exact:
    """Return the condition that a column has a value if, and only if, another condition holds."""
    return lookups.Exact(lookups.IsNull(models.F(name), False), condition)


class AllWithin(models.Func):
    """Condition that each of these times is NULL or within the span of the two times ``span``.

    PostgreSQL prepares the constraints of a table for each statement that writes to it. For six
    times, this form takes it 6 µs, and that of other databases 15.
    """

    output_field = models.BooleanField()

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> Sql:  # type: ignore[override]
        spans = [lookups.Range(each, self.extra["span"]) for each in self.get_source_expressions()]
        compiled = [compiler.compile(each) for each in spans]
        # In parentheses: on MySQL, Django compares the condition with True.
        return f"({' AND '.join(sql for sql, _ in compiled)})", tuple(
            chain.from_iterable(values for _, values in compiled)
        )

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> Sql:
        columns = ", ".join(compiler.compile(each)[0] for each in self.get_source_expressions())
        first, last = self.extra["span"]
        return f"(%s::tstzrange @> ALL (ARRAY[{columns}]))", (f"[{first},{last}]",)


class NotBefore(lookups.GreaterThanOrEqual):
    """Test if a job is at a position of its lane or behind it.

    On PostgreSQL that is one range of the lane's index. MariaDB reads no range by two columns
    together, and gets two ranges.
    """

    def __init__(self, at: datetime, pk: UUID) -> None:
        place = models.Value(at, models.DateTimeField()), models.Value(pk, models.UUIDField())
        sides = (models.F("run_after"), models.F("id")), place
        super().__init__(
            *(
                models.Func(*each, template="(%(expressions)s)", output_field=models.Field())
                for each in sides
            )
        )

    def as_mysql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> Sql:
        (at, pk), (at_place, pk_place) = (
            [compiler.compile(each) for each in side.get_source_expressions()]
            for side in (self.lhs, self.rhs)
        )
        sql = f"({at[0]} > {at_place[0]} OR ({at[0]} = {at_place[0]} AND {pk[0]} >= {pk_place[0]}))"
        return sql, (*at_place[1], *at_place[1], *pk_place[1])


def by_index(rows: QS, index: str) -> QS:
    """Return the rows, with this index forced on MySQL and MariaDB.

    They have no partial indexes. By the statistics, the indexes of other states are as good
    there, and these may read many more rows.
    """
    found = rows.all()
    if connections[rows.db].vendor == "mysql":
        found.query.alias_map[found.query.get_initial_alias()] = _TableByIndex(
            rows.model._meta.db_table, index
        )
    return found


class _TableByIndex(BaseTable):
    def __init__(self, table: str, index: str) -> None:
        super().__init__(table, table)
        self._index = index

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> Sql:
        table, index = map(connection.ops.quote_name, (self.table_name, self._index))
        return f"{table} FORCE INDEX ({index})", ()


def now_plus(wait: timedelta | float | datetime) -> models.Expression:
    """Return the database's time plus ``wait`` (seconds or a timedelta); a time as it is."""
    if isinstance(wait, datetime):
        return models.Value(wait, output_field=models.DateTimeField())
    delay = wait if isinstance(wait, timedelta) else timedelta(seconds=wait)
    return (
        models.ExpressionWrapper(Now() + models.Value(delay), output_field=models.DateTimeField())
        if delay
        else Now()
    )


def start_plus(start: timedelta | datetime | None, wait: timedelta) -> models.Expression:
    """Return ``start`` plus ``wait``, or now plus ``wait`` if now is later.

    ``start`` is a time, or a timedelta from now.
    """
    if not isinstance(start, datetime):
        return now_plus((start or timedelta()) + wait)
    later = functions.Greatest(Now(), now_plus(start))
    return models.ExpressionWrapper(later + models.Value(wait), output_field=models.DateTimeField())


def composed(rows: models.QuerySet[models.Model, object]) -> Sql:
    """Return the statement for these rows in the SQL of their database, and its values.

    Composing a statement anew each time takes the ORM longer than most statements take to run.
    """
    return rows.query.get_compiler(rows.db).as_sql()  # type: ignore[no-any-return]


class PartialIndex(models.Index):
    """Index of the rows with ``state`` in ``states`` and ``present`` not null, if these are given.

    A database without partial indexes gets a full index, with ``state`` in front. (Django itself
    would leave out an index with a ``condition`` there, and warn.)
    """

    def __init__(
        self, *, fields: list[str], name: str, states: Sequence[str] = (), present: str = ""
    ) -> None:
        self.states, self.present = [str(state) for state in states], present
        super().__init__(fields=fields, name=name)

    def deconstruct(self) -> tuple[str, Sequence[object], dict[str, object]]:
        path, args, kwargs = super().deconstruct()
        own = {"states": self.states, "present": self.present}
        return path, args, {**kwargs, **{name: value for name, value in own.items() if value}}

    def create_sql(
        self,
        model: type[models.Model],
        schema_editor: BaseDatabaseSchemaEditor,
        using: str = "",
        **kwargs: object,
    ) -> Statement:
        if schema_editor.connection.features.supports_partial_indexes:
            index = models.Index(fields=self.fields, name=self.name, condition=self._rows())
        else:
            leading = ["state"] if self.states and "state" not in self.fields else []
            index = models.Index(fields=[*leading, *self.fields], name=self.name)
        return index.create_sql(model, schema_editor, using=using, **kwargs)

    def _rows(self) -> models.Q:
        present = models.Q(**{f"{self.present}__isnull": False}) if self.present else models.Q()
        if len(self.states) == 1:
            # Compared with "=": the planner proves "state = x" from no other form.
            return present & models.Q(state=self.states[0])
        return present & models.Q(state__in=self.states) if self.states else present


class StrictOnSQLite(models.BaseConstraint):
    """Constraint that each value has its column's type, in the form in which Django writes it.

    Only for SQLite, which stores any value in any column. A row with another value could not be
    read, or not be found again by its id.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StrictOnSQLite) and self.name == other.name

    def constraint_sql(self, model: Any, schema_editor: Any) -> str:
        if schema_editor.connection.vendor != "sqlite":
            return ""
        columns = [
            (schema_editor.quote_name(field.column), _strict(field))
            for field in model._meta.concrete_fields
        ]
        checks = " AND ".join(
            f"({column} IS NULL OR {check.format(column)})" for column, check in columns
        )
        return f"CONSTRAINT {schema_editor.quote_name(self.name)} CHECK ({checks})"

    def create_sql(self, model: object, schema_editor: object) -> Any:
        """Do nothing: SQLite recreates the table, and elsewhere there is nothing to create."""

    def remove_sql(self, model: object, schema_editor: object) -> Any:
        """Do nothing, as in create_sql()."""

    def validate(self, *args: object, **kwargs: object) -> None:
        """Do nothing: a value that Django writes has the column's type."""


def _strict(field: models.Field[object, object]) -> str:
    kind = getattr(field, "target_field", field).get_internal_type()
    match kind:
        case "UUIDField":
            return "typeof({0}) = 'text' AND length({0}) = 32 AND {0} NOT GLOB '*[^0-9a-f]*'"
        case "DateTimeField":
            fraction = (
                "length({0}) <= 26 AND {0} GLOB '*.[0-9]*' AND substr({0}, 21) NOT GLOB '*[^0-9]*'"
            )
            # Without the fraction: SQLite rounds to thousandths, and 59.9996 would be the next
            # minute.
            second = (
                "strftime('%Y-%m-%d %H:%M:%S', substr({0}, 1, 19), '+0 days') IS substr({0}, 1, 19)"
            )
            return f"{second} AND (length({{0}}) = 19 OR ({fraction}))"
        case "CharField" | "TextField" | "JSONField":
            return "typeof({0}) = 'text'"
        case "FloatField":
            return "typeof({0}) = 'real'"
        case _:
            return "typeof({0}) = 'integer'"


class UniqueIfPresent(models.UniqueConstraint):
    """Unique constraint on a nullable field.

    Its index leaves out rows without a value, if the database has partial indexes.
    """

    def __init__(self, *, field: str, name: str) -> None:
        super().__init__(fields=[field], name=name)

    def deconstruct(self) -> tuple[str, Sequence[object], dict[str, object]]:
        path, args, kwargs = super().deconstruct()
        return path, args, {"field": self.fields[0], "name": kwargs["name"]}

    def constraint_sql(self, model: type[models.Model] | None, schema_editor: Any) -> Any:
        return self._for(schema_editor).constraint_sql(model, schema_editor)

    def create_sql(self, model: type[models.Model] | None, schema_editor: Any) -> Any:
        return self._for(schema_editor).create_sql(model, schema_editor)

    def remove_sql(self, model: type[models.Model] | None, schema_editor: Any) -> Any:
        return self._for(schema_editor).remove_sql(model, schema_editor)

    def _for(self, schema_editor: Any) -> models.UniqueConstraint:
        if not schema_editor.connection.features.supports_partial_indexes:
            return models.UniqueConstraint(fields=self.fields, name=self.name)
        present = models.Q(**{f"{self.fields[0]}__isnull": False})
        return models.UniqueConstraint(fields=self.fields, name=self.name, condition=present)
