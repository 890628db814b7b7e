"""Admission of limited jobs: semaphores, and the slots that running attempts take.

Decisions are made under the locks of all semaphores involved, taken in key order. One statement
takes the lock, the next one counts the slots. In a single statement, both would use the same
snapshot: six claimers then ran 4 to 12 jobs with a limit of 2.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from math import inf
from time import monotonic
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import Count, Exists, F, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce

from ..core.notify import notify_queues
from ..core.serialization import Json
from ..core.transactions import writing
from ..core.uuid7 import uuid7
from ..limits import strictest
from ..models import ClaimedJob, Job, Semaphore, Slot
from ..models.enums import State
from ..models.expressions import Among, Now, now_plus
from ..models.job import JobQuerySet
from ..models.locking import delete, lock, lock_waiting
from ..models.semaphore import RESERVED_AHEAD_SECONDS, SemaphoreQuerySet
from .galera import certify
from .ready_jobs import Kind, ReadyJobs, kind_of
from .served import Served
from .slot_group import GroupSize, beyond_share, next_in_line, ungrouped

# Above this many keys, enqueue does not check for existing waiters.
FEW = 20
# Number of blocked jobs in one read, and maximum number of reads for one semaphore.
SCAN_SIZE = 1000
ROUNDS = 20
# Number of semaphores that a sweep locks together.
AT_ONCE = 50
# Seconds after which a sweep begins no further part.
LONGEST_SWEEP = 0.5
# The most start times that are reserved in one transaction.
MOST_STARTS = 5000


class Pruned(Exception):
    """A semaphore was deleted before it was locked.

    Inserting it again now would break the lock order, so the caller starts over.
    """


def _rows(database: str) -> SemaphoreQuerySet:
    return Semaphore.objects.using(database)


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
    wanted = sorted((limit for job in limited for limit in job.limits), key=_breadth, reverse=True)
    semaphores = _insert_and_lock(database, {limit["key"]: limit for limit in wanted})
    _count_slots(database, semaphores)
    admitted = [job for job in limited if _try_acquire(job, semaphores)]
    _store(database, [each for each in semaphores.values() if each.is_changed])
    blocked = defaultdict(list)
    for job in limited:
        if job.blocked_by:
            blocked[job.blocked_by].append(job.pk)
    for key, ids in blocked.items():
        _jobs(database).filter(pk__in=ids).update(state=State.BLOCKED, blocked_by=key)
    if rates := [key for key in blocked if semaphores[key].interval]:
        reserve_times(database, rates)
    behind = next_in_line(
        ClaimedJob.objects.using(database), admitted, limit - len(jobs), group_size
    )
    if keys := {limit["key"] for job in admitted for limit in job.limits if "max_running" in limit}:
        certify(
            _rows(database).filter(pk__in=keys),
            {"burst": F("burst") + 1},
            {"burst": F("burst") - 1},
        )
    _take_slots(database, [*admitted, *behind])
    passed = sorted({key for job in limited for key in _not_used(job)})
    free = {key: semaphores[key].free for key in passed}
    notify_queues(database, _unblock(database, free, semaphores))
    return [*(job for job in jobs if not job.blocked_by), *behind]


def extend(
    jobs: JobQuerySet, member: ClaimedJob, limit: int, group_size: GroupSize
) -> list[ClaimedJob]:
    """Return up to ``limit`` of the waiting ``jobs`` that join the slot group of a running job.

    They share its slot, so none becomes free or is taken. None are returned if the group has ended.
    """
    database = jobs.db
    (key,) = [limit["key"] for limit in member.limits]
    row = _rows(database).filter(pk=key)
    # The lock first: the next statement sees the slots that the last settlement has left.
    list(lock_waiting(row))
    slots = Slot.objects.using(database).taken().filter(semaphore=key)
    if not slots.filter(slot_group=member.slot_group).exists():  # type: ignore[misc]
        return []
    found = next_in_line(jobs, [member], limit, group_size)
    if found:
        certify(row, {"burst": F("burst") + 1}, {"burst": F("burst") - 1})
        _take_slots(database, found)
    return found


def block_surplus(database: str, jobs: Sequence[Job]) -> None:
    """Block new jobs that are certain to find no slot, so that no worker claims them in vain.

    Slots may have become free by the time of the commit; the sweep finds such jobs.
    """
    waiting = [job for job in jobs if job.limits and job.state == State.READY]
    keys = {limit["key"] for job in waiting for limit in job.limits}
    lines = (
        {key for key in keys if _blocked(database).filter(blocked_by=key).exists()}
        if len(keys) <= FEW
        else set()
    )
    ahead: Counter[str] = Counter()
    for job in waiting:
        for limit in sorted(job.limits, key=_breadth):
            ahead[limit["key"]] += 1
            is_full = limit["key"] in lines or ahead[limit["key"]] > limit.get(
                "max_running", limit.get("burst")
            )
            if is_full and not limit.get("discard"):
                job.state, job.blocked_by = State.BLOCKED, limit["key"]
                break


def _signal(
    database: str,
    keys: Iterable[str],
    ready: Counter[Kind] | None = None,
    left_by: Sequence[ClaimedJob] = (),
) -> list[str]:
    """Unblock as many waiting jobs as there are free slots. Return the queue of each.

    ready: the numbers of ready jobs of each kind. With it, as many jobs of each kind become ready,
        in waiting order, less those that are. The workers of one queue may be full while those of
        another are not.
    left_by: jobs whose slots are released first.
    """
    with writing(database, savepoint=False):
        # A sweep passes over semaphores that others have locked: these unblock jobs themselves.
        locked = _locked(database, keys) if ready is None else lock(_in_order(database, keys))
        held = {row.pk: row for row in locked if row.max_running}
        if left_by:
            _delete_slots(database, [job.pk for job in left_by])
        keys = list(
            _rows(database).filter(pk__in=list(held)).waiting().values_list("pk", flat=True)
        )
        lines = {key: held[key] for key in keys}
        if lines:
            _count_slots(database, lines)
        free = {key: row.free for key, row in lines.items()}
        if left_by:
            # Jobs that are ready already will take the slots that were free before.
            left = _slots_of(left_by)
            free = {key: min(number, left[key]) for key, number in free.items()}
        return _unblock(database, free, lines, ready)


def sweep(database: str, limit: int, ready: ReadyJobs | None = None) -> list[str]:
    """Unblock jobs of semaphores with free slots and waiting jobs, of each kind of job.

    ready: the ready jobs as the caller's sweeps have seen them.
    """
    # In random order: if there are more than ``limit``, each semaphore has its turn.
    found = (
        _rows(database)
        .waiting()
        .alias(slots_taken=_slots_taken())
        .filter(max_running__gt=F("slots_taken"))
        .order_by("?")
    )
    if not (keys := list(found.values_list("pk", flat=True)[:limit])):
        return []
    queues, kinds = list[str](), (ready or ReadyJobs(database)).count()
    for part in _parts(keys):
        queues += _signal(database, part, kinds)
    return queues


def unblock_orphans(database: str, limit: int, ready: ReadyJobs | None = None) -> list[str]:
    """Unblock jobs whose semaphore row is missing, as sweep() does. Return the queue of each.

    The job whose claim would have inserted the row was discarded before that claim. This reads
    all waiting jobs; with very many, it is not for every sweep.
    """
    lost = (
        _blocked(database)
        .exclude(Exists(_rows(database).filter(pk=OuterRef("blocked_by"))))
        .order_by("blocked_by")
    )
    keys = [key for key in lost.values_list("blocked_by", flat=True).distinct()[:limit] if key]
    if not keys:
        return []
    queues, kinds = list[str](), (ready or ReadyJobs(database)).count()
    for part in _parts(keys):
        free = {}
        for key in part:
            first = _jobs(database).waiting_for(key).values_list("limits", flat=True)[:1]
            own = {each["key"]: each for limits in first for each in limits or ()}
            free[key] = own.get(key, {}).get("max_running", 1)
        with writing(database):
            queues += _unblock(database, free, {}, kinds)
    return queues


def _parts(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield semaphores to sweep in parts, until this has taken too long for the dispatcher."""
    end = monotonic() + LONGEST_SWEEP
    for start in range(0, len(keys), AT_ONCE):
        yield keys[start : start + AT_ONCE]
        if monotonic() > end:
            return


