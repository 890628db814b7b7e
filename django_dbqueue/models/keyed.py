"""Unique jobs: all jobs that are enqueued with one key share one row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import OperationalError, connections, models
from django.db.models import Case, F, Value, When
from django.db.models.functions import Greatest

from ..core.time_values import LONGEST_WAIT
from ..core.transactions import writing
from .batch_share import BatchShare, EndedRun
from .expressions import Now, after
from .states import FINISHED, Conflict, EnqueueStatus, State

if TYPE_CHECKING:
    from .job import Job

T = TypeVar("T")

CHUNK = 500
TRIES = 5
# Columns overwritten by the latest enqueue of the same key.
OF_THE_CALL = [
    *("task", "queue", "priority", "args", "kwargs", "metadata", "max_attempts", "on_lost", "timeout", "limits"),
    *("pipeline", "stage"),
]
_OF_A_RUN = ["state", "blocked_by", "run_after", "expires_at", "asked_again", "failures", "attempts_before"]
_OF_A_NEW_RUN = ["enqueued_at", "started_at", "finished_at", "result", "stop_asked_at"]
TIMES = ["run_after", "expires_at", "enqueued_at"]
OF_A_NEW_JOB = ["id", *OF_THE_CALL, "batch_id", *_OF_A_RUN, "enqueued_at", "version", "attempt", "has_begun"]
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


def merge(rows: models.QuerySet[Job], jobs: Sequence[Job], how: UniquePolicy) -> list[tuple[Job, EnqueueStatus]]:
    """Upsert jobs with keys. Returns the row of each, and the effect of the call on it."""
    connection: Any = connections[rows.db]
    for _ in range(TRIES):
        try:
            return _merge(rows, jobs, how)
        except OperationalError:
            # MySQL may detect a deadlock between two calls that insert the same new key. It has
            # rolled back the whole transaction.
            if connection.in_atomic_block or not connection.is_usable():
                raise
    return _merge(rows, jobs, how)


def restart_run(rows: models.QuerySet[Job], wait: float | datetime) -> None:
    """Restart running jobs that were re-enqueued. Their rows have the values of that call already.

    Each waits for the time of that call, and at least until ``wait`` (seconds from now, or a
    time), as its retry would have.
    """
    # MySQL sets one column after the other: the state depends on the time that the call set.
    changes: dict[str, Any] = {
        "state": Case(When(run_after__gt=after(wait), then=Value(State.SCHEDULED)), default=Value(State.READY))
    }
    if wait:
        changes = {"state": State.SCHEDULED, "run_after": Greatest(F("run_after"), after(wait))}
    rows.update(
        **changes,
        process=None,
        failures=0,
        attempts_before=F("attempt"),
        asked_again=False,
        stop_asked_at=None,
        started_at=None,
        enqueued_at=Now(),
    )


def _merge(rows: models.QuerySet[Job], jobs: Sequence[Job], how: UniquePolicy) -> list[tuple[Job, EnqueueStatus]]:
    is_own = not connections[rows.db].in_atomic_block
    with writing(rows.db, savepoint=False):
        if is_own:
            _read_committed(connections[rows.db])
        standing = _stand(rows, jobs)
        met = [(standing[job.key or ""], _meet(standing[job.key or ""], job, how)) for job in jobs]
        changed = {row.pk: row for row, _fate in met if vars(row).pop("is_changed", False)}
        _let_batches_wait(rows, list(changed.values()))
        _write(rows, list(changed.values()))
    return met


def _read_committed(connection: Any) -> None:
    """Set the isolation level of this transaction to READ COMMITTED.

    Each statement then sees all earlier commits. A stricter transaction of PostgreSQL refuses to
    lock a row that was changed since it began.
    """
    if connection.vendor == "postgresql" and connection.isolation_level > 2:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")


def _stand(rows: models.QuerySet[Job], jobs: Iterable[Job]) -> dict[str, Job]:
    """Return the row of each key, locked. A missing row is inserted."""
    first: dict[str, Job] = {}
    # In the order of the keys, first all inserts and then all locks: two calls that have keys in
    # common do not deadlock.
    for job in sorted(jobs, key=lambda job: job.key or ""):
        first.setdefault(job.key or "", job)
    # On MySQL, an insert that meets an existing key locks the index range beside it: there, only
    # missing rows are inserted.
    found = _lock(rows, list(first)) if connections[rows.db].vendor == "mysql" else {}
    # Repeated for a row that was deleted in between.
    while missing := [key for key in first if key not in found]:
        for chunk in _chunks(missing):
            rows.bulk_create([first[key] for key in chunk], ignore_conflicts=True)
        found |= _lock(rows, missing)
    return found


def _lock(rows: models.QuerySet[Job], keys: list[str]) -> dict[str, Job]:
    can_lock = connections[rows.db].features.has_select_for_update
    found: dict[str, Job] = {}
    for chunk in _chunks(keys):
        held = rows.filter(key__in=chunk).order_by("key").annotate(db_now=Now())
        found.update((row.key or "", row) for row in (held.select_for_update() if can_lock else held))
    return found


def _write(rows: models.QuerySet[Job], changed: list[Job]) -> None:
    """Write all rows in one statement, found by their ids.

    They are locked, so nothing else has changed them.
    """
    # MySQL has no conflict target: there, any unique index identifies the row.
    unique = None if connections[rows.db].vendor == "mysql" else ["id"]
    for chunk in _chunks(changed):
        rows.bulk_create(chunk, update_conflicts=True, update_fields=_WRITTEN, unique_fields=unique)


def _chunks(items: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]


def _meet(row: Any, job: Job, how: UniquePolicy) -> EnqueueStatus:
    """Apply the call to the row, in memory."""
    if row.pk == job.pk:
        return EnqueueStatus.CREATED
    if row.version is not None and job.version is not None and job.version < row.version:
        return EnqueueStatus.IGNORED
    ends = row.state in FINISHED
    if how.on_conflict == Conflict.SKIP and not ends:
        return EnqueueStatus.IGNORED
    _pass_on(row, job.batch_id)
    for name in OF_THE_CALL:
        setattr(row, name, getattr(job, name))
    row.version = row.version if job.version is None else job.version
    row.run_after = _time(row, how)
    begins = max(row.run_after, row.db_now)
    row.expires_at = begins + how.expires if isinstance(how.expires, timedelta) else how.expires
    if row.state == State.RUNNING:
        row.asked_again = True
    else:
        _set_out(row, State.SCHEDULED if row.run_after > row.db_now else State.READY)
    row.is_changed = True
    return EnqueueStatus.CREATED if ends else EnqueueStatus.MERGED


def _pass_on(row: Any, batch: Any) -> None:
    """Assign the requested run to the call's batch.

    The batch that it belonged to waits for it too.
    """
    if row.state in FINISHED:
        row.ended_run = EndedRun(row.pk, row.state, row.batch_id if row.batch_id != batch else None)
        row.batch_id = batch
        return
    is_to_come = row.state != State.RUNNING or row.asked_again
    if row.batch_id == batch or (batch is None and is_to_come):
        return
    if row.batch_id:
        row.share = BatchShare(batch_id=row.batch_id, job=row.pk, attempt=row.attempt + is_to_come)
    row.batch_id = batch


def _let_batches_wait(rows: models.QuerySet[Job], changed: list[Job]) -> None:
    shares = BatchShare.objects.using(rows.db)
    if runs := [run for row in changed if (run := vars(row).pop("ended_run", None))]:
        shares.let_go(runs)
    shares.bulk_create([share for row in changed if (share := vars(row).pop("share", None))])


def _set_out(row: Any, state: State) -> None:
    if row.state in FINISHED:
        row.enqueued_at, row.started_at, row.finished_at, row.result = row.db_now, None, None, None
        row.stop_asked_at = None
    row.state, row.blocked_by = state, None
    row.failures, row.attempts_before = 0, row.attempt


def _time(row: Any, how: UniquePolicy) -> Any:
    """Return the time at which the job is to run.

    A re-enqueue never postpones it, unless the call replaces the waiting job.
    """
    asked = row.db_now + how.run_after if isinstance(how.run_after, timedelta) else how.run_after or row.db_now
    if row.state in FINISHED or row.state == State.RUNNING:
        return asked
    if how.on_conflict == Conflict.REPLACE and how.run_after:
        return min(asked, row.enqueued_at + how.max_wait)
    return min(asked, row.run_after)
