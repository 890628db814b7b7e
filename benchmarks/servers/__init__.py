"""What is measured on: a small file for each kind of database."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

DATABASES = ["postgresql", "mariadb", "sqlite"]


class Server:
    """Makes a database for each measurement from a template for each system: none finds another's dead rows."""

    # What it is called in a report.
    name = ""

    def make(self, database: str, template: str = "") -> str:
        """Its address."""
        raise NotImplementedError

    def has(self, database: str) -> bool:
        raise NotImplementedError

    def drop(self, database: str) -> None:
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


def server(database: str, settings: Sequence[str] = ()) -> AbstractContextManager[Server]:
    """For as long as it is needed. Each setting is ``name=value``, of one that is started for it."""
    found: AbstractContextManager[Server] = import_module(f"{__name__}.{database}").server(settings)
    return found
