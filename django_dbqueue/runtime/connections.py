"""The database connections of a running role: kept open, looked after, and never left in a task's state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ..models.cluster import is_cluster
from .socket_watchdog import forget_line, note_line

# A connection that was idle for so many seconds is checked before it is used again.
IDLE = 1.0
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
        "SET SESSION max_execution_time = {milliseconds}, SESSION innodb_lock_wait_timeout = {seconds}",
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    ],
}

_thread = threading.local()
# The number of times that this process has noticed an outage, or its end.
_outages = 0
# Whether any coroutine has used a database, on the one thread on which all of a loop do; set, until that is known.
of_coroutines = threading.Event()
of_coroutines.set()


def keep_connections() -> None:
    """Keep this process's connections whatever ``CONN_MAX_AGE`` says: a new one for each job costs more than the job.

    Each thread keeps its own, so there is nothing to pool, and Django's pool refuses connections that are kept. A server
    that has gone without a word is noticed within seconds, not hours.
    """
    for alias in connections:
        connections.settings[alias]["CONN_MAX_AGE"] = None
        options = connections.settings[alias]["OPTIONS"]
        options.pop("pool", None)
        if connections[alias].vendor == "postgresql":
            connections.settings[alias]["OPTIONS"] = {**_patience(15.0), **options}


def _patience(seconds: float) -> dict[str, int]:
    """For libpq: how long an end of a connection is waited for that does not answer any more."""
    third = max(1, int(seconds / 3))
    return {
        "connect_timeout": max(2, int(seconds)),
        "keepalives_idle": third,
        "keepalives_interval": third,
        "keepalives_count": 2,
        "tcp_user_timeout": int(seconds * 1000),
    }


def prepare(database: str, limit: float) -> None:
    """Make the calling thread's connections to a database fit for the queue's own statements.

    None of them may take longer than ``limit`` seconds, and whatever the project's isolation level is, theirs is READ
    COMMITTED.
    """
    _thread.prepared = database, limit
    discard(database)


def _prepare_unconnected(connection: Any, limit: float) -> None:
    options = {key: value for key, value in connection.settings_dict["OPTIONS"].items() if key != "isolation_level"}
    if connection.vendor == "postgresql":
        options |= _patience(limit)
        # Before it is made: Django asks something on each new connection.
        note_line(connection)
    if connection.vendor == "mysql":
        options |= {"connect_timeout": int(limit) + 1, "read_timeout": int(limit) + 1, "write_timeout": int(limit) + 1}
    connection.settings_dict = {**connection.settings_dict, "OPTIONS": options}


def _prepare_connected(connection: Any, **kwargs: Any) -> None:
    """Told by Django of each new connection."""
    if getattr(_thread, "is_of_coroutines", False):
        of_coroutines.set()
    database, limit = getattr(_thread, "prepared", (None, 0.0))
    # Behind a pool by transactions, what is set here would stay with a connection that others are given.
    if connection.alias == database and not connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
        if connection.vendor == "postgresql":
            connection.connection.prepare_threshold = 1
        with connection.cursor() as cursor:
            for statement in _SET.get(_kind(connection), ()):
                cursor.execute(statement.format(milliseconds=int(limit * 1000), seconds=int(limit) + 1))
        if is_cluster(database):
            # What this process has written by other connections may have gone to other nodes: it is seen here, too.
            with connection.cursor() as cursor:
                cursor.execute("SET SESSION wsrep_sync_wait = 7")


def _kind(connection: Any) -> str:
    return "mariadb" if connection.vendor == "mysql" and connection.mysql_is_mariadb else connection.vendor


connection_created.connect(_prepare_connected, dispatch_uid="dbqueue")


@contextmanager
def snapshot(database: str) -> Iterator[None]:
    """All queries inside see one moment of the database."""
    with transaction.atomic(using=database):
        if connections[database].vendor != "sqlite":
            with connections[database].cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        yield


def watch_coroutines() -> None:
    """Called once, on the thread on which coroutines use databases, before any has."""
    _thread.is_of_coroutines = True
    of_coroutines.clear()


def note_outage() -> None:
    """Make each thread leave its connections: a heartbeat is back after an outage, or the claimer's connection has failed."""
    global _outages
    _outages += 1


def leave_old_connections() -> bool:
    """Close the calling thread's connections if there was an outage since they were looked at last. Returns whether there was.

    Those that are still open may lead to a server that is the primary no more, where whoever only reads sees no error.
    """
    before, _thread.outages = getattr(_thread, "outages", _outages), _outages
    if before == _outages:
        return False
    close_connections()
    return True


def ready_connections() -> None:
    """Before a job: after a pause, have each connection checked if the job uses it, and only then."""
    leave_old_connections()
    if time.monotonic() - getattr(_thread, "used_at", 0.0) > IDLE:
        connection: Any
        for connection in connections.all(initialized_only=True):
            connection.health_check_enabled, connection.health_check_done = True, False


def look_after_connections() -> None:
    """After a job: drop connections that it broke, or left inside a transaction; and what DEBUG notes of all queries."""
    _thread.used_at = time.monotonic()
    for connection in connections.all(initialized_only=True):
        connection.queries_log.clear()
        if connection.connection is None:
            continue
        if _is_closed(connection) or _is_in_transaction(connection):
            discard(connection.alias)
        elif connection.errors_occurred and connection.vendor == "mysql":
            # A node of Galera that has lost the majority still answers, but serves nothing: another one may.
            discard(connection.alias)
        elif connection.errors_occurred:
            connection.close_if_unusable_or_obsolete()


def close_interrupted() -> None:
    """After an exception that was raised in the calling thread from outside: it may have come in the middle of an answer, and
    MySQL's driver has no more than *Commands out of sync* to say to whoever uses the connection next.
    """
    for connection in connections.all(initialized_only=True):
        # In a worker, none is. In a test's transaction, drain() goes on.
        if not connection.in_atomic_block:
            with suppress(Exception):
                connection.close()


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
    database, limit = getattr(_thread, "prepared", (None, 0.0))
    if alias == database:
        forget_line()
        _prepare_unconnected(connections[alias], limit)


def close_connections() -> None:
    for connection in connections.all(initialized_only=True):
        discard(connection.alias)
