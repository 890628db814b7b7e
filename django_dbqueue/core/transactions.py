"""Transactions: ``on_commit()`` across all open transactions of this thread, and conflicts.

A callback runs once other connections can see its cause. A transaction that another one has
overtaken can be repeated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db import OperationalError, connections, transaction

from .error_reports import is_a

T = TypeVar("T")

# Calls of a step that other transactions overtake.
TRIES = 5
# PostgreSQL's serialization_failure and deadlock_detected; MySQL's ER_LOCK_DEADLOCK, which a COMMIT
# on Galera also returns for rows that another node has written, and ER_CHECKREAD.
_CONFLICTS = ("40001", "40P01", 1213, 1020)


def is_conflict(error: BaseException) -> bool:
    """Return True if the database rolled back the transaction in favour of another one.

    The transaction may succeed when it is repeated.
    """
    cause = error.__cause__ if is_a(error, OperationalError) else None
    code = getattr(cause, "sqlstate", None) or (cause.args[0] if cause and cause.args else None)
    return code in _CONFLICTS


def repeated(database: str, step: Callable[[], T]) -> T:
    """Call ``step``, again after each conflict, five times at most. Return its result.

    Not within a transaction, which the conflict has rolled back.
    """
    for number in range(TRIES - 1):
        try:
            return step()
        except OperationalError as error:
            if not is_conflict(error) or connections[database].in_atomic_block:
                raise
            time.sleep(random.uniform(0, 0.1 * 2**number))
    return step()


class writing(transaction.Atomic):
    """``transaction.atomic()`` for blocks that read before they write.

    On SQLite the transaction waits for other writers as it begins: a transaction that begins as a
    reader fails at once, with "database is locked", if another has written meanwhile.
    """

    def __init__(self, database: str | None, *, savepoint: bool = True) -> None:
        super().__init__(using=database, savepoint=savepoint, durable=False)

    def __enter__(self) -> None:
        connection: Any = transaction.get_connection(self.using)
        if connection.vendor != "sqlite":
            return super().__enter__()
        connection.ensure_connection()
        mode, connection.transaction_mode = connection.transaction_mode, "IMMEDIATE"
        try:
            super().__enter__()
        finally:
            connection.transaction_mode = mode


@dataclass(frozen=True)
class CommitHook:
    """The callback of ``on_commit_all()`` on one database, which acts once, however often called.

    waiting: the databases whose commit is still to come. asked: those that were ever waited for.
    """

    action: Callable[[], object]
    alias: str
    waiting: set[str]
    asked: frozenset[str]

    def __call__(self) -> None:
        if self.alias in self.waiting:
            self.waiting.discard(self.alias)
            if not self.waiting:
                on_commit_all(self.action, asked=self.asked)


def on_commit_all(action: Callable[[], object], *, asked: frozenset[str] = frozenset()) -> None:
    """Call ``action`` once this thread has no transaction open on any database.

    Without an open transaction, the call is immediate. If one of them is rolled back, or its
    savepoint, there is no call.
    """
    # Check each connection only once: a test that captures the callbacks calls them with its own
    # transaction still open.
    waiting = {
        connection.alias
        for connection in connections.all(initialized_only=True)
        if connection.alias not in asked and connection.in_atomic_block
    }
    if not waiting:
        action()
        return
    # On each of them at once: one that is rolled back drops its callback, whatever the order.
    for alias in list(waiting):
        connections[alias].on_commit(CommitHook(action, alias, waiting, asked | waiting))
