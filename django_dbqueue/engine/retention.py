"""Retention: delete what is past its time, with all rows that refer to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.db.models import Exists, OuterRef, Q
from django.db.models.fields.json import KT

from ..core.transactions import writing
from ..models import (
    Batch,
    BatchShare,
    Execution,
    Failure,
    FailureStatistic,
    Job,
    Operation,
    OperationJob,
    RecurringExecution,
    Semaphore,
    Slot,
    Statistic,
)
from ..models.enums import UNSUCCESSFUL, State
from ..models.expressions import Now, now_plus
from ..models.job import JobQuerySet
from ..models.locking import delete, lock, lock_first
from ..models.primary import PrimaryQuerySet
from ..models.semaphore import SemaphoreQuerySet
from ..models.statistic import MINUTES_KEPT, Period
from .batches import EndedRun, close_shares
from .semaphores import in_order

# The largest numbers of failures and of batches that are deleted in one transaction.
MOST_FAILURES, MOST_BATCHES = 10_000, 1000


def prune_jobs(jobs: JobQuerySet, states: Sequence[str], older_than: float, limit: int) -> int:
    """Delete jobs finished over ``older_than`` seconds ago, with all rows that refer to them.

    Returns how many.
    """
    with writing(jobs.db):
        old = jobs.filter(state__in=states, finished_at__lt=now_plus(-older_than)).order_by(
            "finished_at"
        )
        found = lock_first(old.values_list("pk", "state", "batch"), limit)
        close_shares(jobs.db, [EndedRun(*row) for row in found if row[1] in UNSUCCESSFUL])
        return erase(jobs.db, [row[0] for row in found])


def erase(database: str, ids: Sequence[UUID]) -> int:
    """Delete jobs with their attempts.

    One statement for each table: nothing is loaded to be deleted.
    """
    if not ids:
        return 0
    for each in Job._meta.related_objects:
        if each.related_model._meta.app_label == Job._meta.app_label:
            rows = each.related_model._base_manager.using(database)
            delete(rows.filter(**{f"{each.field.name}__in": ids}))
    return delete(Job.objects.using(database).filter(pk__in=ids))


def prune_batches(database: str, older_than: float) -> None:
    """Delete batches without jobs that finished over ``older_than`` seconds ago.

    Their shares are deleted too. A batch whose callback is kept, and was not successful, stays: the
    callback or its retry reads the batch.
    """
    jobs, last = Job.objects.using(database), UUID(int=0)
    rows = Batch.objects.using(database)
    old = rows.filter(finished_at__lt=now_plus(-older_than)).exclude(
        Exists(jobs.filter(batch=OuterRef("pk")))
    )
    found = old.order_by("pk").values_list("pk", KT("on_finish__id"), KT("on_success__id"))
    while part := list(found.filter(pk__gt=last)[:MOST_BATCHES]):
        last = part[-1][0]
        callbacks = {UUID(each): pk for pk, *both in part for each in both if each}
        waiting = jobs.filter(pk__in=list(callbacks)).exclude(state=State.SUCCESSFUL)
        needed = {callbacks[pk] for pk in waiting.values_list("pk", flat=True)}
        over = [pk for pk, *_both in part if pk not in needed]
        with writing(database):
            BatchShare.objects.using(database).filter(batch__in=over)._raw_delete(database)
            rows.filter(pk__in=over)._raw_delete(database)


def prune_failures(database: str, older_than: float) -> None:
    """Delete failures without executions that were not seen for ``older_than`` seconds.

    An execution is deleted with its job, and may be kept for longer: queues have their own
    retention.
    """
    with writing(database):
        has_executions = Exists(Execution.objects.using(database).filter(failure=OuterRef("pk")))
        failures = Failure.objects.using(database)
        old = failures.filter(last_seen__lt=now_plus(-older_than)).exclude(has_executions)
        if ids := lock_first(old.values_list("pk", flat=True), MOST_FAILURES):
            delete(FailureStatistic.objects.using(database).filter(failure__in=ids))
            failures.filter(pk__in=ids)._raw_delete(database)


def prune_recurring_executions(database: str, older_than: float, limit: int) -> int:
    """Delete executions from over ``older_than`` seconds ago. Return their number."""
    with writing(database):
        rows = RecurringExecution.objects.using(database)
        old = rows.filter(run_at__lt=now_plus(-older_than)).order_by("run_at")
        ids = lock_first(old.values_list("pk", flat=True), limit)
        return rows.filter(pk__in=ids)._raw_delete(database) if ids else 0


def prune_statistics(database: str, older_than: float | None, limit: int) -> int:
    """Delete statistics of hours over ``older_than`` seconds ago, and of minutes over two days.

    Return the largest number of rows that one statement has deleted.
    """
    minutes = MINUTES_KEPT if older_than is None else min(older_than, MINUTES_KEPT)
    return max(
        _prune_period(model.objects.using(database), period, kept, limit)
        for model in (Statistic, FailureStatistic)
        for period, kept in ((Period.MINUTE, minutes), (Period.HOUR, older_than))
        if kept is not None
    )


def _prune_period(rows: PrimaryQuerySet[Any], period: Period, older_than: float, limit: int) -> int:
    with writing(rows.db):
        old = rows.filter(period=period, start__lt=now_plus(-older_than)).order_by("start")
        ids = lock_first(old.values_list("pk", flat=True), limit)
        return delete(rows.filter(pk__in=ids)) if ids else 0


def prune_operations(database: str, older_than: float, limit: int) -> int:
    """Delete operations that ended over ``older_than`` seconds ago. Return the number of rows.

    Their jobs' rows first, at most ``limit``.
    """
    with writing(database):
        rows = Operation.objects.using(database)
        old = rows.filter(finished_at__lt=now_plus(-older_than)).exclude(pk__in=rows.holding())
        items = OperationJob.objects.using(database).filter(operation__in=old)
        if ids := list(items.values_list("pk", flat=True)[:limit]):
            return delete(items.filter(pk__in=ids))
        if not (ids := lock_first(old.order_by("pk").values_list("pk", flat=True), limit)):
            return 0
        rows.filter(undoes__in=ids).update(undoes=None)
        return delete(rows.filter(pk__in=ids))


def prune_semaphores(database: str, limit: int) -> int:
    """Delete semaphores that no job holds or waits for. Return their number."""
    found = list(_unused(database).values_list("pk", flat=True)[:limit])
    with writing(database):
        held = [row.pk for row in lock(in_order(database, found))]
        # Check again under the lock: a claim may have been faster, and its slots must stay.
        unused = list(_unused(database).filter(pk__in=held).values_list("pk", flat=True))
        delete(Slot.objects.using(database).filter(semaphore__in=unused))
        return delete(Semaphore.objects.using(database).filter(pk__in=unused))


def _unused(database: str) -> SemaphoreQuerySet:
    taken = Slot.objects.using(database).taken().filter(semaphore=OuterRef("pk"))
    waited_for = (
        Job.objects.using(database).filter(state=State.BLOCKED).filter(blocked_by=OuterRef("pk"))
    )
    idle = Semaphore.objects.using(database).filter(Q(earliest=None) | Q(earliest__lt=Now()))
    return idle.exclude(Exists(taken)).exclude(Exists(waited_for))
