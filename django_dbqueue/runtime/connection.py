"""The database connections of a running role: kept open, looked after, and never left in a task's state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections, reset_queries, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

# A connection that was idle for so many seconds is checked before it is used again.
IDLE = 1.0

_thread = threading.local()


def keep_connections() -> None:
    """Keep this process's connections whatever ``CONN_MAX_AGE`` says: a new one for each job costs more than the job.

    Each thread keeps its own, so there is nothing to pool, and Django's pool refuses connections that are kept.
    """
    for alias in connections:
        connections.settings[alias]["CONN_MAX_AGE"] = None
        connections.settings[alias]["OPTIONS"].pop("pool", None)


def prepare(database: str) -> None:
    """Make the calling thread's connection fit for claiming and settling."""
    connection = connections[database]
    if connection.vendor == "sqlite":
        # A claim reads and then writes: begun as a reader, it would fail whenever another writer was quicker.
        connection.transaction_mode = "IMMEDIATE"  # type: ignore[attr-defined]


@contextmanager
def snapshot(database: str) -> Iterator[None]:
    """All queries inside see one moment of the database."""
    with transaction.atomic(using=database):
        if connections[database].vendor != "sqlite":
            with connections[database].cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        yield


def ready_connections() -> None:
    """Before a job: after a pause, have each connection checked if the job uses it, and only then."""
    reset_queries()
    if time.monotonic() - getattr(_thread, "used_at", 0.0) > IDLE:
        connection: Any
        for connection in connections.all(initialized_only=True):
            connection.health_check_enabled, connection.health_check_done = True, False


def look_after_connections() -> None:
    """After a job: drop connections that it broke, or left inside a transaction."""
    _thread.used_at = time.monotonic()
    for connection in connections.all(initialized_only=True):
        if connection.connection is None:
            continue
        if _is_closed(connection) or _is_in_transaction(connection):
            discard(connection.alias)
        elif connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()


def _is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """By Django's account, or by the driver's, where it has one, for a BEGIN that Django did not see."""
    if connection.in_atomic_block or not connection.autocommit:
        return True
    driver: Any = connection.connection
    if connection.vendor == "postgresql":
        return bool(driver.info.transaction_status)
    return bool(getattr(driver, "in_transaction", False))


def _is_closed(connection: BaseDatabaseWrapper) -> bool:
    """Whether the driver's connection was closed behind Django's back. Asks the driver, not the server."""
    driver: Any = connection.connection
    if connection.vendor == "sqlite":
        try:
            return bool(driver.total_changes < 0)
        except driver.ProgrammingError:
            return True
    return bool(driver.closed) if hasattr(driver, "closed") else not getattr(driver, "open", True)


def discard(alias: str) -> None:
    """Close the calling thread's connection, whatever state it is in. The next query opens a new one."""
    with suppress(Exception):
        connections[alias].close()
    del connections[alias]


def close_connections() -> None:
    for connection in connections.all(initialized_only=True):
        discard(connection.alias)
