"""Claim ready jobs for a process, and the statements on claimed jobs until they are settled.

A claim is the only way to RUNNING. Its fencing token (see Fence) is the condition of all later
writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from django.db import OperationalError, connections, models
from django.db.models import Case, Exists, F, Q, Value, When
from django.db.models.functions import Coalesce, NullIf

from .. import limits
from ..core.notify import notify_queues
from ..core.transactions import is_conflict, writing
from ..models import ClaimedJob, Job, Process, Queue
from ..models.enums import Lane, Place, State
from ..models.expressions import Among, NotBefore, Now
from ..models.job import JobQuerySet
from ..models.locking import by_primary_key, lock, lock_waiting, locked_parts
from .claim_size import Budget
from .galera import certify
from .limits import acquire, extend, leave_limits
from .semaphores import Pruned
from .slot_group import GroupSize, ungrouped

# The number of times that a claim continues behind jobs that find no slot.
ROUNDS = 50

# Stopped, and neither to be retried nor enqueued again since.
_WAS_STOPPED = Q(stop_requested_at__isnull=False, rerun_requested=False, retry_requested=False)
# The changes of a release. MySQL sets one column after the other: each expression reads only
# columns that are set after it.
_RELEASED: dict[str, object] = {
    "state": Case(
        When(_WAS_STOPPED, then=Value(State.DISCARDED)),
        When(run_after__gt=Now(), then=Value(State.SCHEDULED)),
        default=Value(State.READY),
    ),
    "finished_at": Case(
        When(_WAS_STOPPED, then=Now()), default=None, output_field=models.DateTimeField()
    ),
    "failures": Case(
        When(rerun_requested=True, then=Value(0)),
        default=F("failures"),
        output_field=models.PositiveIntegerField(),
    ),
    "attempts_before": Case(
        When(rerun_requested=True, then=F("attempt")), default=F("attempts_before")
    ),
    "stop_requested_at": Case(
        When(Q(rerun_requested=True) | Q(retry_requested=True), then=None),
        default=F("stop_requested_at"),
    ),
    "rerun_requested": False,
    "retry_requested": False,
    "process": None,
    "started_at": None,
}


def undecided(job: ClaimedJob) -> None:
    """Leave the limits of a job undecided, for callers that load no tasks."""


def claim(
    jobs: JobQuerySet,
    lane: Lane,
    process: Process,
    limit: int,
    group_size: GroupSize = ungrouped,
    since: Place | None = None,
    budget: Budget | None = None,
    room: Callable[[], int] | None = None,
    decide_limits: Callable[[ClaimedJob], None] = undecided,
) -> list[ClaimedJob]:
    """Claim up to ``limit`` of the lane's ``jobs`` for the process, oldest first.

    Jobs that find no slot become BLOCKED. ``since`` is the position in the lane to start from.
    ``budget`` is the number of bytes of arguments that may be loaded; None is any number.
    ``room`` returns in each of the claim's transactions how many more jobs may run.
    ``decide_limits`` sets the limits of a job that was enqueued by SQL.

    A limited job is followed by the next waiters for its slot: the process runs one job of a
    slot group at a time.
    """
    claimed: list[ClaimedJob] = []
    for _ in range(ROUNDS):
        wanted = limit - len(claimed)
        # Each round has its own transaction: it locks semaphores in the order of their keys,
        # and only once.
        try:
            more, found = _claim(
                jobs, lane, process, wanted, group_size, since, budget, room, decide_limits
            )
        except Pruned:
            continue
        except OperationalError as error:
            # Others have claimed some of these jobs first, and nothing has changed here.
            if connections[jobs.db].in_atomic_block or not is_conflict(error):
                raise
            continue
        claimed += found
        if not more or len(claimed) >= limit:
            break
    return claimed


def _claim(
    jobs: JobQuerySet,
    lane: Lane,
    process: Process,
    limit: int,
    group_size: GroupSize,
    since: Place | None,
    budget: Budget | None,
    room: Callable[[], int] | None,
    decide_limits: Callable[[ClaimedJob], None],
) -> tuple[bool, list[ClaimedJob]]:
    """Run one round of a claim. Returns whether more jobs may be left, and the claimed jobs."""
    database = jobs.db
    with writing(database, savepoint=False):
        if room and (limit := min(limit, room())) <= 0:
            return False, []
        waiting = jobs.of_lane(lane).filter(NotBefore(*since)) if since else jobs.of_lane(lane)
        # A process that was declared dead claims nothing, even if it has not noticed: its clock
        # may have stood still.
        owner = Process.objects.using(database).filter(pk=process.pk)
        found: list[ClaimedJob] = []
        clock = time.monotonic()
        rows: Any = waiting.filter(Exists(owner)).annotate(db_now=Now())
        for part in locked_parts(rows, limit, found):
            found += budget.take(part, ClaimedJob.objects.using(database)) if budget else part
            if budget and budget.is_spent:
                break
        claimed = found
        if by_sql := [job for job in found if not job.max_attempts and job.limits is None]:
            _decide_limits(database, by_sql, decide_limits)
        if unreadable := [
            job for job in found if job.limits and not limits.are_readable(job.limits)
        ]:
            _discard_unreadable(database, unreadable)
        if any(job.limits for job in found):
            claimed = acquire(database, found, limit, group_size)
        _own(database, claimed, process, clock)
    return len(found) == limit, claimed


def claim_behind(
    jobs: JobQuerySet, process: Process, member: ClaimedJob, limit: int, group_size: GroupSize
) -> list[ClaimedJob]:
    """Claim up to ``limit`` of the jobs that wait for the slot of a running job of the process.

    They join its slot group: see ``claim()``. The running job has one limit.
    """
    database = jobs.db
    owner = Process.objects.using(database).filter(pk=process.pk)
    with writing(database, savepoint=False):
        clock = time.monotonic()
        waiting: Any = jobs.filter(Exists(owner)).annotate(db_now=Now())
        found = extend(waiting, member, limit, group_size)
        _own(database, found, process, clock)
    return found


def _own(database: str, jobs: Sequence[ClaimedJob], process: Process, clock: float) -> None:
    """Make locked jobs RUNNING, as attempts of the process.

    ``clock``: this process's time before the jobs were read, and so before any wait for a lock.
    """
    if not jobs:
        return
    now = jobs[0].db_now
    # Found by primary key alone: MariaDB might find them by their state, and lock others.
    Job.objects.using(database).filter(Among([job.id for job in jobs])).update(
        state=State.RUNNING,
        process=process,
        attempt=F("attempt") + 1,
        started_at=now,
        has_begun=False,
    )
    for job in jobs:
        job.attempt += 1
        job.belong_to(process, now, clock)


def _decide_limits(
    database: str, jobs: Sequence[ClaimedJob], decide: Callable[[ClaimedJob], None]
) -> None:
    """Set and store the limits of locked jobs that SQL has enqueued without limits."""
    for job in jobs:
        decide(job)
    limited = [job for job in jobs if job.limits is not None]
    Job.objects.using(database).bulk_update(limited, ["limits"])


def _discard_unreadable(database: str, unreadable: Sequence[ClaimedJob]) -> None:
    """Mark jobs with unreadable limits, to be discarded when they start.

    They must not stop their lane.
    """
    Job.objects.using(database).filter(pk__in=[job.pk for job in unreadable]).update(limits=None)
    for job in unreadable:
        job.limits, job.not_to_run = None, "Its limits cannot be read."


def queue_room(database: str, queue: str, limit: int) -> int:
    """Lock a queue and return how many more of its jobs may run.

    The caller keeps the lock until the end of its transaction.
    """
    row = Queue.objects.using(database).filter(name=queue)
    list(lock_waiting(row))
    certify(
        row, {"limit": Coalesce(F("limit"), 0) + 1}, {"limit": NullIf(F("limit") - 1, Value(0))}
    )
    return limit - Job.objects.using(database).running().filter(queue=queue).count()


def release(database: str, jobs: Sequence[ClaimedJob]) -> set[UUID]:
    """Release claimed jobs that were not started, without spending an attempt.

    Nothing is recorded of them. A job that an operator has stopped meanwhile is DISCARDED. A
    job that was enqueued again meanwhile waits for the time of that call. A job whose row
    another transaction has locked is left unchanged. Returns the ids of all others.
    """
    if not jobs:
        return set()
    rows, unblocked = Job.objects.using(database), list[str]()
    fences = {job.fence for job in jobs}
    with writing(database, savepoint=False):
        # In the order in which a settlement locks them, and found by primary key alone.
        locked = lock(by_primary_key(rows.filter(Among([job.id for job in jobs])).order_by("pk")))
        seen = list(locked.values_list("pk", "attempt", "process_id"))
        # A job that has a process is running.
        if owned := [row[0] for row in seen if row in fences]:
            rows.filter(Among(owned)).update(**_RELEASED)
            free = [job for job in jobs if job.id in owned and job.limits]
            unblocked = leave_limits(database, free) if free else []
    notify_queues(database, [*unblocked, *(job.queue for job in jobs)])
    return {row[0] for row in seen}


def mark_started(job: ClaimedJob) -> bool:
    """Record that a claimed job starts, for a job that must not run twice.

    Returns False if the job belongs to another process now.
    """
    return bool(Job.objects.using(job._state.db).owned(job).update(has_begun=True))


def is_too_late(job: ClaimedJob) -> bool:
    """Return whether a job has expired before its start, by the database's time.

    The job's own time is ahead by as long as the claim waited for the server. It is corrected.
    """
    while job.expires_at and job.has_expired():
        clock = time.monotonic()
        row = Job.objects.using(job._state.db).filter(pk=job.pk)
        now = row.values_list(Now(), flat=True).first()
        if now is None or now >= job.expires_at:
            return True
        job.clock = clock - (now - job.claimed_at).total_seconds()
    return False


def save_policy(job: ClaimedJob) -> None:
    """Store the policy of a job that was enqueued by SQL.

    A row that was re-enqueued meanwhile has the policy of that call.
    """
    rows = Job.objects.using(job._state.db).owned(job).filter(max_attempts=0, rerun_requested=False)
    rows.update(max_attempts=job.max_attempts, on_lost=job.on_lost, timeout=job.timeout)


def save_metadata(job: ClaimedJob) -> bool:
    """Store the metadata that the job's attempt has set.

    Returns False if the job belongs to another process now. The metadata of a job that was
    re-enqueued meanwhile is dropped: its row already belongs to the next run.
    """
    noted = Case(
        When(rerun_requested=True, then=F("metadata")),
        default=Value(job.metadata, models.JSONField()),
    )
    return bool(Job.objects.using(job._state.db).owned(job).update(metadata=noted))
