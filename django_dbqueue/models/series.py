"""Series: jobs that share one slot, because one process runs them one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import cycle, takewhile
from typing import TYPE_CHECKING, Any

from .locking import lock_first
from .states import State

if TYPE_CHECKING:
    from .jobs import JobQuerySet

# Number of jobs like the given one that a worker thread finishes soon.
InARow = Callable[[Any], int]


def alone(job: Any) -> int:
    """Return 1, for callers that run no series."""
    return 1


def next_in_line(jobs: JobQuerySet, leaders: Sequence[Any], limit: int, in_a_row: InARow) -> list[Any]:
    """Make up to ``limit`` waiting jobs ready, each in the series of one leader, and return them.

    They wait for semaphores that the leaders have just acquired. They are the first waiting jobs,
    up to the first that differs from the leader, so no job is overtaken.
    """
    alike = defaultdict(list)
    for job in leaders:
        # A rate counts the start of each job, so jobs with a rate form no series.
        if in_a_row(job) > 1 and all("most" in each for each in job.limits):
            alike[job.task, job.queue, tuple(each["key"] for each in job.limits)].append(job)
    found: list[Any] = []
    for (_task, _queue, keys), first in alike.items():
        for key in keys:
            if (number := min(limit - len(found), (in_a_row(first[0]) - 1) * len(first))) > 0:
                waiting = lock_first(jobs.waiting_for(key), number)
                found += _join(first, waiting)
    jobs.filter(pk__in=[job.pk for job in found], state=State.BLOCKED).update(state=State.READY, blocked_by=None)
    return found


def _join(first: Sequence[Any], waiting: Sequence[Any]) -> list[Any]:
    want = first[0].task, first[0].queue, first[0].limits
    found = list(takewhile(lambda job: (job.task, job.queue, job.limits) == want, waiting))
    for job, leader in zip(found, cycle(first), strict=False):
        job.series, job.blocked_by, job.state = leader.series, None, State.READY
    return found
