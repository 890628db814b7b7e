"""Database connections of a running role: persistent, checked, and reset after each task."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from django.core.cache import caches
from django.db import DatabaseError, InterfaceError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ..compat import task_backends
from ..engine.galera import is_cluster
from . import time_loader
from .socket_watchdog import unwatch_socket, watch_socket

# A connection that was idle for more than this many seconds is checked before its next use.
IDLE = 1.0
# Seconds that the server has to answer the request to cancel a statement.
CANCEL = 1.0
_SET = {
    "postgresql": [
        "SET statement_timeout = {milliseconds}; SET lock_timeout = {milliseconds}; "
        "SET idle_in_transaction_session_timeout = {milliseconds}; "
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED"
    ],
    "mariadb": [
        "SET SESSION max_statement_time = {seconds}, SESSION innodb_lock_wait_timeout = {seconds}",
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    ],
    "mysql": [
        "SET SESSION max_execution_time = {milliseconds}, "
        "SESSION innodb_lock_wait_timeout = {seconds}",
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    ],
}

_thread = threading.local()
# Number of times that this process has noticed an outage or its end.
_outages = 0
# Set if any coroutine has used a database. All coroutines of a loop do so on one thread.
# Also set until this is known.
of_coroutines = threading.Event()
of_coroutines.set()


def keep_connections() -> None:
    """Keep this process's connections open, whatever ``CONN_MAX_AGE`` is.

    A new connection for each job costs more than the job. Each thread keeps its own connections, so
    there is nothing to pool, and Django's pool rejects persistent connections. A server that
    disappears without closing its connections is detected within seconds, not hours.
    """
    for alias in connections:
        connections.settings[alias]["CONN_MAX_AGE"] = None
        options = connections.settings[alias]["OPTIONS"]
        options.pop("pool", None)
        if connections[alias].vendor == "postgresql":
            connections.settings[alias]["OPTIONS"] = {**_patience(15.0), **options}


def _patience(seconds: float) -> dict[str, int]:
    """Return the libpq options that limit the wait for an unresponsive peer."""
    third = max(1, int(seconds / 3))
    return {
        "connect_timeout": max(2, int(seconds)),
        "keepalives_idle": third,
        "keepalives_interval": third,
        "keepalives_count": 2,
        "tcp_user_timeout": int(seconds * 1000),
    }


def prepare(database: str, limit: float) -> None:
    """Prepare the calling thread's connections to a database for the queue's own statements.

    Each statement may take at most ``limit`` seconds. The isolation level is READ COMMITTED,
    whatever the project's is.
    """
    _thread.prepared = database, limit
    discard(database)


def is_prepared() -> bool:
    """Return whether the calling thread runs the queue's own statements."""
    return hasattr(_thread, "prepared")


def _prepare_unconnected(connection: BaseDatabaseWrapper, limit: float) -> None:
    options = {
        key: value
        for key, value in connection.settings_dict["OPTIONS"].items()
        if key != "isolation_level"
    }
    if connection.vendor == "postgresql":
        options |= _patience(limit)
        # Watch before connecting: Django runs a query on each new connection.
        watch_socket(connection)
    if connection.vendor == "mysql":
        options |= {
            "connect_timeout": int(limit) + 1,
            "read_timeout": int(limit) + 1,
            "write_timeout": int(limit) + 1,
        }
    connection.settings_dict = {**connection.settings_dict, "OPTIONS": options}


def _prepare_connected(connection: BaseDatabaseWrapper, **kwargs: object) -> None:
    """Configure a new connection. Receiver of Django's ``connection_created``."""
    if getattr(_thread, "is_of_coroutines", False):
        of_coroutines.set()
    database, limit = getattr(_thread, "prepared", (None, 0.0))
    if connection.alias == database and connection.vendor == "postgresql":
        time_loader.use(connection)
    # With transaction pooling, these settings would stay on a connection that other clients get.
    if connection.alias == database and not connection.settings_dict.get(
        "DISABLE_SERVER_SIDE_CURSORS"
    ):
        if connection.vendor == "postgresql":
            connection.connection.prepare_threshold = 1
        with connection.cursor() as cursor:
            for statement in _SET.get(_kind(connection), ()):
                cursor.execute(
                    statement.format(milliseconds=int(limit * 1000), seconds=int(limit) + 1)
                )
        if is_cluster(database):
            # This process's other connections may write to other nodes: make those writes visible.
            with connection.cursor() as cursor:
                cursor.execute("SET SESSION wsrep_sync_wait = 7")


def _kind(connection: Any) -> str:
    return (
        "mariadb"
        if connection.vendor == "mysql" and connection.mysql_is_mariadb
        else connection.vendor
    )


connection_created.connect(_prepare_connected, dispatch_uid="dbqueue")


@contextmanager
def snapshot(database: str) -> Iterator[None]:
    """Run all queries inside on one snapshot of the database."""
    with transaction.atomic(using=database):
        if connections[database].vendor != "sqlite":
            with connections[database].cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        yield


def watch_coroutines() -> None:
    """Start to observe whether coroutines use databases.

    Called once, on the thread on which coroutines use databases, before their first use.
    """
    _thread.is_of_coroutines = True
    of_coroutines.clear()


def note_outage() -> None:
    """Record an outage: the heartbeat has resumed, or the claimer's connection has failed.

    Each thread then closes the connections that it has had until now.
    """
    global _outages
    _outages += 1


def leave_old_connections() -> bool:
    """Close the calling thread's connections if there was an outage since the last check.

    Returns whether there was one. Connections that are still open may lead to a former primary,
    where reads raise no error.
    """
    before, _thread.outages = getattr(_thread, "outages", _outages), _outages
    if before == _outages:
        return False
    close_connections()
    return True


