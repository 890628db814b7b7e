"""Move jobs to the database of another backend. A job that is moved runs in one of the two.

No transaction holds in two databases. So a part of the jobs is first held in the source, where they
are scheduled for a time that never comes; then inserted into the target; then deleted in the
source. Each step is a transaction that records it in the items of an operation: an interrupted move
goes on where it was, and nothing is inserted twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from django.db import DataError, IntegrityError, OperationalError, connections, transaction
from django.db.models import F, Q
from django.db.models.base import ModelState

from ..core.known_queues import check_known
from ..core.notify import notify_queues
from ..core.transactions import is_conflict, writing
from ..models import (
    Batch,
    BatchShare,
    Execution,
    Failure,
    Job,
    Operation,
    OperationJob,
    Progress,
    Queue,
    TaskState,
)
from ..models.enums import FINISHED, State
from ..models.expressions import Now
from ..models.job import JobQuerySet
from ..models.locking import by_primary_key, lock_first, lock_keys, lock_waiting
from ..models.operation import STORED, OperationJobQuerySet
from .fast_sql import insert
from .retention import erase

# Number of jobs that are moved together.
PART = 500
# The time for which a held job is scheduled.
NEVER = datetime(9999, 1, 1, tzinfo=timezone.utc)
EXISTS = "A job with its id or key is there already. Let it run here, or discard it."
# The task of contrib/operations.py. The operation's id names another one in the target, or none.
OPERATES = "django_dbqueue.contrib.operations.run_operation"
OPERATION = "It runs an operation of the admin, which is stored here. Let it run here."

# A transaction of the project that has locked a key in the target may wait for one in the source,
# which this move has locked: no server detects that deadlock. MySQL and MariaDB give up after 50 s.
LOCK_SECONDS = 5
HELD = Q(state=State.SCHEDULED, run_after=NEVER)
# What a database raises for a value or a row that it does not take, and also in an outage.
REFUSALS = (DataError, IntegrityError, OperationalError, TypeError, ValueError)

# Why jobs stay, by id; "" for those that are moved.
Reasons = dict[UUID, str]


def parts(jobs: JobQuerySet) -> Iterator[list[Job]]:
    """Yield jobs that do not run, in the order of their ids."""
    last = UUID(int=0)
    rows = jobs.exclude(state=State.RUNNING).order_by("pk").only("queue", "task", "key", "batch")
    while part := list(rows.filter(pk__gt=last)[:PART]):
        yield part
        last = part[-1].pk


def reasons(jobs: Sequence[Job], target: str) -> Reasons:
    """Return why jobs cannot be moved to the target, a database."""
    source = str(jobs[0]._state.db)
    of_queues = _reasons_of(Queue, {job.queue for job in jobs}, source, target)
    of_tasks = _reasons_of(TaskState, {job.task for job in jobs}, source, target)
    for queue in sorted({job.queue for job in jobs}):
        try:
            check_known(target, queue)
        except ValueError as error:
            of_queues[queue] = str(error)
    taken = _taken_keys(jobs, target)
    shares = BatchShare.objects.using(source).filter(
        job__in=[job.pk for job in jobs], has_failed=False
    )
    batches = dict(shares.values_list("job", "batch"))
    batches |= {job.pk: job.batch_id for job in jobs if job.batch_id}
    callbacks = _batches_of_callbacks(jobs, source)
    return {
        job.pk: (job.pk in batches and f"The batch {batches[job.pk]}, which ends here, needs it.")
        or (job.pk in callbacks and f"It follows the batch {callbacks[job.pk]}, stored here only.")
        or (OPERATION if job.task == OPERATES else "")
        or of_queues.get(job.queue, "")
        or of_tasks.get(job.task, "")
        or (EXISTS if job.key in taken else "")
        for job in jobs
    }


def hold(operation: Operation, ids: Sequence[UUID]) -> None:
    """Record jobs, and schedule them for NEVER, except finished ones, which stay as they are.

    Skip jobs that run, that another transaction has locked, that another move holds, or that have
    been added to a batch meanwhile.
    """
    database = str(operation._state.db)
    jobs = Job.objects.using(database).filter(pk__in=ids)
    with writing(database):
        list(lock_waiting(Operation.objects.using(database).filter(pk=operation.pk)))
        rows = jobs.filter(batch=None).exclude(HELD).exclude(state=State.RUNNING)
        found = lock_first(rows.order_by("pk").only(*STORED), len(ids))
        OperationJob.objects.using(database).bulk_create(
            OperationJob(
                operation_id=operation.pk,
                job=job.pk,
                **{name: getattr(job, name) for name in STORED},
            )
            for job in found
        )
        waiting = [job.pk for job in found if job.state not in FINISHED]
        jobs.filter(pk__in=waiting).update(
            state=State.SCHEDULED, run_after=NEVER, expires_at=None, blocked_by=None
        )
        _count(operation, total=len(found))


def deliver(operation: Operation, target: str, size: int = PART) -> Reasons:
    """Move the next jobs that an operation holds. Those that cannot be moved are as before.

    Raises one of REFUSALS if the target refuses one of several jobs: repeat it with a smaller size.
    """
    source, why = str(operation._state.db), EXISTS
    refusal: Exception | None = None
    with writing(source):
        operation, stored, jobs = _lock_next(operation, size)
        with writing(target):
            try:
                moved = _arrive(jobs, stored, operation, target)
            except REFUSALS as error:
                if len(jobs) != 1 or is_conflict(error):
                    raise
                moved, refusal = set(), error
                transaction.set_rollback(True, using=target)
        if refusal:
            # An outage raises here. What has arrived before is not to run here again.
            if _receipts(operation, target).filter(job__in=list(stored)).exists():
                raise refusal
            if not _taken_keys(jobs, target):
                why = f"The database {target!r} refuses it: {refusal}"
        erase(source, list(moved))
        _note(operation, stored, jobs, moved)
    return {job.pk: "" if job.pk in moved else why for job in jobs}


def give_back(operation: Operation) -> int:
    """Let the next jobs that an operation holds run here again, and return their number.

    The target is gone: those that have arrived there run twice if it comes back.
    """
    with writing(str(operation._state.db)):
        operation, stored, jobs = _lock_next(operation, PART)
        _note(operation, stored, jobs, moved=set())
    return len(jobs)


def _lock_next(
    operation: Operation, size: int
) -> tuple[Operation, dict[UUID, OperationJob], list[Job]]:
    """Lock an operation and the next jobs that it holds. Return them, and what they were before."""
    source = str(operation._state.db)
    # Locked: no other command continues it meanwhile.
    operation = lock_waiting(Operation.objects.using(source).filter(pk=operation.pk)).get()
    items = OperationJob.objects.using(source).filter(operation=operation.pk, changed=None)
    stored = {item.job: item for item in items.order_by("pk")[:size]}
    return operation, stored, _lock_held(stored, source)


def _note(
    operation: Operation,
    stored: Mapping[UUID, OperationJob],
    jobs: Sequence[Job],
    moved: set[UUID],
) -> None:
    """Record which jobs were moved, and give those that were not their columns back."""
    for job in jobs:
        if job.pk not in moved:
            _restore(job, stored[job.pk])
    # Held jobs that were discarded meanwhile: a retry would schedule them for NEVER.
    source = Job.objects.using(operation._state.db)
    left_held = source.filter(pk__in=list(stored), state=State.DISCARDED, run_after=NEVER)
    for pk in left_held.values_list("pk", flat=True):
        before = stored[pk]
        left_held.filter(pk=pk).update(run_after=before.run_after, expires_at=before.expires_at)
    items = OperationJob.objects.using(operation._state.db).filter(operation=operation.pk)
    done = items.filter(job__in=list(stored), changed=None)
    done.filter(job__in=moved).update(changed=True)
    done.update(changed=False)
    left = 0 if stored else operation.done - operation.total  # Its items were deleted.
    _count(operation, total=left, done=len(stored), changed=len(moved))


def _lock_held(stored: dict[UUID, OperationJob], source: str) -> list[Job]:
    """Lock and return those of the jobs that are still as their move has left them.

    Jobs that another transaction has locked are removed from ``stored``. If it has locked all of
    them, one is left in it, and is waited for: see lock order.
    """
    every = Job.objects.using(source)
    free = set(lock_keys(every, list(stored))) if stored else set()
    rows: Any = every.filter(pk__in=list(stored))
    locked = list(rows.exclude(pk__in=free).order_by("pk").values_list("pk", flat=True))
    for pk in locked[len(locked) == len(stored) :]:
        del stored[pk]
    rows = every.filter(pk__in=list(stored)).order_by("pk")
    return [
        job
        for job in lock_waiting(by_primary_key(rows.annotate(is_held=HELD)))
        if job.is_held or (job.state in FINISHED and _run(job) == _run(stored[job.pk]))
    ]


def _run(row: Job | OperationJob) -> tuple[object, ...]:
    return row.state, row.attempt, row.finished_at


def _receipts(operation: Operation, target: str) -> OperationJobQuerySet:
    """Return the items of the target's operation: what has arrived, even if it is gone since."""
    return OperationJob.objects.using(target).filter(
        operation__verb=Operation.Verb.MOVE_IN, operation__value=_origin(operation)
    )


