"""What is done once others can see its cause, and what is done again as others came before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from django.db import OperationalError, connections

# PostgreSQL's serialization_failure and deadlock_detected; MySQL's ER_LOCK_DEADLOCK, which is also what a COMMIT on Galera says
# of rows that another node has written, and ER_CHECKREAD.
_CONFLICTS = ("40001", "40P01", 1213, 1020)


def is_conflict(error: BaseException) -> bool:
    """Whether the database has undone the transaction for the sake of another, and it may succeed when it is made again."""
    cause = error.__cause__ if isinstance(error, OperationalError) else None
    code = getattr(cause, "sqlstate", None) or (cause.args[0] if cause and cause.args else None)
    return code in _CONFLICTS


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
