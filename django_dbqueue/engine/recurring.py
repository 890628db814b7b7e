"""Recurring tasks: keep rows as the code declares them, and enqueue the tasks when they are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from ..core.transactions import writing
from ..exceptions import InvalidSchedule
from ..models import Job, RecurringExecution, RecurringTask
from ..models.enums import FINISHED
from ..models.expressions import Now, now_plus
from ..models.locking import lock
from ..models.recurring_task import SCHEDULE, RecurringTaskQuerySet

# Writes a job of a recurring task, with a delay, and returns the job's id.
Enqueue = Callable[[RecurringTask, timedelta], UUID]


def enqueue_due(
    rows: RecurringTaskQuerySet, row: RecurringTask, enqueue: Enqueue
) -> list[datetime] | None:
    """Enqueue a task for its due times, or plan its first time, in one transaction.

    The row must still be one of ``rows``: another dispatcher may have declared it anew.
    Return the times; None if there was nothing to do. Each time has one execution, written
    with its job. A row that another dispatcher has locked is skipped. Raises InvalidSchedule
    and any exception of ``enqueue``; nothing has changed then.
    """
    database = rows.db
    with writing(database):
        found: Any = lock(rows.enabled().filter(pk=row.pk)).annotate(seen_at=Now()).first()
        if found is None:
            return None
        if found.next_run_at is None:
            return [] if _plan(database, found) else None
        return _enqueue(database, found, enqueue) if found.next_run_at <= found.seen_at else None


def run_now(rows: RecurringTaskQuerySet, enqueue: Enqueue) -> int:
    """Enqueue an additional run at once, also of disabled tasks. Return the number of tasks.

    Raises any exception of ``enqueue``.
    """
    database = rows.db
    with writing(database):
        found: list[Any] = list(lock(rows.annotate(seen_at=Now())))
        for row in found:
            job = enqueue_once(database, row, row.seen_at, enqueue, timedelta())
            waits = {"waits_for": job, "next_run_at": None} if row.drift and row.is_enabled else {}
            _row(database, row).update(last_run_at=row.seen_at, **waits)
    return len(found)


def save_problem(database: str, row: RecurringTask, problem: str) -> None:
    """Store why a task cannot be enqueued, for operators."""
    if row.problem != problem:
        _row(database, row).update(problem=problem)


def synchronise(
    database: str, declared: Mapping[str, Mapping[str, object]], *, takes_over: bool
) -> list[str]:
    """Insert or update the rows of tasks declared in code.

    Return the names that are already taken by rows made in the admin.

    Old and new code may run side by side. A starting dispatcher (``takes_over``) updates a row
    to its own definition. Other dispatchers leave the row unchanged while any dispatcher
    declares the row's definition, and take it back after that.
    """
    tasks = RecurringTask.objects.using(database)
    rows = {row.name: row for row in tasks.filter(name__in=list(declared)).annotate(seen_at=Now())}
    missing = [
        RecurringTask(**values, is_from_code=True)
        for name, values in declared.items()
        if name not in rows
    ]
    tasks.bulk_create(missing, ignore_conflicts=True)
    same = [values["definition"] for values in declared.values()]
    tasks.filter(name__in=list(declared), definition__in=same).update(declared_at=Now())
    for name in declared.keys() & rows.keys():
        if rows[name].is_from_code and rows[name].definition != declared[name]["definition"]:
            _declare(database, rows[name], declared[name], takes_over)
    return sorted(name for name, row in rows.items() if not row.is_from_code)


def delete_undeclared(database: str, older_than: float) -> None:
    """Delete rows from code that were not declared for ``older_than`` seconds.

    Their executions are deleted too.
    """
    with writing(database):
        gone = RecurringTask.objects.using(database).filter(
            is_from_code=True, declared_at__lt=now_plus(-older_than)
        )
        if ids := list(lock(gone).values_list("pk", flat=True)):
            RecurringExecution.objects.using(database).filter(task__in=ids)._raw_delete(database)
            gone.filter(pk__in=ids)._raw_delete(database)


def replan_ahead(database: str) -> None:
    """Correct next times that are later than the schedule allows.

    They were planned while the database's clock was ahead.
    """
    tasks = RecurringTask.objects.using(database)
    tasks.filter(is_over=True, ends_at__gt=Now()).update(is_over=False)
    rows: Any = tasks.enabled().filter(next_run_at__gt=Now()).annotate(seen_at=Now())
    for row in rows:
        with suppress(InvalidSchedule):
            if earlier := row.time_if_ahead(row.seen_at):
                _row(database, row).filter(next_run_at=row.next_run_at).update(next_run_at=earlier)


def _declare(
    database: str, row: RecurringTask, values: Mapping[str, object], takes_over: bool
) -> None:
    changes = {**values, "declared_at": Now(), "problem": ""}
    rows = RecurringTask.objects.using(database).filter(pk=row.pk, definition=row.definition)
    if not takes_over:
        rows = rows.undeclared()
    is_same = all(getattr(row, name) == values[name] for name in SCHEDULE)
    (rows.update if is_same else rows.replan)(**changes)


def _plan(database: str, row: Any) -> bool:
    """Plan the first time; with drift, one interval after the last job ended or was deleted."""
    if row.waits_for is None or not row.drift:
        following = row.time_after(row.seen_at)
    else:
        job = Job.objects.using(database).filter(pk=row.waits_for).first()
        if job and job.state not in FINISHED:
            return False
        end = job.finished_at if job and job.finished_at else row.seen_at
        # The call may have had no effect on the ended job of its key.
        following = row.time_from(max(end, row.last_run_at or end))
    changes = {
        "next_run_at": following,
        "waits_for": None,
        "is_over": following is None,
        "problem": "",
    }
    return bool(_row(database, row).update(**changes))


def _enqueue(database: str, row: Any, enqueue: Enqueue) -> list[datetime]:
    plan, recurrence = row.plan(row.seen_at), row.recurrence
    jobs = [
        enqueue_once(database, row, time, enqueue, recurrence.any_jitter()) for time in plan.times
    ]
    changes = {"next_run_at": plan.following, "problem": ""}
    if row.drift:
        waits = next(filter(None, jobs), None)
        changes |= {
            "waits_for": waits,
            "next_run_at": None if waits else row.time_from(row.seen_at),
        }
    changes["is_over"] = not changes["next_run_at"] and not changes.get("waits_for")
    if plan.times:
        changes["last_run_at"] = plan.times[-1]
    _row(database, row).update(**changes)
    return plan.times  # type: ignore[no-any-return]


def enqueue_once(
    database: str, row: RecurringTask, time: datetime, enqueue: Enqueue, wait: timedelta
) -> UUID | None:
    """Enqueue a job for a time, unless the time already has an execution."""
    executions = RecurringExecution.objects.using(database)
    if executions.filter(task=row, run_at=time).exists():
        return None
    job = enqueue(row, wait)
    # Of two concurrent inserts, the constraint rejects one; its job is rolled back with it.
    executions.bulk_create([RecurringExecution(task_id=row.pk, run_at=time, job=job)])
    return job


def _row(database: str, row: RecurringTask) -> RecurringTaskQuerySet:
    return RecurringTask.objects.using(database).filter(pk=row.pk)
