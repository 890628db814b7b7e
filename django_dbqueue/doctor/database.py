"""A database that holds a queue, and how it is asked: in plain SQL, and never for long."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db import Error, connections, transaction

from ..backend import DatabaseBackend
from ..models import Job
from ..models.jobs import JobQuerySet

# No statement of a check may take longer, in seconds.
LONGEST = 5


@dataclass(frozen=True)
class QueueDatabase:
    """A database, and the backends that keep their jobs in it."""

    alias: str
    backends: tuple[DatabaseBackend, ...]

    @property
    def connection(self) -> Any:
        return connections[self.alias]

    @property
    def jobs(self) -> JobQuerySet:
        return Job.objects.using(self.alias)

    @property
    def tables(self) -> list[str]:
        """The queue's own."""
        return list(dict.fromkeys(model._meta.db_table for model in apps.get_app_config("dbqueue").get_models()))

    @property
    def product(self) -> str:
        try:
            return str(self.connection.display_name)
        except Error:
            return str(self.connection.vendor)  # MySQL's is asked whether it is MariaDB.

    @property
    def setting(self) -> str:
        """How its settings are called in the project."""
        return f"DATABASES[{self.alias!r}]"

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Inside, a statement that takes too long is cancelled by the server. (SQLite is asked for nothing that takes long.)"""
        if self.connection.vendor == "postgresql":
            with transaction.atomic(using=self.alias):
                # Of this transaction alone: behind a pool, what is set for a session stays with others.
                self.ask(f"SELECT set_config('statement_timeout', '{LONGEST}s', true), set_config('lock_timeout', '1s', true)")
                yield
        elif self.connection.vendor == "mysql":
            name, limit = (
                ("max_statement_time", LONGEST) if self.connection.mysql_is_mariadb else ("max_execution_time", LONGEST * 1000)
            )
            with self.connection.cursor() as cursor:
                cursor.execute(f"SET SESSION {name} = {limit}")
                try:
                    yield
                finally:
                    cursor.execute(f"SET SESSION {name} = DEFAULT")
        else:
            yield

    def ask(self, query: str, *values: Any) -> list[Any]:
        """The rows, with their columns by name."""
        with self.connection.cursor() as cursor:
            cursor.execute(query, values or None)
            row = namedtuple("Row", [column[0].lower() for column in cursor.description], rename=True)  # type: ignore[misc]
            return [row(*each) for each in cursor.fetchall()]

    def value(self, query: str, *values: Any) -> Any:
        """The first column of the only row."""
        return self.ask(query, *values)[0][0]


def queue_databases(backends: Iterable[DatabaseBackend]) -> list[QueueDatabase]:
    """Each database of the backends once, though it may have several names."""
    found: dict[Any, list[DatabaseBackend]] = {}
    for backend in backends:
        found.setdefault(_address(backend.database), []).append(backend)
    return [QueueDatabase(each[0].database, tuple(each)) for each in found.values()]


def _address(alias: str) -> tuple[Any, ...]:
    settings = connections[alias].settings_dict
    return tuple(str(settings[name]) for name in ("ENGINE", "HOST", "PORT", "NAME"))