def _origin(operation: Operation) -> str:
    return f"{operation._state.db} #{operation.pk}"[-100:]


def _arrive(
    jobs: Sequence[Job], stored: Mapping[UUID, OperationJob], operation: Operation, target: str
) -> set[UUID]:
    """Insert jobs with their attempts. Return the ids of those that are in the target."""
    source = str(operation._state.db)
    if connections[target].vendor == "postgresql":
        with connections[target].cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
    operations, origin = Operation.objects.using(target), _origin(operation)
    receipt = operations.filter(
        verb=Operation.Verb.MOVE_IN, value=origin
    ).first() or operations.insert(
        Operation(
            verb=Operation.Verb.MOVE_IN,
            value=origin,
            scope=operation.scope,
            actor=operation.actor,
            reason=operation.reason,
            finished_at=Now(),
        )
    )
    ids = [job.pk for job in jobs]
    receipts = OperationJob.objects.using(target).filter(operation=receipt.pk)
    arrived = set(receipts.filter(job__in=ids).values_list("job", flat=True))
    rows = Job.objects.using(target)
    present = arrived.union(rows.filter(pk__in=ids).values_list("pk", flat=True))
    taken = _taken_keys(jobs, target)
    # In the order of the keys, as an upsert inserts them.
    new = [
        _copy(job, stored[job.pk])
        for job in sorted(jobs, key=lambda job: job.key or "")
        if job.pk not in present and job.key not in taken
    ]
    copied = [job.pk for job in new]
    rows.bulk_create(new)
    _copy_attempts(copied, source, target)
    receipts.bulk_create(
        OperationJob(operation_id=receipt.pk, job=pk, changed=True) for pk in copied
    )
    _count(receipt, total=len(copied), done=len(copied), changed=len(copied))
    notify_queues(target, {job.queue for job in new})
    return arrived.union(copied)


