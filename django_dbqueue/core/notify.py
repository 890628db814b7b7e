"""Telling idle workers that there is work: PostgreSQL's NOTIFY, after the commit, a few times a second at most."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from functools import partial

from django.db import Error, connections

from .transactions import after_commit

CHANNEL = "dbqueue"
PRIORITY = re.compile("-?[0-9]{1,3}")
# A worker that was just woken looks again after this time by itself.
QUIET = 0.05

_last: dict[tuple[str, str], float] = {}


def wake(database: str, queue: str, priority: int | None = None) -> None:
    """Wake the workers that wait for jobs of a queue; they start at once if they are told the priority too.

    Elsewhere than on PostgreSQL they find them by polling.
    """
    if connections[database].vendor == "postgresql":
        # No name of a queue has a comma.
        after_commit(partial(_notify, database, queue if priority is None else f"{queue},{priority}"))


def notify_queues(database: str, queues: Iterable[str]) -> None:
    for queue in set(queues):
        wake(database, queue)


def parse_payload(payload: str) -> tuple[str, int | None]:
    """The queue and the priority that are told of. A priority that cannot be one is None: anybody may send on the channel."""
    queue, _comma, priority = payload.partition(",")
    return queue, int(priority) if PRIORITY.fullmatch(priority) else None


def _notify(database: str, payload: str) -> None:
    now = time.monotonic()
    if now - _last.get((database, payload), -QUIET) < QUIET:
        return
    try:
        with connections[database].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, payload])
        # Without autocommit, it may never go out.
        if connections[database].get_autocommit():
            _last[database, payload] = now
    except Error:
        # The jobs are committed, and workers poll: the caller's work must not fail for a hint.
        return
