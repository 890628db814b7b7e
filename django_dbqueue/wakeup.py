"""Telling idle workers that there is work: PostgreSQL's NOTIFY, after the commit, a few times a second at most."""

from __future__ import annotations

import time
from functools import partial

from django.db import Error, connections

from .transactions import after_commit

CHANNEL = "dbqueue"
# A worker that was just woken looks again within this time by itself.
QUIET = 0.05

_last: dict[tuple[str, str], float] = {}


def wake(database: str, queue: str) -> None:
    """Wake the workers that wait for jobs of a queue. Elsewhere than on PostgreSQL they find them by polling."""
    if connections[database].vendor == "postgresql":
        after_commit(partial(_notify, database, queue))


def _notify(database: str, queue: str) -> None:
    now = time.monotonic()
    if now - _last.get((database, queue), -QUIET) < QUIET:
        return
    _last[database, queue] = now
    try:
        with connections[database].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, queue])
    except Error:
        # The jobs are committed, and workers poll: the caller's work must not fail for a hint.
        return
