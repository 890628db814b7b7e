"""What is done once others can see its cause, and what is done again as others came before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from django.db import OperationalError, connections, transaction

# PostgreSQL's serialization_failure and deadlock_detected; MySQL's ER_LOCK_DEADLOCK, which is also what a COMMIT on Galera says
# of rows that another node has written, and ER_CHECKREAD.
_CONFLICTS = ("40001", "40P01", 1213, 1020)


def is_conflict(error: BaseException) -> bool:
    """Whether the database has undone the transaction for the sake of another, and it may succeed when it is made again."""
    cause = error.__cause__ if isinstance(error, OperationalError) else None
    code = getattr(cause, "sqlstate", None) or (cause.args[0] if cause and cause.args else None)
    return code in _CONFLICTS


@contextmanager
def writing(database: str) -> Iterator[None]:
    """A transaction that reads before it writes. SQLite has it wait for other writers as it begins: one that begins as a reader
    fails at once if another has written meanwhile.
    """
    connection: Any = connections[database]
    with ExitStack() as stack:
        if connection.vendor != "sqlite":
            stack.enter_context(transaction.atomic(using=database, savepoint=False))
        else:
            connection.ensure_connection()
            mode, connection.transaction_mode = connection.transaction_mode, "IMMEDIATE"
            try:
                stack.enter_context(transaction.atomic(using=database, savepoint=False))
            finally:
                connection.transaction_mode = mode
        yield


def after_commit(action: Callable[[], object], *, asked: frozenset[str] = frozenset()) -> None:
    """Call ``action`` once this thread has no transaction open on any database.

    At once if there is none; never if one of them is rolled back.
    """
    for connection in connections.all(initialized_only=True):
        if connection.alias not in asked and connection.in_atomic_block:
            # Not asked again: a test that captures the callbacks calls them with its own transaction still open.
            connection.on_commit(partial(after_commit, action, asked=asked | {connection.alias}))
            return
    action()
