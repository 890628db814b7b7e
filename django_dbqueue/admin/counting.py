"""Counts of several sets of rows in one statement."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import connections

from ..models import bounded_count
from ..models.bounded_count import BoundedCount
from ..models.expressions import composed
from .base import Rows


def counts(sets: Sequence[Rows]) -> list[int]:
    """Count each set of rows, in the order of an index. More rows than the limit are not read.

    As with count(), a number above the limit is a BoundedCount.
    """
    if not sets:
        return []
    limit = bounded_count.LIMIT
    parts = [composed(rows[: limit + 1]) for rows in sets]
    numbers = ", ".join(f"(SELECT COUNT(*) FROM ({sql}) AS part)" for sql, _values in parts)
    with connections[sets[0].db].cursor() as cursor:
        cursor.execute(f"SELECT {numbers}", [each for _sql, values in parts for each in values])
        found = cursor.fetchone()
    return [BoundedCount(limit) if number > limit else number for number in found]