def reserve_times(database: str, keys: Iterable[str] | None = None) -> bool:
    """Reserve start times of the next seconds for jobs that wait for a rate.

    keys: of these semaphores, in the caller's transaction. Without them, this is a sweep over all.
        Return whether some are left to the next one.
    """
    rows = _rows(database)
    if keys is not None:
        waiting = rows.filter(pk__in=list(keys), booked__isnull=False).waiting()
        _assign_times(database, _locked(database, waiting.values_list("pk", flat=True)))
        return False
    soon = rows.filter(booked__lt=now_plus(RESERVED_AHEAD_SECONDS)).order_by("booked")
    left = list(soon.waiting().values_list("pk", flat=True))
    for part in _parts(left):
        with writing(database, savepoint=False):
            _assign_times(database, list(lock(_in_order(database, part))))
        left = left[len(part) :]
    return bool(left)


def replan_rates(database: str) -> None:
    """Correct rates whose times are later than the rate allows.

    They were reserved while the database's clock was ahead.
    """
    rows = (
        _rows(database)
        .filter(Q(earliest__gt=Now()) | Q(booked__gt=now_plus(RESERVED_AHEAD_SECONDS)))
        .annotate(db_now=Now())
    )
    ahead = [row.pk for row in rows if row.is_ahead]
    for start in range(0, len(ahead), AT_ONCE):
        with writing(database):
            _store(
                database,
                [
                    row
                    for row in _locked(database, ahead[start : start + AT_ONCE])
                    if row.come_back()
                ],
            )


