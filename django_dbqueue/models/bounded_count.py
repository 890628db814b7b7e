"""Counts of constant cost, however large a table grows."""

from __future__ import annotations

from django.db import models
from django.utils.formats import number_format
from django.utils.translation import gettext as _

LIMIT = 10_000


class BoundedCount(int):
    """The limit, as the count of more rows than that. It says so wherever it is shown."""

    def __str__(self) -> str:
        return _("%(number)s+") % {"number": number_format(int(self), force_grouping=True)}


def count(rows: models.QuerySet[models.Model, object], *along: str) -> int:
    """Count rows, or return a BoundedCount: no more rows than the limit are read.

    along: the order of the index that holds the rows. Without it PostgreSQL may scan the table
    instead, because it assumes that such rows are everywhere, and read millions of others.
    """
    number = rows.order_by(*along).values("pk")[: LIMIT + 1].count()
    return BoundedCount(LIMIT) if number > LIMIT else number
