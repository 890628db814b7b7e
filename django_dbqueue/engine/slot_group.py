"""Slot groups: jobs that share one slot, because one process runs them one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import cycle, takewhile

from ..models import ClaimedJob
from ..models.enums import State
from ..models.job import JobQuerySet
from ..models.locking import locked_parts
from .claim_size import Budget

# Number of jobs like the given one that a worker thread is to run one after the other, if that many
# wait for each slot.
GroupSize = Callable[[ClaimedJob, int], int]
# The number of waiting jobs that are counted.
COUNTED = 1000


def ungrouped(job: ClaimedJob, line: int) -> int:
    """Return 1, for callers that form no groups."""
    return 1


def beyond_share(
    jobs: JobQuerySet, ready: Sequence[ClaimedJob], group_size: GroupSize
) -> list[ClaimedJob]:
    """Return the ready jobs that this claim leaves to other processes, which it has to notify.

    A claim takes half of the free slots of short jobs, rounded up, while others wait for them.
    Otherwise one process has all slots for the time of a group, and the others have none.
    """
    alike = defaultdict(list)
    for job in ready:
        if group_size(job, COUNTED) > 1:
            alike[job.task, job.queue, tuple(each["key"] for each in job.limits)].append(job)
    several = {kind: found for kind, found in alike.items() if len(found) > 1}
    with_line = jobs.first_in_line({key: 1 for _task, _queue, keys in several for key in keys})
    return [
        job
        for (_task, _queue, keys), found in several.items()
        if not with_line.keys().isdisjoint(keys)
        for job in found[(len(found) + 1) // 2 :]
    ]


def next_in_line(
    jobs: JobQuerySet, leaders: Sequence[ClaimedJob], limit: int, group_size: GroupSize
) -> list[ClaimedJob]:
    """Make up to ``limit`` waiting jobs ready, each in the group of one leader, and return them.

    They wait for semaphores that the leaders have just acquired. They are the first waiting jobs,
    up to the first that differs from the leader, so no job is overtaken.
    """
    alike = defaultdict(list)
    for job in leaders:
        # A rate counts the start of each job, so jobs with a rate form no group.
        if group_size(job, COUNTED) > 1 and all("max_running" in each for each in job.limits):
            slots = tuple((each["key"], each["max_running"]) for each in job.limits)
            alike[job.task, job.queue, slots].append(job)
    found: list[ClaimedJob] = []
    for (_task, _queue, slots), first in alike.items():
        for key, number in slots if len(found) < limit else ():
            line = COUNTED if number == 1 else jobs.waiting_for(key)[:COUNTED].count() // number
            size = group_size(first[0], line)
            if (most := min(limit - len(found), (size - 1) * len(first))) > 0:
                found += _join(first, _lock_small(jobs.waiting_for(key), most))
    jobs.filter(pk__in=[job.pk for job in found], state=State.BLOCKED).update(
        state=State.READY, blocked_by=None
    )
    return found


def _lock_small(rows: JobQuerySet, limit: int) -> list[ClaimedJob]:
    """Lock the first rows, up to one with large arguments.

    That one is claimed by itself, if the claim's budget has room for it.
    """
    budget, found = Budget(0, held=1), list[ClaimedJob]()
    for part in locked_parts(rows, limit, found):
        found += budget.take(part, ClaimedJob.objects.using(rows.db))
        if budget.is_spent:
            break
    return found


def _join(first: Sequence[ClaimedJob], waiting: Sequence[ClaimedJob]) -> list[ClaimedJob]:
    want = first[0].task, first[0].queue, first[0].limits
    found = list(takewhile(lambda job: (job.task, job.queue, job.limits) == want, waiting))
    for job, leader in zip(found, cycle(first), strict=False):
        job.slot_group, job.blocked_by, job.state = leader.slot_group, None, State.READY
    return found
