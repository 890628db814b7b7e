"""System checks of the project around the queue; a backend checks its own OPTIONS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections

from .backend import DatabaseBackend
from .compat import task_backends
from .exceptions import InvalidOption

SUPPORTED = ("postgresql", "mysql", "sqlite")


@register("dbqueue")
def check_databases(app_configs: Any = None, **kwargs: Any) -> Iterator[CheckMessage]:
    """Whether each backend's database can hold a queue."""
    for alias in task_backends:
        backend = task_backends[alias]
        if isinstance(backend, DatabaseBackend):
            try:
                yield from _check_database(backend)
            except (InvalidOption, TypeError):
                continue  # The backend's own check says it.


def _check_database(backend: DatabaseBackend) -> Iterator[CheckMessage]:
    name = f"TASKS[{backend.alias!r}]"
    if backend.database not in connections:
        known = ", ".join(connections)
        yield Error(f"{name} names the database {backend.database!r}; there are {known}.", id="dbqueue.E002")
        return
    connection = connections[backend.database]
    if connection.vendor not in SUPPORTED:
        yield Error(f"{name}: jobs cannot be kept in {connection.display_name}.", id="dbqueue.E003")
    if not settings.USE_TZ and connection.vendor != "postgresql":
        yield Error(
            f"{name}: with USE_TZ = False, {connection.display_name} has no time that all processes agree on.",
            hint="Set USE_TZ = True, which is Django's default.",
            id="dbqueue.E004",
        )
    if connection.vendor == "sqlite" and connection.settings_dict["OPTIONS"].get("transaction_mode") != "IMMEDIATE":
        yield Warning(
            f"{name}: SQLite without immediate transactions fails with 'database is locked' under load.",
            hint=f"Set DATABASES[{backend.database!r}]['OPTIONS'] = {{'transaction_mode': 'IMMEDIATE', "
            "'init_command': 'PRAGMA journal_mode=WAL'}.",
            id="dbqueue.W001",
        )
