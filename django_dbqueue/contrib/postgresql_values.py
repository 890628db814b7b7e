"""Values of PostgreSQL that Python cannot hold, as text."""

from __future__ import annotations

from typing import Any

from psycopg import DataError, postgres
from psycopg.abc import AdaptContext, Buffer, Loader
from psycopg.adapt import Loader as BaseLoader
from psycopg.pq import Format
from psycopg.types.string import TextLoader

# "infinity", years after 9999, and "24:00" cannot be read by the driver's own loaders.
TIMES = ("date", "time", "timetz", "timestamp", "timestamptz", "interval")


def load_as_text(cursor: Any) -> None:
    """Have a cursor return JSON, and times and intervals that have no equal in Python, as text."""
    for name in TIMES:
        oid = postgres.types[name].oid
        cursor.adapters.register_loader(oid, _or_text(cursor.adapters.get_loader(oid, Format.TEXT)))
    cursor.adapters.register_loader("json", TextLoader)


def _or_text(known: type[Loader]) -> type[BaseLoader]:
    class OrText(BaseLoader):
        def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
            super().__init__(oid, context)
            self._known = known(oid, context)

        def load(self, data: Buffer) -> Any:
            text = bytes(data).decode()
            if "mon" in text or "year" in text:  # A timedelta has no months.
                return text
            try:
                return self._known.load(data)
            except DataError:
                return text

    return OrText
