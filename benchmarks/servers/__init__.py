"""What is measured on: a small file for each kind of database."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

DATABASES = ["postgresql", "mariadb", "sqlite"]


class Server:
    """Makes a database for each measurement from a template for each system: none finds another's dead rows."""

    # What it is called in a report.
    name = ""

    def __init__(self) -> None:
        self._made: set[str] = set()

    def make(self, database: str, template: str = "") -> str:
        """Its address."""
        self.drop(database)
        self._made.add(database)
        return self._make(database, template)

    def has(self, database: str) -> bool:
        """Whether it was made by this benchmark: a template of an earlier one may have other tables."""
        return database in self._made

    def drop(self, database: str) -> None:
        self._drop(database)
        self._made.discard(database)

    def close(self) -> None:
        """Leave nothing behind."""
        for database in [*self._made]:
            self.drop(database)

    def _make(self, database: str, template: str) -> str:
        raise NotImplementedError

    def _drop(self, database: str) -> None:
        raise NotImplementedError

    def connect(self, database: str) -> Any:
        """A connection, each of whose statements is committed by itself."""
        raise NotImplementedError

    def settle(self, connection: Any) -> None:
        """Let a database be as one that has been in use for a while."""
        raise NotImplementedError

    def log_statements(self, database: str) -> None:
        """From now on, have its counters count the statements of what connects."""

    def counters(self, database: str) -> dict[str, int]:
        """What the server has done since it was started, as far as it counts."""
        return {}

    def facts(self) -> dict[str, Any]:
        raise NotImplementedError


@contextmanager
def server(database: str, settings: Sequence[str] = ()) -> Iterator[Server]:
    """For as long as it is needed. Each setting is ``name=value``, of one that is started for it."""
    with import_module(f"{__name__}.{database}").server(settings) as found:
        try:
            yield found
        finally:
            found.close()


def given_url(*schemes: str) -> str:
    """The address in BENCH_URL, or none. What it must begin with is given."""
    url = os.environ.get("BENCH_URL", "")
    if url and (scheme := urlsplit(url).scheme) not in schemes:
        kinds = " or ".join(map(repr, schemes))
        raise SystemExit(
            f"BENCH_URL begins with {scheme!r}, not with {kinds}: choose its kind with --database, or unset it."
        )
    return url
