"""Database servers of the benchmark: one small file for each kind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

DATABASES = ["postgresql", "mariadb", "sqlite"]


class Server:
    """Server that creates a database for each measurement, from a template for each system.

    So no measurement runs beside another's dead rows.
    """

    # Its name in reports.
    name = ""

    def __init__(self) -> None:
        self._made: set[str] = set()

    def make(self, database: str, template: str = "") -> str:
        """Create a database and return its URL."""
        self.drop(database)
        self._made.add(database)
        return self._make(database, template)

    def has(self, database: str) -> bool:
        """Return True if this run made the database: older templates may have other tables."""
        return database in self._made

    def drop(self, database: str) -> None:
        self._drop(database)
        self._made.discard(database)

    def close(self) -> None:
        """Drop all databases of this run."""
        for database in [*self._made]:
            self.drop(database)

    def _make(self, database: str, template: str) -> str:
        raise NotImplementedError

    def _drop(self, database: str) -> None:
        raise NotImplementedError

    def connect(self, database: str) -> Any:
        """Return a connection in autocommit mode."""
        raise NotImplementedError

    def settle(self, connection: Any) -> None:
        """Bring the database into the state of one in use, with statistics."""
        raise NotImplementedError

    def log_statements(self, database: str) -> None:
        """Count the statements of new connections in the counters, if the server can."""

    def counters(self, database: str) -> dict[str, int]:
        """Return the server's counters since its start; empty if it does not count."""
        return {}

    def facts(self) -> dict[str, Any]:
        raise NotImplementedError


@contextmanager
def server(database: str, settings: Sequence[str] = ()) -> Iterator[Server]:
    """Run a server. Settings (``name=value``) are for a server that the benchmark starts."""
    with import_module(f"{__name__}.{database}").server(settings) as found:
        try:
            yield found
        finally:
            found.close()


def given_url(*schemes: str) -> str:
    """Return the URL in BENCH_URL, or an empty string. Its scheme must be one of these."""
    url = os.environ.get("BENCH_URL", "")
    if url and (scheme := urlsplit(url).scheme) not in schemes:
        kinds = " or ".join(map(repr, schemes))
        raise SystemExit(
            f"BENCH_URL begins with {scheme!r}, not with {kinds}: choose its kind with --database, "
            "or unset it."
        )
    return url
