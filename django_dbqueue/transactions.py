"""When something may happen that other connections must be able to see the cause of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from django.db import connections


def after_commit(action: Callable[[], object], *, besides: frozenset[str] = frozenset()) -> None:
    """Call ``action`` once this thread has no transaction open on any database, ``besides`` the named ones.

    At once if there is none; never if one of them is rolled back.
    """
    for connection in connections.all(initialized_only=True):
        if connection.alias not in besides and connection.in_atomic_block:
            # Not asked again: a test that captures the callbacks calls them with its own transaction still open.
            connection.on_commit(partial(after_commit, action, besides=besides | {connection.alias}))
            return
    action()