def _assign_times(database: str, rows: Sequence[Semaphore]) -> None:
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
    _jobs(database).bulk_update(jobs, ["state", "blocked_by", "run_after"])
    _store(database, changed)


def release_slots(
    database: str, jobs: Sequence[ClaimedJob], keeps_slot: Callable[[ClaimedJob], bool]
) -> list[str]:
    """Release the slots of settled jobs. Return the queue of each job that becomes ready.

    A slot that the next job of the slot group keeps does not become free: no semaphore is locked.
    """
    kept = {job.pk for job in jobs if keeps_slot(job)}
    leaving = [job for job in jobs if job.pk not in kept]
    if kept:
        _delete_slots(database, kept)
    keys = {limit["key"] for job in leaving for limit in job.limits or () if "max_running" in limit}
    return _signal(database, keys, left_by=leaving) if keys else []


def leave_limits(database: str, jobs: Sequence[ClaimedJob]) -> list[str]:
    """Give back what limited jobs hold that were released. Return the queue of each ready job.

    A job that is ready again takes a slot itself; the slots of the others become free.
    """
    rows = _jobs(database).filter(pk__in=[job.pk for job in jobs]).exclude(state=State.READY)
    ended = set(rows.values_list("pk", flat=True))
    gone = [job for job in jobs if job.pk in ended]
    if gone:  # All locks at once, in the order of the keys.
        keys = {limit["key"] for job in gone for limit in job.limits}
        list(_locked(database, keys.union(*(job.rated_until for job in jobs))))
    give_back_starts(database, jobs)
    return release_slots(database, gone, lambda job: False) if gone else []


def give_back_starts(database: str, jobs: Iterable[ClaimedJob]) -> None:
    """Give back the starts of rates that jobs have used without starting.

    A start is kept if the rate has allowed another one since.
    """
    used = [(earliest, key) for job in jobs for key, earliest in job.rated_until.items()]
    if not used:
        return
    rows = {row.pk: row for row in _locked(database, {key for _earliest, key in used})}
    for earliest, key in sorted(used, reverse=True):
        if key in rows:
            rows[key].give_back(earliest)
    _store(database, [row for row in rows.values() if row.is_changed])