def _copy(job: Job, stored: OperationJob) -> Job:
    copy = Job(**{field.attname: getattr(job, field.attname) for field in Job._meta.fields})
    for name, value in _before(stored).items():
        setattr(copy, name, value)
    return copy


def _restore(job: Job, stored: OperationJob) -> None:
    rows = Job.objects.using(job._state.db).filter(pk=job.pk)
    rows.update(**_before(stored))
    notify_queues(rows.db, [job.queue])


def _before(stored: OperationJob) -> dict[str, Any]:
    """Return the columns that were held. A job that waited for a slot asks for one again."""
    columns = {name: getattr(stored, name) for name in ("state", "run_after", "expires_at")}
    if columns["state"] == State.BLOCKED:
        columns["state"] = State.READY
    return columns


def _copy_attempts(ids: Sequence[UUID], source: str, target: str) -> None:
    """Copy the executions and the progress of jobs, and the failures that they belong to."""
    executions = list(Execution.objects.using(source).filter(job__in=ids).order_by("pk"))
    failures = _copy_failures(Counter(each.failure_id for each in executions), source, target)
    for each in executions:
        each.failure_id = failures.get(each.failure_id)
    progress = list(Progress.objects.using(source).filter(job__in=ids))
    for row in progress:
        row._state = ModelState()
    names = [field.attname for field in Execution._meta.fields if not field.primary_key]
    insert(
        Execution.objects.using(target),
        names,
        [[getattr(each, name) for name in names] for each in executions],
    )
    Progress.objects.using(target).bulk_create(progress)