def ready_connections() -> None:
    """Prepare connections for a job: after a pause, check each one only if the job uses it."""
    leave_old_connections()
    if time.monotonic() - getattr(_thread, "used_at", 0.0) > IDLE:
        connection: Any
        for connection in connections.all(initialized_only=True):
            connection.health_check_enabled, connection.health_check_done = True, False


def close_after_job(alias: str) -> None:
    """Close a connection once the calling thread's job has ended: it has changed the session."""
    changed: Any = connections[alias]
    changed.dbqueue_has_changed = True


def look_after_connections() -> None:
    """Clean up connections after a job.

    Discard those that it broke, changed or left inside a transaction, and clear the query log of
    DEBUG.
    """
    _thread.used_at = time.monotonic()
    for connection in connections.all(initialized_only=True):
        connection.queries_log.clear()
        if connection.connection is None:
            continue
        has_changed = hasattr(connection, "dbqueue_has_changed")
        if has_changed or _is_closed(connection) or _is_in_transaction(connection):
            discard(connection.alias)
        elif connection.errors_occurred and connection.vendor == "mysql":
            # A Galera node without quorum still answers but serves nothing: another node may.
            discard(connection.alias)
        elif connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()


def close_interrupted() -> None:
    """Close connections after an exception that was raised in the calling thread from outside.

    It may have interrupted the read of a result. MySQL's driver then only reports
    *Commands out of sync* on the next use of the connection.
    """
    for connection in connections.all(initialized_only=True):
        # A worker's connections are in no atomic block. In a test's transaction, drain() goes on.
        if not connection.in_atomic_block:
            with suppress(Exception):
                connection.close()


def _is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return whether Django, or the driver where it can, reports an open transaction.

    The driver also reports a BEGIN that Django did not see; MySQL's, only ``autocommit``.
    """
    if connection.in_atomic_block or not connection.autocommit:
        return True
    driver: Any = connection.connection
    if connection.vendor == "postgresql":
        return bool(driver.info.transaction_status)
    if connection.vendor == "mysql":
        # As the server last reported it: no statement.
        return hasattr(driver, "get_autocommit") and not driver.get_autocommit()
    return bool(getattr(driver, "in_transaction", False))


def _is_closed(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the driver's connection was closed without Django.

    Queries the driver, not the server.
    """
    driver: Any = connection.connection
    if connection.vendor == "sqlite":
        try:
            return bool(driver.total_changes < 0)
        except driver.ProgrammingError:
            return True
    return bool(driver.closed) if hasattr(driver, "closed") else not getattr(driver, "open", True)


def discard(alias: str) -> None:
    """Close the calling thread's connection in any state. The next query opens a new one."""
    with suppress(Exception):
        connections[alias].close()
    del connections[alias]
    if alias in (of_thread := getattr(_thread, "connections", {})):
        of_thread[alias] = connections[alias]
    database, limit = getattr(_thread, "prepared", (None, 0.0))
    if alias == database:
        unwatch_socket()
        _prepare_unconnected(connections[alias], limit)


def discard_lost() -> None:
    """Close those of the calling thread's connections that had errors and cannot be used."""
    connection: Any
    for connection in connections.all(initialized_only=True):
        if (
            connection.errors_occurred
            and not connection.in_atomic_block
            and (connection.connection is None or not connection.is_usable())
        ):
            discard(connection.alias)


def answers(alias: str) -> bool:
    """Return whether a database answers a query."""
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")
    except (DatabaseError, InterfaceError):
        return False
    return True


def close_connections() -> None:
    for connection in connections.all(initialized_only=True):
        discard(connection.alias)


def of_this_thread() -> dict[str, BaseDatabaseWrapper]:
    """Return this thread's connections, by alias, for other threads. It stays up to date.

    Databases that are not configured as they should be are left out.
    """
    _thread.connections = found = {}
    for alias in connections:
        with suppress(Exception):
            found[alias] = connections[alias]
    return found


def keep_handlers() -> None:
    """Create this thread's caches and task backends in its own context, for all of its jobs.

    Django keeps them in the context, unlike the connections of databases. In the copy of a job,
    they would be created, and the caches connected, for each job. Those that are not configured as
    they should be are left out.
    """
    for handler in (caches, task_backends):
        for alias in handler:
            with suppress(Exception):
                handler[alias]


def cancel_statements(of_thread: Mapping[str, BaseDatabaseWrapper]) -> None:
    """Cancel the statements that another thread waits for, on PostgreSQL and SQLite.

    Otherwise they go on in the server, and keep their locks, when their job has ended.
    """
    for each in list(of_thread.values()):
        driver: Any = each.connection
        # The thread may close it at the same time.
        with suppress(Exception):
            if each.vendor == "sqlite":
                driver.interrupt()
            elif each.vendor == "postgresql" and driver.info.transaction_status.name == "ACTIVE":
                if hasattr(driver, "cancel_safe"):
                    driver.cancel_safe(timeout=CANCEL)
                else:  # psycopg 3.1
                    driver.cancel()


def sessions(of_thread: Mapping[str, BaseDatabaseWrapper]) -> dict[str, int]:
    """Return the process id of each PostgreSQL session of another thread, by alias."""
    found = {}
    for each in list(of_thread.values()):
        # The thread may close it at the same time.
        with suppress(Exception):
            if each.vendor == "postgresql" and each.connection is not None:
                found[each.alias] = each.connection.info.backend_pid
    return found
