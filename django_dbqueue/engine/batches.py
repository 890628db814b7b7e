"""Batches: open, join, seal and finish them, and the shares of runs that have left them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from django.db import DatabaseError, OperationalError, connections
from django.db.models import F, Q
from django.db.models.functions import Coalesce

from ..core.internal_errors import report
from ..core.transactions import writing
from ..exceptions import BatchFinished
from ..models import Batch, BatchShare, Job
from ..models.batch import BatchQuerySet, of_shared
from ..models.enums import UNSUCCESSFUL
from ..models.expressions import Now, now_plus
from ..models.locking import by_primary_key, lock, lock_first, lock_waiting
from .galera import certify
from .statistics import count_enqueued

# The longest time that a batch stays open after its opener has added a job. A dead opener is
# noticed after it.
OPEN_SECONDS = 3600.0


def _rows(database: str) -> BatchQuerySet:
    return Batch.objects.using(database)


def create_open(database: str, batch: Batch) -> None:
    """Write a new batch for its opener to fill."""
    batch.opened_until = now_plus(OPEN_SECONDS)
    _rows(database).bulk_create([batch])


def join(database: str, pk: UUID, *, opens: bool = False) -> None:
    """Hold a batch open until the end of the transaction, while jobs are added to it.

    ``opens``: the caller is the opener. It has OPEN_SECONDS again until it adds the next job.

    Raises BatchFinished.
    """
    rows = _rows(database).filter(pk=pk, finished_at=None).annotate(db_now=Now())
    row: Any = lock_waiting(rows).first()
    if row is None:
        raise BatchFinished(f"Batch {pk} has finished: no job can be added to it. Open another.")
    if not opens:
        certify(_rows(database).filter(pk=pk), {"finished_at": Now()}, {"finished_at": None})
    # Not on each call: in one transaction, very many versions of a row make it slow to find.
    if opens and (
        row.sealed_at or (row.opened_until - row.db_now).total_seconds() < OPEN_SECONDS / 2
    ):
        rows.update(sealed_at=None, opened_until=now_plus(OPEN_SECONDS))


def seal(database: str, pk: UUID) -> None:
    """Seal a batch: its opener has enqueued all jobs.

    A sealed batch finishes when all of its jobs have.
    """
    _rows(database).filter(pk=pk, finished_at=None).update(
        sealed_at=Coalesce(F("sealed_at"), Now()), opened_until=None
    )


def seal_abandoned(database: str, limit: int = 100) -> list[UUID]:
    """Seal batches whose openers have added nothing for OPEN_SECONDS and have not ended.

    Returns their ids. A live opener reopens its batch with the next job that it adds, or
    finds that the batch has finished.
    """
    with writing(database):
        expired = _rows(database).filter(sealed_at=None, finished_at=None, opened_until__lt=Now())
        ids = lock_first(expired.values_list("pk", flat=True), limit)
        _rows(database).filter(pk__in=ids).update(sealed_at=Now())
    return ids


def finish(database: str, ids: Iterable[UUID] | None = None, limit: int = 100) -> list[str]:
    """Finish due batches, each once, and enqueue their callbacks in the same transaction.

    Returns the queues of the callbacks. A batch that another transaction has locked is left
    to that transaction, or to the next scan.
    """
    rows = _rows(database).due() if ids is None else _rows(database).due().filter(pk__in=list(ids))
    if not (found := list(rows.values_list("pk", flat=True)[:limit])):
        return []
    try:
        return _finish(database, found)
    except OperationalError:
        raise
    except DatabaseError as error:
        if connections[database].in_atomic_block:
            raise
        if len(found) > 1:
            return [queue for pk in found for queue in finish(database, [pk])]
        # If raised, it would stop the settling of jobs and the finishing of other batches.
        report(
            error,
            "batch %s: database refused its callbacks; it stays unfinished: %s",
            found[0],
            error,
        )
        return []


def _finish(database: str, found: list[UUID]) -> list[str]:
    rows, jobs, shares = (
        _rows(database),
        Job.objects.using(database),
        BatchShare.objects.using(database),
    )
    with writing(database):
        held = [row.pk for row in lock(by_primary_key(rows.filter(pk__in=found).order_by("pk")))]
        # Checked again under the lock: a job may have been added before it.
        due = list(rows.due().filter(pk__in=held))
        rows.filter(pk__in=[row.pk for row in due], finished_at=None).update(finished_at=Now())
        failed = jobs.filter(batch__in=due, state__in=UNSUCCESSFUL).order_by()
        unsuccessful = set(failed.values_list("batch", flat=True).distinct())
        # Read after the jobs: a failure that leaves its job's row becomes a share in the same
        # transaction.
        shared = shares.filter(
            Q(has_failed=True) | of_shared(database, UNSUCCESSFUL), batch__in=due
        )
        unsuccessful |= set(shared.values_list("batch", flat=True))
        unsuccessful |= {row.pk for row in due if row.is_abandoned}
        callbacks = [
            job for row in due for job in row.callbacks(successful=row.pk not in unsuccessful)
        ]
        jobs.bulk_create(callbacks)
        count_enqueued(database, Counter((job.queue, job.task) for job in callbacks))
        for name in ("on_finish", "on_success"):
            rows.bulk_update([row for row in due if row.follower(name)], [name])
    return [job.queue for job in callbacks]


class EndedRun(NamedTuple):
    """A run whose outcome the job's row is about to lose.

    batch: the batch that the row leaves, if any.
    attempt: shares of later attempts belong to the next run; None if all shares end.
    """

    job: UUID
    state: str
    batch: UUID | None = None
    attempt: int | None = None


def close_shares(database: str, runs: Sequence[EndedRun]) -> None:
    """End the shares of ended runs, and keep their failures."""
    if not runs:
        return
    shares = BatchShare.objects.using(database)
    ended = {run.job: run for run in runs}
    pending = shares.filter(job__in=list(ended), has_failed=False).values_list(
        "pk", "job", "attempt"
    )
    over = [
        (pk, ended[job])
        for pk, job, attempt in pending
        if attempt <= (ended[job].attempt or attempt)
    ]
    if failed := [pk for pk, run in over if run.state in UNSUCCESSFUL]:
        shares.filter(pk__in=failed).update(has_failed=True)
    if successful := [pk for pk, run in over if run.state not in UNSUCCESSFUL]:
        shares.filter(pk__in=successful)._raw_delete(database)
    left = [(run.job, batch) for run in runs if (batch := run.batch) and run.state in UNSUCCESSFUL]
    shares.bulk_create(
        [BatchShare(batch_id=batch, job=job, has_failed=True) for job, batch in left]
    )


def pass_shares_on(database: str, children: Mapping[UUID, Sequence[Job]]) -> None:
    """Have the batches that wait for jobs wait for the jobs that these have become, too."""
    shares = BatchShare.objects.using(database)
    waiting = shares.filter(job__in=list(children), has_failed=False).values_list("batch", "job")
    shares.bulk_create(
        [
            BatchShare(batch_id=batch, job=child.pk)
            for batch, job in waiting
            for child in children[job]
        ]
    )