def _copy_failures(
    counts: Counter[int | None], source: str, target: str
) -> dict[int | None, int | None]:
    """Return the failures of the target, by those of the source."""
    theirs = {
        row.pk: row
        for row in Failure.objects.using(source).filter(
            pk__in=[pk for pk in counts if pk is not None]
        )
    }
    rows = Failure.objects.using(target).filter(
        fingerprint__in=[row.fingerprint for row in theirs.values()]
    )
    known = dict(rows.values_list("fingerprint", "pk"))
    names = [field.attname for field in Failure._meta.fields if not field.primary_key]
    new = [
        Failure(**{**{name: getattr(row, name) for name in names}, "count": 0})
        for row in sorted(theirs.values(), key=lambda row: row.fingerprint)
        if row.fingerprint not in known
    ]
    # A worker may have inserted one meanwhile.
    Failure.objects.using(target).bulk_create(new, ignore_conflicts=True)
    known = dict(rows.values_list("fingerprint", "pk"))
    found: dict[int | None, int | None] = {pk: known[row.fingerprint] for pk, row in theirs.items()}
    for pk, row in sorted(theirs.items(), key=lambda pair: known[pair[1].fingerprint]):
        rows.filter(fingerprint=row.fingerprint).update(count=F("count") + counts[pk])
    return found


def _reasons_of(
    table: type[Queue] | type[TaskState], names: set[str], source: str, target: str
) -> dict[str, str]:
    """Return why jobs of queues or tasks stay: a pause must not be lost on the way."""
    paused = [
        set(table.objects.using(database).filter(name__in=names).names_of_paused())
        for database in (source, target)
    ]
    kind = "queue" if table is Queue else "task"
    return {
        name: f"The {kind} {name!r} is paused here only. Pause it there, or resume it here."
        for name in paused[0] - paused[1]
    }


def _batches_of_callbacks(jobs: Sequence[Job], source: str) -> dict[UUID, UUID]:
    """Return the batches that callbacks among the jobs have as their argument, and may read."""
    rows = Job.objects.using(source).filter(pk__in=[job.pk for job in jobs])
    ids: dict[UUID, UUID] = {}
    for pk, args in rows.exclude(state=State.SUCCESSFUL).values_list("pk", "args"):
        if isinstance(args, list) and len(args) == 1:
            with suppress(ValueError):
                ids[pk] = UUID(str(args[0]))
    batches = Batch.objects.using(source).in_bulk(set(ids.values()))
    return {
        pk: batch
        for pk, batch in ids.items()
        if batch in batches and str(pk) in map(batches[batch].follower, ("on_finish", "on_success"))
    }


def _taken_keys(jobs: Sequence[Job], target: str) -> set[str | None]:
    keys = {job.key: job.pk for job in jobs if job.key}
    rows = Job.objects.using(target).filter(key__in=list(keys))
    return {key for key, pk in rows.values_list("key", "pk") if keys[str(key)] != pk}


def _count(operation: Operation, **numbers: int) -> None:
    changes: dict[str, Any] = {name: F(name) + number for name, number in numbers.items()}
    rows = Operation.objects.using(operation._state.db).filter(pk=operation.pk)
    rows.update(**changes, finished_at=Now())
