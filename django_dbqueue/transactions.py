"""When something may happen that other connections must be able to see the cause of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from django.db import connections


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
