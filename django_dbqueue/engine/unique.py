"""Unique jobs: all jobs that are enqueued with one key share one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from django.db import IntegrityError, connections
from django.db.models import Case, F, Value, When
from django.db.models.functions import Greatest

from ..core.time_values import LONGEST_WAIT
from ..models import BatchShare, Job
from ..models.enums import FINISHED, WAITING, Conflict, EnqueueStatus, State
from ..models.expressions import Now, now_plus
from ..models.job import JobQuerySet
from ..models.locking import by_primary_key, lock_waiting
from .batches import EndedRun, close_shares
from .statistics import count_enqueued

T = TypeVar("T")

CHUNK = 500
# Inserts of a row that others delete each time before it is locked.
ROUNDS = 100
# Columns overwritten by the latest enqueue of the same key.
OF_THE_CALL = [
    *(
        "task",
        "queue",
        "priority",
        "args",
        "kwargs",
        "metadata",
        "max_attempts",
        "on_lost",
        "timeout",
        "limits",
        "options",
        "source",
    ),
    *("pipeline", "stage"),
]
_OF_A_RUN = [
    "state",
    "blocked_by",
    "run_after",
    "expires_at",
    "rerun_requested",
    "failures",
    "attempts_before",
]
_OF_A_NEW_RUN = ["enqueued_at", "started_at", "finished_at", "result", "stop_requested_at"]
TIMES = ["run_after", "expires_at", "enqueued_at"]
OF_A_NEW_JOB = [
    "id",
    *OF_THE_CALL,
    "batch_id",
    *_OF_A_RUN,
    "enqueued_at",
    "version",
    "attempt",
    "has_begun",
]
_WRITTEN = [*OF_THE_CALL, "batch_id", *_OF_A_RUN, *_OF_A_NEW_RUN, "version"]


@dataclass(frozen=True, kw_only=True)
class UniquePolicy:
    """How an enqueue call treats the existing job of its key.

    run_after: the time at which the call wants the job to run; None is at once.
    expires: the time of expiry, or a timedelta after ``run_after``.
    max_wait: the longest time that the job can be postponed, from its first enqueue.
    """

    on_conflict: Conflict = Conflict.RERUN
    run_after: datetime | timedelta | None = None
    expires: datetime | timedelta | None = None
    max_wait: timedelta = LONGEST_WAIT


class Effect(NamedTuple):
    """The effect of an enqueue call on the row of its key.

    begins: whether the call has added a run; if not, one was waiting already, or is not changed.
    """

    row: Job
    status: EnqueueStatus
    begins: bool


def upsert(database: str, calls: Sequence[tuple[Job, UniquePolicy]]) -> dict[UUID, Effect]:
    """Upsert jobs with keys, each into the one row of its key, in the caller's transaction.

    Returns the effects of the calls by the ids of their jobs. Of calls with the same key, the later
    one counts.
    """
    rows, merge = Job.objects.using(database), _Merge()
    found = _insert_or_lock(rows, [job for job, _policy in calls])
    effects = {job.pk: merge(found[job.key or ""], job, policy) for job, policy in calls}
    created = [row for row, status, _ in effects.values() if status == EnqueueStatus.CREATED]
    count_enqueued(database, Counter((row.queue, row.task) for row in created))
    close_shares(database, merge.ended)
    BatchShare.objects.using(database).bulk_create(merge.shares)
    _write(rows, list(merge.changed.values()))
    return effects


def restart_run(rows: JobQuerySet, wait: float | datetime) -> None:
    """Restart running jobs that were re-enqueued. Their rows have the values of that call already.

    Each waits for the time of that call, and at least until ``wait`` (seconds from now, or a
    time), as its retry would have.
    """
    # MySQL sets one column after the other: the state depends on the time that the call set.
    changes: dict[str, object] = {
        "state": Case(
            When(run_after__gt=now_plus(wait), then=Value(State.SCHEDULED)),
            default=Value(State.READY),
        )
    }
    if wait:
        changes = {"state": State.SCHEDULED, "run_after": Greatest(F("run_after"), now_plus(wait))}
    rows.update(
        **changes,
        process=None,
        failures=0,
        attempts_before=F("attempt"),
        rerun_requested=False,
        retry_requested=False,
        stop_requested_at=None,
        started_at=None,
        enqueued_at=Now(),
    )


def _insert_or_lock(rows: JobQuerySet, jobs: Iterable[Job]) -> dict[str, Job]:
    """Return the locked row of each key. A missing row is inserted."""
    first: dict[str, Job] = {}
    # In the order of the keys, first all inserts and then all locks: two calls that have keys in
    # common do not deadlock.
    for job in sorted(jobs, key=lambda job: job.key or ""):
        first.setdefault(job.key or "", job)
    # On MySQL, an insert that meets an existing key locks the index range beside it: there, only
    # missing rows are inserted.
    is_mysql = connections[rows.db].vendor == "mysql"
    found = _lock(rows, list(first), by_id=True) if is_mysql else {}
    # Repeated for a row that was deleted in between. These rows are found by their keys: an older
    # snapshot of the caller's transaction does not show them.
    for _ in range(ROUNDS):
        if not (missing := [key for key in first if key not in found]):
            return found
        for chunk in _chunks(missing):
            rows.bulk_create([first[key] for key in chunk], ignore_conflicts=True)
        found |= _lock(rows, missing)
    raise IntegrityError(
        f"The database takes the key {missing[0]!r} for another one that it has: the collation of "
        f"{rows.model._meta.db_table}.key was changed. `manage.py checkqueue` has the remedy."
    )


def _lock(rows: JobQuerySet, keys: list[str], by_id: bool = False) -> dict[str, Job]:
    """Return the locked rows of the keys. ``by_id`` finds them without locks: models/locking.py."""
    found: dict[str, Job] = {}
    for chunk in _chunks(keys):
        those = rows.filter(key__in=chunk)
        if by_id:
            those = by_primary_key(rows.filter(pk__in=list(those.values_list("pk", flat=True))))
        held = lock_waiting(those.order_by("key").annotate(db_now=Now()))
        found.update((row.key or "", row) for row in held)
    return found


def _write(rows: JobQuerySet, changed: list[Job]) -> None:
    """Write all rows together, found by their ids.

    They are locked, so nothing else has changed them.
    """
    for chunk in _chunks(changed):
        rows.save_locked(chunk, _WRITTEN)


def _chunks(items: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]


class _Merge:
    """Applies calls to the locked rows of their keys, in memory.

    changed: the rows to write. ended: the runs whose outcome their rows lose. shares: the batches
    that now wait for a run of another batch.
    """

    def __init__(self) -> None:
        self.changed: dict[UUID, Job] = {}
        self.ended: list[EndedRun] = []
        self.shares: list[BatchShare] = []

    def __call__(self, row: Any, job: Job, policy: UniquePolicy) -> Effect:
        if row.pk == job.pk:
            return Effect(row, EnqueueStatus.CREATED, begins=True)
        if row.version is not None and job.version is not None and job.version < row.version:
            return Effect(row, EnqueueStatus.IGNORED, begins=False)
        ends, on_conflict = row.state in FINISHED, policy.on_conflict
        if on_conflict == Conflict.ONCE or (on_conflict == Conflict.SKIP and not ends):
            return Effect(row, EnqueueStatus.IGNORED, begins=False)
        is_to_come = _is_to_come(row)
        self._assign_batch(row, job.batch_id)
        for name in OF_THE_CALL:
            setattr(row, name, getattr(job, name))
        row.version = row.version if job.version is None else job.version
        row.run_after, expires = _time(row, policy), policy.expires
        begins = max(row.run_after, row.db_now)
        row.expires_at = begins + expires if isinstance(expires, timedelta) else expires
        if row.state == State.RUNNING:
            row.rerun_requested = True
        else:
            _start_run(row, State.SCHEDULED if row.run_after > row.db_now else State.READY)
        self.changed[row.pk] = row
        status = EnqueueStatus.CREATED if ends else EnqueueStatus.MERGED
        return Effect(row, status, begins=not is_to_come)

    def _assign_batch(self, row: Job, batch: UUID | None) -> None:
        """Assign the requested run to the call's batch.

        The batch that it belonged to waits for it too.
        """
        if row.state in FINISHED:
            self.ended.append(
                EndedRun(row.pk, row.state, row.batch_id if row.batch_id != batch else None)
            )
            row.batch_id = batch
            return
        is_to_come = _is_to_come(row)
        if row.batch_id == batch or (batch is None and is_to_come):
            return
        if row.batch_id:
            self.shares.append(
                BatchShare(batch_id=row.batch_id, job=row.pk, attempt=row.attempt + is_to_come)
            )
        row.batch_id = batch


def _is_to_come(row: Job) -> bool:
    """Return True if a run of the row is waiting, or requested after the current one."""
    return row.state in WAITING or row.rerun_requested


def _time(row: Any, policy: UniquePolicy) -> Any:
    """Return the time at which the job is to run.

    A re-enqueue never postpones it, unless the call replaces the waiting job.
    """
    wanted = policy.run_after
    asked = row.db_now + wanted if isinstance(wanted, timedelta) else wanted or row.db_now
    if row.state in FINISHED or (row.state == State.RUNNING and not row.rerun_requested):
        return asked
    if policy.on_conflict == Conflict.REPLACE and wanted:
        # The time of a running job's first call is not that of the run that was requested.
        is_running = row.state == State.RUNNING
        return asked if is_running else min(asked, row.enqueued_at + policy.max_wait)
    return min(asked, row.run_after)


def _start_run(row: Any, state: State) -> None:
    if row.state in FINISHED:
        row.enqueued_at, row.started_at, row.finished_at, row.result = row.db_now, None, None, None
        row.stop_requested_at = None
    row.state, row.blocked_by = state, None
    row.failures, row.attempts_before = 0, row.attempt
