"""Wake idle workers with PostgreSQL's NOTIFY.

A NOTIFY is sent after the commit, a few times a second at most.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from functools import partial

from django.db import Error, connections

from .transactions import on_commit_all

CHANNEL = "dbqueue"
# SQL for the channel of the connection's tables. Each other schema has its own, such as
# dbqueue_bulk, so that one server's queues do not wake each other's workers. The migration has the
# same for dbqueue_enqueue(). A join of pg_class and pg_namespace would take 0.2 ms.
CHANNEL_SQL = f"""
('{CHANNEL}' || coalesce('_' || nullif(
    (parse_ident(
        (pg_identify_object('pg_class'::regclass, to_regclass('dbqueue_job'), 0)).schema
    ))[1],
    'public'
), ''))::name
"""
PRIORITY = re.compile("-?[0-9]{1,3}")
# A worker that was just woken polls again by itself after this time, in seconds.
QUIET = 0.05

_last: dict[tuple[str, str], float] = {}


def wake(database: str, queue: str, priority: int | None = None) -> None:
    """Wake the workers that wait for jobs of a queue.

    If the payload has the priority too, they start at once. On other databases than PostgreSQL,
    workers find the jobs by polling.
    """
    if connections[database].vendor == "postgresql":
        # A queue's name contains no comma.
        on_commit_all(
            partial(_notify, database, queue if priority is None else f"{queue},{priority}")
        )


def notify_queues(database: str, queues: Iterable[str]) -> None:
    for queue in set(queues):
        wake(database, queue)


def parse_payload(payload: str) -> tuple[str, int | None]:
    """Return the queue and the priority of a NOTIFY payload.

    An invalid priority becomes None: any client may send on the channel.
    """
    queue, _comma, priority = payload.partition(",")
    return queue, int(priority) if PRIORITY.fullmatch(priority) else None


def _notify(database: str, payload: str) -> None:
    now = time.monotonic()
    if now - _last.get((database, payload), -QUIET) < QUIET:
        return
    try:
        with connections[database].cursor() as cursor:
            cursor.execute(f"SELECT pg_notify({CHANNEL_SQL}, %s)", [payload])
        # Without autocommit, the NOTIFY may never be sent.
        if connections[database].get_autocommit():
            _last[database, payload] = now
    except Error:
        # The jobs are committed and workers poll: a failed hint must not fail the caller's work.
        return