def _slots_of(jobs: Iterable[ClaimedJob]) -> Counter[str]:
    """Count the slots of each semaphore that the jobs hold: jobs of a slot group share one."""
    leaders = {job.slot_group or job.pk: job for job in jobs}
    return Counter(limit["key"] for job in leaders.values() for limit in job.limits or ())


def _delete_slots(database: str, jobs: Iterable[UUID]) -> None:
    delete(Slot.objects.using(database).filter(job__in=list(jobs)))


def _insert_and_lock(database: str, limits: dict[str, dict[str, Json]]) -> dict[str, Semaphore]:
    """Lock and return the rows of the keys.

    Missing rows are inserted before any row is locked, which avoids deadlocks.
    """
    mysql = connections[database].vendor == "mysql"
    how: Any = (
        {"update_conflicts": True, "update_fields": ["max_running"]}
        if mysql
        else {"ignore_conflicts": True}
    )
    if missing := limits.keys() - set(
        _rows(database).filter(pk__in=list(limits)).values_list("pk", flat=True)
    ):
        # On MySQL, other transactions wait for a new row that is not committed, so the same
        # statement locks the existing rows. This clears their numbers; adopt() restores them.
        _rows(database).bulk_create(
            [Semaphore(pk=key) for key in sorted(limits if mysql else missing)], **how
        )
    held = {row.pk: row for row in _locked(database, limits)}
    if len(held) < len(limits):
        raise Pruned
    for key, row in held.items():
        row.adopt(limits[key])
    return held


def _locked(database: str, keys: Iterable[str]) -> list[Semaphore]:
    return list(lock_waiting(_in_order(database, keys)))


def _in_order(database: str, keys: Iterable[str]) -> SemaphoreQuerySet:
    return _rows(database).filter(pk__in=list(keys)).order_by("pk").annotate(db_now=Now())


def _unblock(
    database: str,
    free: Mapping[str, int],
    known: dict[str, Semaphore],
    ready: Counter[Kind] | None = None,
) -> list[str]:
    """Unblock the first waiting jobs of each semaphore. Return the queue of each job.

    free: by semaphore, the largest number of jobs to unblock.
    ready: as for _signal().
    """
    served, found = Served(database), list[Job]()
    free = {key: number for key, number in free.items() if number > 0}
    if ready is None:
        found, free = _lock_first_plain(served, free)
    for key, number in free.items():
        found += _lock_first_waiting(served, key, number, known, ready)
    _jobs(database).filter(pk__in=[job.pk for job in found]).update(
        state=State.READY, blocked_by=None
    )
    return [job.queue for job in found]


def _lock_first_plain(served: Served, free: Mapping[str, int]) -> tuple[list[Job], dict[str, int]]:
    """Lock and return the first waiting jobs of the semaphores whose first ones can all run.

    Returns also the other semaphores: their jobs have several limits, or are not served, or another
    transaction has locked or changed them. All semaphores together take two statements.
    """
    jobs = _jobs(served.database)
    if not (lines := jobs.first_in_line(free)):
        return [], {}
    ids = [pk for line in lines.values() for pk in line]
    rows = jobs.filter(Among(ids)).order_by("pk")
    locked: Any = lock(rows.only("queue", "task", "limits", "blocked_by", "version"))
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
        rows = (
            _jobs(database)
            .waiting_for(key)
            .exclude(pk__in=passed)
            .only("queue", "task", "limits", "priority")
        )
        line = list(rows[:size])
        _count_others(database, known, line)
        kinds = Counter(map(kind_of, found)) + (ready or Counter())
        fate: dict[UUID, str | None] = {}
        for job in line:
            kind, own = kind_of(job), {each["key"]: each for each in job.limits or ()}
            others = [each for each in own.values() if "max_running" in each and each["key"] != key]
            full = [each for each in others if not known[each["key"]].is_free(each)]
            narrower = [each for each in full if _breadth(each) < _breadth(own.get(key, {}))]
            # At most as many jobs of one kind as each of their limits has free slots.
            so_many = (
                min([number, *(known[each["key"]].free_for(each) for each in others)])
                if of_each_kind
                else number
            )
            if not served.takes(job):
                fate[job.pk] = None
            elif narrower:
                fate[job.pk] = min(narrower, key=_breadth)["key"]
            elif (kinds[kind] if of_each_kind else kinds.total()) < so_many:
                fate[job.pk] = key
                kinds[kind] += 1
                for each in () if of_each_kind else others:
                    known[each["key"]].use(each)
        # Found by primary key alone, and read again: a row that has changed belongs to another
        # transaction. Reads one column that is in no index: otherwise MySQL finds the rows by
        # the index on ``blocked_by``, and locks its entries (see locking).
        locked = lock(_jobs(database).filter(pk__in=list(fate)).order_by("pk")).values_list(
            "pk", "blocked_by", "version"
        )
        held = {pk for pk, blocked_by, _version in locked if blocked_by == key}
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


