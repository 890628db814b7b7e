"""Counts that cost the same however large a table grows."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.formats import number_format
from django.utils.translation import gettext as _

LIMIT = 10_000


class BoundedCount(int):
    """The limit, where there are more rows than that. It says so wherever it is shown."""

    def __str__(self) -> str:
        return _("%(number)s+") % {"number": number_format(int(self), force_grouping=True)}


def count(rows: models.QuerySet[Any], *along: str) -> int:
    """How many rows there are, or Many: no more than the limit are looked at.

    along: the order of the index that holds them. Without it PostgreSQL may walk the table instead, which it takes to have
    such rows everywhere, through millions that are none.
    """
    number = rows.order_by(*along).values("pk")[: LIMIT + 1].count()
    return BoundedCount(LIMIT) if number > LIMIT else number
