"""Bulk discard of very many jobs, in statements of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from .expressions import Now
from .jobs import JobQuerySet
from .states import State

BATCH = 1000


def clear(jobs: JobQuerySet) -> int:
    """Discard the waiting jobs that were enqueued before the call. Returns how many."""
    return sum(_clear(rows) for rows in _walks(jobs))


def _walks(jobs: JobQuerySet) -> Iterator[JobQuerySet]:
    """Yield the waiting jobs, in parts that an index holds in the order of ``run_after``."""
    for lane in jobs.lanes():
        yield jobs.ready().filter(queue=lane.queue, priority=lane.priority)
    yield jobs.filter(state=State.SCHEDULED)
    yield jobs.filter(state=State.BLOCKED)


def _clear(rows: JobQuerySet) -> int:
    cleared, rest = 0, rows
    while found := list(rest.order_by("run_after").values_list("pk", "run_after", Now())[:BATCH]):
        cleared += rows.filter(pk__in=[pk for pk, after, now in found]).discard()
        if rest is rows:
            # Jobs enqueued from here on are left alone: otherwise the loop might not end.
            rows = rows.filter(enqueued_at__lte=found[0][2])
        # Not from the beginning: it may be full of other queues' jobs, and on PostgreSQL of the
        # dead rows of this loop. SQLite compares times as text: a time that it has written itself,
        # to the millisecond, is less than the same time passed as a parameter.
        rest = rows.filter(run_after__gte=found[-1][1] - timedelta(milliseconds=1))
    return cleared
