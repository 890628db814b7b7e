"""Find the lanes that have ready jobs with one statement, whatever their number.

200 lanes take 3 ms on PostgreSQL; with one statement for each lane, 100 ms.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db import connections

from .enums import Lane
from .union import TOGETHER

# Each step is one lookup in the lane index: the next queue, or the next priority of a queue. NULL
# is after the last one.
LANES = """
WITH RECURSIVE queues (queue) AS ({queues}),
lanes (queue, priority) AS (
    SELECT queues.queue, (
        SELECT priority FROM {ready} AND queue = queues.queue ORDER BY priority LIMIT 1
    ) FROM queues WHERE queues.queue IS NOT NULL
    UNION ALL
    SELECT lanes.queue, (
        SELECT priority FROM {ready} AND queue = lanes.queue AND priority > lanes.priority
        ORDER BY priority LIMIT 1
    ) FROM lanes WHERE lanes.priority IS NOT NULL
)
SELECT queue, priority FROM lanes WHERE priority IS NOT NULL ORDER BY queue, priority
"""
ALL = """
    SELECT (SELECT queue FROM {ready} ORDER BY queue LIMIT 1) AS queue
    UNION ALL
    SELECT (SELECT queue FROM {ready} AND queue > queues.queue ORDER BY queue LIMIT 1)
    FROM queues WHERE queues.queue IS NOT NULL
"""
# The order makes PostgreSQL take the index. Without it, it may read the table for the first match.
ONE = "SELECT (SELECT queue FROM {ready} AND queue = %s ORDER BY priority LIMIT 1) AS queue"


def lanes(database: str, table: str, queues: Iterable[str] | None) -> list[Lane]:
    """Return the lanes of these queues, or of all queues for None, in order."""
    connection = connections[database]
    source = connection.ops.quote_name(table)
    if connection.vendor == "mysql":  # It has no partial indexes, and may choose another one.
        source += " FORCE INDEX (dbqueue_job_lane)"
    ready = f"{source} WHERE state = 'ready'"
    names = None if queues is None else sorted(set(queues))
    found: list[Lane] = []
    with connection.cursor() as cursor:
        if names is None:
            cursor.execute(LANES.format(ready=ready, queues=ALL.format(ready=ready)))
            return [Lane(*row) for row in cursor.fetchall()]
        for start in range(0, len(names), TOGETHER):
            part = names[start : start + TOGETHER]
            each = " UNION ALL ".join([ONE.format(ready=ready)] * len(part))
            cursor.execute(LANES.format(ready=ready, queues=each), part)
            found += [Lane(*row) for row in cursor.fetchall()]
    return found
