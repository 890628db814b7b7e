"""A database that holds a queue, queried in plain SQL with short time limits."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db import Error, connections, transaction

from ..backend import DatabaseBackend
from ..compat import task_backends
from ..models import Job
from ..models.job import JobQuerySet

# Statement timeout of a check, in seconds.
LONGEST = 5


@dataclass(frozen=True)
class QueueDatabase:
    """A database and the backends that store their jobs in it."""

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
        """Names of the queue's own tables."""
        return list(
            dict.fromkeys(
                model._meta.db_table for model in apps.get_app_config("dbqueue").get_models()
            )
        )

    @property
    def product(self) -> str:
        try:
            return str(self.connection.display_name)
        except Error:
            # On MySQL, display_name queries the server to distinguish MariaDB.
            return str(self.connection.vendor)

    @property
    def setting(self) -> str:
        """The name of the database's settings in the project."""
        return f"DATABASES[{self.alias!r}]"

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Have the server cancel statements that exceed the time limit.

        SQLite has no limit: no check runs a slow statement there.
        """
        if self.connection.vendor == "postgresql":
            with transaction.atomic(using=self.alias):
                # For this transaction only: behind a pooler, session settings leak to others.
                self.ask(
                    f"SELECT set_config('statement_timeout', '{LONGEST}s', true), "
                    "set_config('lock_timeout', '1s', true)"
                )
                yield
        elif self.connection.vendor == "mysql":
            name, limit = (
                ("max_statement_time", LONGEST)
                if self.connection.mysql_is_mariadb
                else ("max_execution_time", LONGEST * 1000)
            )
            with self.connection.cursor() as cursor:
                cursor.execute(f"SET SESSION {name} = {limit}")
                try:
                    yield
                finally:
                    cursor.execute(f"SET SESSION {name} = DEFAULT")
        else:
            yield

    def ask(self, query: str, *values: object) -> list[Any]:
        """Return the rows as named tuples of their columns."""
        with self.connection.cursor() as cursor:
            cursor.execute(query, values or None)
            names = [column[0].lower() for column in cursor.description]
            row: Any = namedtuple("Row", names, rename=True)  # type: ignore[misc]
            return [row(*each) for each in cursor.fetchall()]

    def value(self, query: str, *values: object) -> Any:
        """Return the first column of the only row."""
        return self.ask(query, *values)[0][0]


def database_of(backend: DatabaseBackend) -> QueueDatabase:
    """Return the database of a backend, with all backends that store their jobs in it."""
    backends = map(task_backends.__getitem__, task_backends)
    found = queue_databases(each for each in backends if isinstance(each, DatabaseBackend))
    return next(each for each in found if any(one.alias == backend.alias for one in each.backends))


def queue_databases(backends: Iterable[DatabaseBackend]) -> list[QueueDatabase]:
    """Return each database or schema of the backends once, even if it has several aliases."""
    found: dict[tuple[str, ...], list[DatabaseBackend]] = {}
    for backend in backends:
        found.setdefault(_address(backend.database), []).append(backend)
    return [QueueDatabase(each[0].database, tuple(each)) for each in found.values()]


def _address(alias: str) -> tuple[str, ...]:
    """Return what two aliases of the same tables have in common.

    A user may have a ``search_path``, and the options of an alias may set one.
    """
    settings = connections[alias].settings_dict
    found = re.search(r"search_path=(\S+)", str(settings["OPTIONS"].get("options", "")))
    address = ("ENGINE", "HOST", "PORT", "NAME", "USER")
    return (*(str(settings[name]) for name in address), found[1] if found else "")
