"""Admission of limited jobs: semaphores, and the slots that running attempts take.

Decisions are made under the locks of all semaphores involved, taken in key order. One statement
takes the lock, the next one counts the slots. In a single statement, both would use the same
snapshot: six claimers then ran 4 to 12 jobs with a limit of 2.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from django.db.models import F

from ..core.notify import notify_queues
from ..core.transactions import writing
from ..core.uuid7 import uuid7
from ..limits import strictest
from ..models import ClaimedJob, Job, Semaphore, Slot
from ..models.enums import State
from ..models.job import JobQuerySet
from ..models.locking import lock_waiting
from .galera import certify
from .semaphores import (
    breadth,
    count_lines,
    count_slots,
    delete_slots,
    insert_and_lock,
    locked,
    rows_of,
    store,
    take_slots,
)
from .slot_group import GroupSize, beyond_share, next_in_line, ungrouped
from .unblock import assign_times, unblock

# Above this many keys, enqueue does not check for existing waiters.
FEW = 100


def acquire(
    database: str, jobs: Sequence[ClaimedJob], limit: int, group_size: GroupSize = ungrouped
) -> list[ClaimedJob]:
    """Return the locked ready jobs that may be claimed now.

    Some are left to other processes: see beyond_share(). The others become BLOCKED, or get a reason
    in ``not_to_run``. Up to ``limit``, the next waiting jobs follow; each runs in the slot group of
    one of the returned jobs.
    """
    limited = [job for job in jobs if job.limits]
    for job in limited:
        job.limits = strictest(job.limits)
    if surplus := beyond_share(ClaimedJob.objects.using(database), limited, group_size):
        notify_queues(database, {job.queue for job in surplus})
        jobs = [job for job in jobs if job not in surplus]
        limited = [job for job in limited if job not in surplus]
    # Of two numbers for one key, the smaller one wins.
    wanted = sorted((limit for job in limited for limit in job.limits), key=breadth, reverse=True)
    semaphores = insert_and_lock(database, {limit["key"]: limit for limit in wanted})
    count_slots(database, semaphores)
    admitted = [job for job in limited if _try_acquire(job, semaphores)]
    store(database, [each for each in semaphores.values() if each.is_changed])
    blocked = defaultdict(list)
    for job in limited:
        if job.blocked_by:
            blocked[job.blocked_by].append(job.pk)
    for key, ids in blocked.items():
        Job.objects.using(database).filter(pk__in=ids).update(state=State.BLOCKED, blocked_by=key)
    rates = [row for row in semaphores.values() if row.interval]
    assign_times(database, [row for row in rates if row.pk in blocked or row.is_behind])
    behind = next_in_line(
        ClaimedJob.objects.using(database), admitted, limit - len(jobs), group_size
    )
    if keys := {limit["key"] for job in admitted for limit in job.limits if "max_running" in limit}:
        certify(
            rows_of(database).filter(pk__in=keys),
            {"burst": F("burst") + 1},
            {"burst": F("burst") - 1},
        )
    take_slots(database, [*admitted, *behind])
    passed = sorted({key for job in limited for key in _not_used(job)})
    free = {key: semaphores[key].free for key in passed}
    notify_queues(database, unblock(database, free, semaphores))
    return [*(job for job in jobs if not job.blocked_by), *behind]


def extend(
    jobs: JobQuerySet, member: ClaimedJob, limit: int, group_size: GroupSize
) -> list[ClaimedJob]:
    """Return up to ``limit`` of the waiting ``jobs`` that join the slot group of a running job.

    They share its slot, so none becomes free or is taken. None are returned if the group has ended.
    """
    database = jobs.db
    (key,) = [limit["key"] for limit in member.limits]
    row = rows_of(database).filter(pk=key)
    # The lock first: the next statement sees the slots that the last settlement has left.
    list(lock_waiting(row))
    slots = Slot.objects.using(database).taken().filter(semaphore=key)
    if not slots.filter(slot_group=member.slot_group).exists():  # type: ignore[misc]
        return []
    found = next_in_line(jobs, [member], limit, group_size)
    if found:
        certify(row, {"burst": F("burst") + 1}, {"burst": F("burst") - 1})
        take_slots(database, found)
    return found


def block_surplus(database: str, jobs: Sequence[Job]) -> None:
    """Block new jobs that are certain to find no slot, so that no worker claims them in vain.

    Slots may have become free by the time of the commit; the sweep finds such jobs.
    """
    waiting = [job for job in jobs if job.limits and job.state == State.READY]
    keys = {limit["key"] for job in waiting for limit in job.limits}
    few = keys if len(keys) <= FEW else set[str]()
    lines = Job.objects.using(database).first_in_line(dict.fromkeys(few, 1))
    ahead: Counter[str] = Counter()
    for job in waiting:
        for limit in sorted(job.limits, key=breadth):
            ahead[limit["key"]] += 1
            is_full = limit["key"] in lines or ahead[limit["key"]] > limit.get(
                "max_running", limit.get("burst")
            )
            if is_full and not limit.get("discard"):
                job.state, job.blocked_by = State.BLOCKED, limit["key"]
                break


def release_slots(
    database: str, jobs: Sequence[ClaimedJob], keeps_slot: Callable[[ClaimedJob], bool]
) -> list[str]:
    """Release the slots of settled jobs. Return the queue of each job that becomes ready.

    A slot that the next job of the slot group keeps does not become free: no semaphore is locked.
    """
    kept = {job.pk for job in jobs if keeps_slot(job)}
    leaving = [job for job in jobs if job.pk not in kept]
    if kept:
        delete_slots(database, kept)
    keys = {limit["key"] for job in leaving for limit in job.limits or () if "max_running" in limit}
    if not keys:
        return []
    with writing(database, savepoint=False):
        rows = locked(database, keys)
        delete_slots(database, [job.pk for job in leaving])
        lines = count_lines(database, rows)
        # Jobs that are ready already will take the slots that were free before.
        left = _slots_of(leaving)
        free = {key: min(row.free, left[key]) for key, row in lines.items()}
        return unblock(database, free, lines)


def leave_limits(database: str, jobs: Sequence[ClaimedJob]) -> list[str]:
    """Give back what limited jobs hold that were released. Return the queue of each ready job.

    A job that is ready again takes a slot itself; the slots of the others become free.
    """
    rows = Job.objects.using(database).filter(pk__in=[job.pk for job in jobs])
    ended = set(rows.exclude(state=State.READY).values_list("pk", flat=True))
    gone = [job for job in jobs if job.pk in ended]
    if gone:  # All locks at once, in the order of the keys.
        keys = {limit["key"] for job in gone for limit in job.limits}
        list(locked(database, keys.union(*(job.rated_until for job in jobs))))
    give_back_starts(database, jobs)
    return release_slots(database, gone, lambda job: False) if gone else []


def give_back_starts(database: str, jobs: Iterable[ClaimedJob]) -> None:
    """Give back the starts of rates that jobs have used without starting.

    A start is kept if the rate has allowed another one since.
    """
    used = [(earliest, key) for job in jobs for key, earliest in job.rated_until.items()]
    if not used:
        return
    rows = {row.pk: row for row in locked(database, {key for _earliest, key in used})}
    for earliest, key in sorted(used, reverse=True):
        if key in rows:
            rows[key].give_back(earliest)
    store(database, [row for row in rows.values() if row.is_changed])


def _slots_of(jobs: Iterable[ClaimedJob]) -> Counter[str]:
    """Count the slots of each semaphore that the jobs hold: jobs of a slot group share one."""
    leaders = {job.slot_group or job.pk: job for job in jobs}
    return Counter(limit["key"] for job in leaders.values() for limit in job.limits or ())


def _not_used(job: ClaimedJob) -> list[str]:
    """Return the semaphores after the one that refused a job. Other jobs may have their slots."""
    if not (job.blocked_by or job.not_to_run):
        return []
    keys = [limit["key"] for limit in sorted(job.limits, key=breadth) if "max_running" in limit]
    return (
        keys
        if job.not_to_run
        else keys[keys.index(job.blocked_by) + 1 :]
        if job.blocked_by in keys
        else []
    )


def _try_acquire(job: ClaimedJob, semaphores: dict[str, Semaphore]) -> bool:
    """Acquire all semaphores of a job, or none. Return True if the job may run now."""
    for limit in sorted(job.limits, key=breadth):
        row = semaphores[limit["key"]]
        if row.is_free(limit):
            continue
        if limit.get("discard"):
            job.not_to_run = (
                f"There was no slot free of {row}, of which there are {limit['max_running']}."
            )
        else:
            job.blocked_by = row.pk
        return False
    job.slot_group = uuid7()
    for limit in job.limits:
        semaphores[limit["key"]].use(limit)
    rates = [semaphores[limit["key"]] for limit in job.limits if "interval" in limit]
    job.rated_until = {row.pk: row.earliest for row in rates if row.earliest}
    return True
