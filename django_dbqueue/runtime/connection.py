"""The database connections of a running role: kept open, looked after, and never left in a task's state."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper


def keep_connections() -> None:
    """Keep this process's connections whatever ``CONN_MAX_AGE`` says: a new one for each job costs more than the job."""
    for alias in connections:
        connections.settings[alias]["CONN_MAX_AGE"] = None


def prepare(database: str) -> None:
    """Make the calling thread's connection fit for claiming and settling."""
    connection = connections[database]
    if connection.vendor == "sqlite":
        # A claim reads and then writes: begun as a reader, it would fail whenever another writer was quicker.
        connection.transaction_mode = "IMMEDIATE"  # type: ignore[attr-defined]


def look_after_connections() -> None:
    """After a job: drop connections that it broke, or left inside a transaction."""
    for connection in connections.all(initialized_only=True):
        if connection.connection is None:
            continue
        if _is_closed(connection) or connection.in_atomic_block or not connection.autocommit:
            discard(connection.alias)
        elif connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()


def _is_closed(connection: BaseDatabaseWrapper) -> bool:
    """Whether the driver's connection was closed behind Django's back. Asks the driver, not the server."""
    driver: Any = connection.connection
    if connection.vendor == "sqlite":
        try:
            return bool(driver.total_changes < 0)
        except driver.ProgrammingError:
            return True
    return bool(driver.closed) if hasattr(driver, "closed") else not getattr(driver, "open", True)


def check_connections() -> None:
    """After a pause: drop connections that the server has closed meanwhile."""
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and not connection.is_usable():
            discard(connection.alias)


def discard(alias: str) -> None:
    """Close the calling thread's connection, whatever state it is in. The next query opens a new one."""
    with suppress(Exception):
        connections[alias].close()
    del connections[alias]


def close_connections() -> None:
    for connection in connections.all(initialized_only=True):
        discard(connection.alias)
