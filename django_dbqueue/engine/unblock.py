"""Let waiting jobs go on: they get free slots, or a start time of a rate."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from ..models import Job, Semaphore
from ..models.enums import State
from ..models.expressions import Among
from ..models.locking import by_primary_key, lock
from .ready_jobs import Kind, kind_of
from .semaphores import breadth, count_slots, store
from .served import Served

# Number of blocked jobs in one read, and maximum number of reads for one semaphore.
SCAN_SIZE = 1000
ROUNDS = 20
# The most start times that are reserved in one transaction.
MOST_STARTS = 5000


def unblock(
    database: str,
    free: Mapping[str, int],
    known: dict[str, Semaphore],
    ready: Counter[Kind] | None = None,
) -> list[str]:
    """Unblock the first waiting jobs of each semaphore. Return the queue of each job.

    free: by semaphore, the largest number of jobs to unblock.
    known: semaphores whose slots are counted.
    ready: the numbers of ready jobs of each kind. With it, as many jobs of each kind become ready,
        in waiting order, less those that are. The workers of one queue may be full while those of
        another are not.
    """
    served, found = Served(database), list[Job]()
    free = {key: number for key, number in free.items() if number > 0}
    if ready is None:
        found, free = _lock_first_plain(served, free)
    for key, number in free.items():
        found += _lock_first_waiting(served, key, number, known, ready)
    Job.objects.using(database).filter(pk__in=[job.pk for job in found]).update(
        state=State.READY, blocked_by=None
    )
    return [job.queue for job in found]


def _lock_first_plain(served: Served, free: Mapping[str, int]) -> tuple[list[Job], dict[str, int]]:
    """Lock and return the first waiting jobs of the semaphores whose first ones can all run.

    Returns also the other semaphores: their jobs have several limits, or are not served, or another
    transaction has locked or changed them. All semaphores together take two statements.
    """
    jobs = Job.objects.using(served.database)
    if not (lines := jobs.first_in_line(free)):
        return [], {}
    ids = [pk for line in lines.values() for pk in line]
    rows = by_primary_key(jobs.filter(Among(ids)).order_by("pk"))
    locked: Any = lock(rows.only("queue", "task", "limits", "blocked_by"))
    held = {job.pk: job for job in locked}

    def can_run(pk: UUID, key: str) -> bool:
        job = held.get(pk)
        return (
            job is not None
            and job.blocked_by == key
            and all(each["key"] == key for each in job.limits or () if "max_running" in each)
            and served.takes(job)
        )

    plain = {key for key, line in lines.items() if all(can_run(pk, key) for pk in line)}
    found = [held[pk] for key, line in lines.items() if key in plain for pk in line]
    return found, {key: free[key] for key in lines if key not in plain}


def _lock_first_waiting(
    served: Served,
    key: str,
    number: int,
    known: dict[str, Semaphore],
    ready: Counter[Kind] | None = None,
) -> list[Job]:
    """Lock and return the first waiting jobs of a semaphore that can run.

    Earlier jobs that cannot run stop waiting for it, a thousand at a time. A job that no worker
    would take becomes ready: it holds nothing, and runs once a worker takes it. A job whose
    narrower limit has no free slot either waits for that one. ``known`` are counted semaphores;
    the returned jobs take slots of them in memory.
    """
    database, known = served.database, dict(known)
    found, passed = list[Job](), set[UUID]()
    of_each_kind = ready is not None
    size = SCAN_SIZE if of_each_kind else number
    for _ in range(ROUNDS if number > 0 else 0):
        waiting = Job.objects.using(database).waiting_for(key).exclude(pk__in=passed)
        line = list(waiting.only("queue", "task", "limits", "priority")[:size])
        _count_others(database, known, line)
        kinds = Counter(map(kind_of, found)) + (ready or Counter())
        fate = _decide(served, key, number, known, line, kinds, of_each_kind=of_each_kind)
        # Read again: a row that has changed belongs to another transaction.
        rows = Job.objects.using(database).filter(pk__in=list(fate)).order_by("pk")
        locked = lock(by_primary_key(rows)).values_list("pk", "blocked_by")
        held = {pk for pk, blocked_by in locked if blocked_by == key}
        found += [job for job in line if job.pk in held and fate[job.pk] == key]
        leaving = _wait_elsewhere(
            database, {pk: to for pk, to in fate.items() if pk in held and to != key}
        )
        passed |= {pk for pk in fate if pk not in held or fate[pk] == key}
        if (
            len(line) < size
            or (not leaving and len(held) == len(fate))
            or (not of_each_kind and len(found) >= number)
        ):
            break
        size = SCAN_SIZE
    return found


def _decide(
    served: Served,
    key: str,
    number: int,
    known: dict[str, Semaphore],
    line: Sequence[Job],
    kinds: Counter[Kind],
    *,
    of_each_kind: bool,
) -> dict[UUID, str | None]:
    """Return what becomes of the first jobs that wait for a semaphore.

    Its key is for a job that gets a slot, another key for one that waits for that, None for one
    that becomes ready as no worker takes it. Jobs that are to wait on are left out. ``kinds`` are
    the numbers of jobs that get slots already, of each kind.
    """
    fate: dict[UUID, str | None] = {}
    for job in line:
        kind, own = kind_of(job), {each["key"]: each for each in job.limits or ()}
        others = [each for each in own.values() if "max_running" in each and each["key"] != key]
        full = [each for each in others if not known[each["key"]].is_free(each)]
        narrower = [each for each in full if breadth(each) < breadth(own.get(key, {}))]
        # At most as many jobs of one kind as each of their limits has free slots.
        so_many = (
            min([number, *(known[each["key"]].free_for(each) for each in others)])
            if of_each_kind
            else number
        )
        if not served.takes(job):
            fate[job.pk] = None
        elif narrower:
            fate[job.pk] = min(narrower, key=breadth)["key"]
        elif (kinds[kind] if of_each_kind else kinds.total()) < so_many:
            fate[job.pk] = key
            kinds[kind] += 1
            for each in () if of_each_kind else others:
                known[each["key"]].use(each)
    return fate


def _wait_elsewhere(database: str, fate: dict[UUID, str | None]) -> int:
    """Make jobs wait for another semaphore, or make them ready. Return their number."""
    by_key = defaultdict(list)
    for pk, to in fate.items():
        by_key[to].append(pk)
    for to, ids in by_key.items():
        Job.objects.using(database).filter(pk__in=ids).update(
            state=State.BLOCKED if to else State.READY, blocked_by=to
        )
    return len(fate)


def _count_others(database: str, known: dict[str, Semaphore], jobs: Sequence[Job]) -> None:
    """Count the slots of these jobs' other limits, without a lock.

    A sweep finds jobs for which the count was wrong.
    """
    keys = {
        each["key"]
        for job in jobs
        if len(job.limits or ()) > 1
        for each in job.limits
        if "max_running" in each
    }
    if rows := {key: Semaphore(pk=key) for key in keys - known.keys()}:
        count_slots(database, rows)
        known |= rows


def assign_times(database: str, rows: Sequence[Semaphore]) -> None:
    """Give the first waiting jobs of locked rates the start times of the next seconds."""
    most = max(1, MOST_STARTS // max(1, len(rows)))
    times = {row.pk: row.free_times()[:most] for row in rows}
    served, of_key = Served(database), defaultdict(list)
    wanted = {key: len(starts) for key, starts in times.items() if starts}
    plain, others = _lock_first_plain(served, wanted)
    for job in plain:
        of_key[job.blocked_by].append(job)
    for key, number in others.items():
        of_key[key] = _lock_first_waiting(served, key, number, {})
    changed = [row for row in rows if of_key[row.pk]]
    for row in changed:
        for job, start in zip(of_key[row.pk], times[row.pk], strict=False):
            job.state, job.blocked_by, job.run_after = State.SCHEDULED, None, start
            row.booked = start + (row.interval or timedelta())
    jobs = [job for found in of_key.values() for job in found]
    Job.objects.using(database).bulk_update(jobs, ["state", "blocked_by", "run_after"])
    store(database, changed)
