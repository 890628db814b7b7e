"""What the ORM lacks for a queue on three databases: the database's time, partial indexes, locks that are stepped over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from django.db import connections, models
from django.db.models import functions

QS = TypeVar("QS", bound=models.QuerySet[Any])


class Now(functions.Now):
    """The database's time. On MySQL and MariaDB in UTC, as Django stores times, whatever the server's time zone is."""

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


# Beyond it, a time may be later than a datetime can be.
LONGEST_WAIT = timedelta(days=36_500)


def after(wait: timedelta | float) -> models.Expression:
    """The database's time, and ``wait`` (seconds, or a timedelta) from it."""
    delay = wait if isinstance(wait, timedelta) else timedelta(seconds=wait)
    return models.ExpressionWrapper(Now() + models.Value(delay), output_field=models.DateTimeField()) if delay else Now()


def lock(rows: QS, **options: Any) -> QS:
    """Lock the rows, stepping over those that somebody else holds. SQLite locks as a whole and needs nothing said."""
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked, **options)


class PartialIndex(models.Index):
    """An index of the rows in which ``state`` has one of ``states``.

    A database without partial indexes gets a full one, with ``state`` in front. (Django itself would leave out there
    what has a ``condition``, and warn.)
    """

    def __init__(self, *, states: Sequence[str], fields: list[str], name: str) -> None:
        self.states = [str(state) for state in states]
        super().__init__(fields=fields, name=name)

    def deconstruct(self) -> Any:
        path, args, kwargs = super().deconstruct()
        return path, args, {**kwargs, "states": self.states}

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **kwargs: Any) -> Any:
        if schema_editor.connection.features.supports_partial_indexes:
            # A single state is compared with "=": the planner proves "state = x" from nothing else.
            only = models.Q(state=self.states[0]) if len(self.states) == 1 else models.Q(state__in=self.states)
            index = models.Index(fields=self.fields, name=self.name, condition=only)
        else:
            leading = [] if "state" in self.fields else ["state"]
            index = models.Index(fields=[*leading, *self.fields], name=self.name)
        return index.create_sql(model, schema_editor, using=using, **kwargs)
