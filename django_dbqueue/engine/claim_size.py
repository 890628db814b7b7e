"""Byte budget of a claim: a process holds jobs with large arguments up to a number of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import models
from django.db.models import F, lookups

from ..models import ClaimedJob
from ..models.document import DocumentField
from ..models.expressions import Sql
from ..models.job import JobQuerySet

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.compiler import SQLCompiler

# Arguments up to this many bytes are loaded with their row, and not counted. Larger arguments are
# loaded by id, once the budget is known to have room for them.
SMALL = 16_000
_LARGE = ("args", "kwargs")
_SIZE = "LENGTH(%(expressions)s)"
# Of PostgreSQL, without a read of out-of-line (TOAST) data. What it has compressed may be 90 times
# as large: 1,000 bytes of it are small.
_IN_ROW = (
    "pg_column_size(%(expressions)s)"
    " * CASE WHEN pg_column_compression(%(expressions)s) IS NULL THEN 1 ELSE 16 END"
)


class StoredSize(models.Func):
    """Size of a column, in bytes; on PostgreSQL an estimate by its size in the row."""

    template, output_field = _SIZE, models.IntegerField()

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> Sql:
        return self.as_sql(compiler, connection, template=_IN_ROW)


class TextSize(models.Func):
    """Size of a column as text, in bytes: about its size in Python before it is decoded."""

    template, output_field = _SIZE, models.IntegerField()

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> Sql:
        # To decompress it, or to turn it into text, takes as long as to load it.
        text = (
            "CASE WHEN pg_column_compression(%(expressions)s) IS NULL"
            " THEN pg_column_size(%(expressions)s)"
            " ELSE octet_length((%(expressions)s)::text) END"
        )
        return self.as_sql(compiler, connection, template=text)


class IfSmall(models.Func):
    """A document if its column is small, else NULL.

    One expression node, because a claim rebuilds its query each time.
    """

    output_field = DocumentField()
    template = f"CASE WHEN {_SIZE} <= {SMALL} THEN %(expressions)s END"

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> Sql:
        return self.as_sql(compiler, connection, template=self.template.replace(_SIZE, _IN_ROW))


def is_small(name: str) -> lookups.LessThanOrEqual:
    return lookups.LessThanOrEqual(StoredSize(F(name)), SMALL)


class Budget:
    """Bytes of large arguments that one claim may still take: ``of``, less those of held jobs.

    A process that holds none takes one job of any size. ``is_spent`` is set once a job was left
    for lack of bytes.
    """

    def __init__(self, of: int, held: int = 0) -> None:
        self._left, self._may_exceed = of - held, not held
        self.is_spent = False

    def take(self, rows: JobQuerySet, jobs: JobQuerySet) -> list[ClaimedJob]:
        """Load the first of these rows that fit the budget. ``jobs`` finds large ones again."""
        small = {f"small_{name}": IfSmall(name) for name in _LARGE}
        found: list[Any] = list(rows.defer(*_LARGE).annotate(**small))
        large = []
        for job in found:
            values = job.__dict__
            args, kwargs = values["args"], values["kwargs"] = (
                values.pop("small_args"),
                values.pop("small_kwargs"),
            )
            if args is None or kwargs is None:
                large.append(job.id)
        return self._without_too_large(found, jobs.filter(pk__in=large)) if large else found

    def _without_too_large(self, found: list[ClaimedJob], large: JobQuerySet) -> list[ClaimedJob]:
        sizes: dict[UUID, int] = dict(
            large.values_list("pk", TextSize(F("args")) + TextSize(F("kwargs")))
        )
        taken: list[ClaimedJob] = []
        for job in found:
            job.size = sizes.get(job.id, 0)
            if job.size > self._left and job.size and not self._may_exceed:
                self.is_spent = True
                break
            self._left, self._may_exceed = self._left - job.size, self._may_exceed and not job.size
            taken.append(job)
        ids = [job.id for job in taken if job.size]
        loaded = {pk: values for pk, *values in large.filter(pk__in=ids).values_list("pk", *_LARGE)}
        for job in taken:
            if job.size:
                job.args, job.kwargs = loaded[job.id]
        return taken
