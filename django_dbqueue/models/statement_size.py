"""Rows of a statement on MySQL and MariaDB, whose statements have a maximum size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

Row = TypeVar("Row", bound=Sequence[Any])

# max_allowed_packet is 16 MB by default. The time per row falls up to about a thousand rows.
MOST_ROWS, MOST_CHARACTERS = 1000, 250_000


def in_statements(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists that are no longer than a statement may be."""
    part: list[Row] = []
    size = 0
    for row in rows:
        length = sum(len(value) for value in row if isinstance(value, str))
        if part and (size + length > MOST_CHARACTERS or len(part) == MOST_ROWS):
            yield part
            part, size = [], 0
        part.append(row)
        size += length
    yield part