def _wait_elsewhere(database: str, fate: dict[UUID, str | None]) -> int:
    """Make jobs wait for another semaphore, or make them ready. Return their number."""
    by_key = defaultdict(list)
    for pk, to in fate.items():
        by_key[to].append(pk)
    for to, ids in by_key.items():
        _jobs(database).filter(pk__in=ids).update(
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
        _count_slots(database, rows)
        known |= rows


def _store(database: str, rows: list[Semaphore]) -> None:
    _rows(database).bulk_update(rows, ["max_running", "interval", "burst", "earliest", "booked"])


def _jobs(database: str) -> JobQuerySet:
    return Job.objects.using(database)


def _blocked(database: str) -> JobQuerySet:
    return _jobs(database).filter(state=State.BLOCKED)


def _count_slots(database: str, semaphores: Mapping[str, Semaphore]) -> None:
    """Set ``taken`` and ``smallest`` of these semaphores, by key."""
    for key, number, smallest in Slot.objects.using(database).totals(semaphores):
        semaphores[key].taken, semaphores[key].smallest = number, smallest


def _take_slots(database: str, jobs: Iterable[ClaimedJob]) -> None:
    """Take one slot of each semaphore of each job, for the attempt that begins now."""
    rows = [
        Slot(
            semaphore_id=limit["key"],
            job=job,
            attempt=job.attempt + 1,
            slot_group=job.slot_group,  # type: ignore[misc]
            max_running=limit["max_running"],
        )
        for job in jobs
        for limit in job.limits
        if "max_running" in limit
    ]
    Slot.objects.using(database).upsert(
        rows, key=["semaphore", "job"], fields=["attempt", "slot_group", "max_running"]
    )


def _slots_taken() -> Coalesce:
    slots = (
        Slot.objects.taken()
        .filter(semaphore=OuterRef("pk"))
        .order_by()
        .values("semaphore")
        .annotate(number=Count("slot_group", distinct=True))
    )
    return Coalesce(Subquery(slots.values("number")), 0)


def _breadth(limit: dict[str, Json]) -> float:
    """Sort key: a job waits for its narrowest limit that has no free slot.

    Jobs of a busy account wait for the account's limit, not for that of the bank of all accounts.
    """
    return float(limit.get("max_running", inf))


def _not_used(job: ClaimedJob) -> list[str]:
    """Return the semaphores after the one that refused a job. Other jobs may have their slots."""
    if not (job.blocked_by or job.not_to_run):
        return []
    keys = [limit["key"] for limit in sorted(job.limits, key=_breadth) if "max_running" in limit]
    return (
        keys
        if job.not_to_run
        else keys[keys.index(job.blocked_by) + 1 :]
        if job.blocked_by in keys
        else []
    )


def _try_acquire(job: ClaimedJob, semaphores: dict[str, Semaphore]) -> bool:
    """Acquire all semaphores of a job, or none. Return True if the job may run now."""
    for limit in sorted(job.limits, key=_breadth):
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
