"""Operations on recurring tasks, and the search for due ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db.models import Exists, F, OuterRef, Q

from ..core.transactions import writing
from ..exceptions import InvalidSchedule
from .expressions import Now, after
from .job import Job
from .locking import lock
from .primary import PrimaryQuerySet
from .recurring_execution import RecurringExecution
from .states import FINISHED

if TYPE_CHECKING:
    from .recurring import RecurringTask

# Writes a job of a recurring task, with a delay, and returns the job's id.
Enqueue = Callable[["RecurringTask", timedelta], UUID]
# Seconds after its last declaration by a dispatcher until a definition counts as removed from all
# code.
UNDECLARED = 120.0
# Fields whose change invalidates ``next_run_at``.
SCHEDULE = ("cron", "timezone", "every", "drift", "starts_at", "ends_at")
TO_BE_PLANNED = {"next_run_at": None, "waits_for": None, "is_over": False}


class RecurringTaskQuerySet(PrimaryQuerySet["RecurringTask"]):
    def enabled(self) -> RecurringTaskQuerySet:
        return self.filter(is_enabled=True)

    def disabled(self) -> RecurringTaskQuerySet:
        return self.filter(is_enabled=False)

    def enable(self) -> int:
        """Resume runs from the next time on. Return the number of rows that were disabled."""
        return self.disabled().update(is_enabled=True, **TO_BE_PLANNED)

    def disable(self) -> int:
        """Stop runs until enable(). Return the number of rows that were enabled."""
        return self.enabled().update(is_enabled=False, **TO_BE_PLANNED)

    def replan(self) -> int:
        """Compute the next time again, as after a change of the schedule."""
        return self.update(**TO_BE_PLANNED)

    def replan_ahead(self) -> None:
        """Correct next times that are later than the schedule allows.

        They were planned while the database's clock was ahead.
        """
        self.filter(is_over=True, ends_at__gt=Now()).update(is_over=False)
        rows: Any = self.enabled().filter(next_run_at__gt=Now()).annotate(seen_at=Now())
        for row in rows:
            with suppress(InvalidSchedule):
                if earlier := row.time_if_ahead(row.seen_at):
                    self._at(row).filter(next_run_at=row.next_run_at).update(next_run_at=earlier)

    def undeclared(self) -> RecurringTaskQuerySet:
        """Filter rows whose code no running dispatcher has."""
        return self.filter(is_from_code=True, declared_at__lt=after(-UNDECLARED))

    def of(self, definitions: Iterable[str]) -> RecurringTaskQuerySet:
        """Filter rows made in the admin, and rows with exactly these definitions in code."""
        return self.filter(Q(is_from_code=False) | Q(definition__in=list(definitions)))

    def upcoming(self) -> RecurringTaskQuerySet:
        """Filter enabled rows, annotated with the database's time as ``seen_at``.

        Unplanned rows come first, then the others in the order of their next time. Rows with drift
        are left out until their last job has ended: their next interval starts then.
        """
        unfinished = Job.objects.using(self.db).filter(pk=OuterRef("waits_for")).exclude(state__in=FINISHED)
        rows = self.enabled().filter(is_over=False).filter(~Exists(unfinished)).annotate(seen_at=Now())
        return rows.order_by(F("next_run_at").asc(nulls_first=True), "pk")

    def waiting(self) -> RecurringTaskQuerySet:
        """Filter unplanned and due rows."""
        return self.upcoming().filter(Q(next_run_at=None) | Q(next_run_at__lte=Now()))

    def due(self) -> RecurringTaskQuerySet:
        return self.upcoming().filter(next_run_at__lte=Now())

    def enqueue_due(self, row: RecurringTask, enqueue: Enqueue) -> list[datetime] | None:
        """Enqueue a task for its due times, or plan its first time, in one transaction.

        Return the times; None if there was nothing to do. Each time has one execution, written
        with its job. A row that another dispatcher has locked is skipped. Raises InvalidSchedule
        and any exception of ``enqueue``; nothing has changed then.
        """
        with writing(self.db):
            found: Any = lock(self.enabled().filter(pk=row.pk)).annotate(seen_at=Now()).first()
            if found is None:
                return None
            if found.next_run_at is None:
                return [] if self._plan(found) else None
            return self._enqueue(found, enqueue) if found.next_run_at <= found.seen_at else None

    def run_now(self, enqueue: Enqueue) -> int:
        """Enqueue an additional run at once, also of disabled tasks. Return the number of tasks.

        Raises any exception of ``enqueue``.
        """
        with writing(self.db):
            rows: list[Any] = list(lock(self.annotate(seen_at=Now())))
            for row in rows:
                job = self._once(row, row.seen_at, enqueue, timedelta())
                waits = {"waits_for": job, "next_run_at": None} if row.drift and row.is_enabled else {}
                self._at(row).update(last_run_at=row.seen_at, **waits)
        return len(rows)

    def note(self, row: RecurringTask, problem: str) -> None:
        """Store why a task cannot be enqueued, for operators."""
        if row.problem != problem:
            self._at(row).update(problem=problem)

    def synchronise(self, declared: Mapping[str, Mapping[str, Any]], *, takes_over: bool) -> list[str]:
        """Insert or update the rows of tasks declared in code.

        Return the names that are already taken by rows made in the admin.

        Old and new code may run side by side. A starting dispatcher (``takes_over``) updates a row
        to its own definition. Other dispatchers leave the row unchanged while any dispatcher
        declares the row's definition, and take it back after that.
        """
        rows = {row.name: row for row in self.filter(name__in=list(declared)).annotate(seen_at=Now())}
        missing = [self.model(**values, is_from_code=True) for name, values in declared.items() if name not in rows]
        self.bulk_create(missing, ignore_conflicts=True)
        same = [values["definition"] for values in declared.values()]
        self.filter(name__in=list(declared), definition__in=same).update(declared_at=Now())
        for name in declared.keys() & rows.keys():
            if rows[name].is_from_code and rows[name].definition != declared[name]["definition"]:
                self._declare(rows[name], declared[name], takes_over)
        return sorted(name for name, row in rows.items() if not row.is_from_code)

    def forget(self, older_than: float) -> None:
        """Delete rows from code that were not declared for ``older_than`` seconds.

        Their executions are deleted too.
        """
        with writing(self.db):
            gone = self.filter(is_from_code=True, declared_at__lt=after(-older_than))
            if ids := list(lock(gone).values_list("pk", flat=True)):
                RecurringExecution.objects.using(self.db).filter(task__in=ids)._raw_delete(self.db)
                gone.filter(pk__in=ids)._raw_delete(self.db)

    def _declare(self, row: RecurringTask, values: Mapping[str, Any], takes_over: bool) -> None:
        changes = {**values, "declared_at": Now(), "problem": ""}
        if any(getattr(row, name) != values[name] for name in SCHEDULE):
            changes |= TO_BE_PLANNED
        rows = self.filter(pk=row.pk, definition=row.definition)
        (rows if takes_over else rows.undeclared()).update(**changes)

    def _plan(self, row: Any) -> bool:
        """Plan the first time; with drift, one interval after the last job ended or was deleted."""
        if row.waits_for is None:
            following = row.time_after(row.seen_at)
        else:
            job = Job.objects.using(self.db).filter(pk=row.waits_for).first()
            if job and job.state not in FINISHED:
                return False
            following = row.time_from(job.finished_at if job and job.finished_at else row.seen_at)
        changes = {"next_run_at": following, "waits_for": None, "is_over": following is None, "problem": ""}
        return bool(self._at(row).update(**changes))

    def _enqueue(self, row: Any, enqueue: Enqueue) -> list[datetime]:
        plan, recurrence = row.plan(row.seen_at), row.recurrence
        jobs = [self._once(row, time, enqueue, recurrence.any_jitter()) for time in plan.times]
        changes = {"next_run_at": plan.following, "problem": ""}
        if row.drift:
            waits = next(filter(None, jobs), None)
            changes |= {"waits_for": waits, "next_run_at": None if waits else row.time_from(row.seen_at)}
        changes["is_over"] = not changes["next_run_at"] and not changes.get("waits_for")
        if plan.times:
            changes["last_run_at"] = plan.times[-1]
        self._at(row).update(**changes)
        return plan.times  # type: ignore[no-any-return]

    def _once(self, row: RecurringTask, time: datetime, enqueue: Enqueue, wait: timedelta) -> UUID | None:
        """Enqueue a job for a time, unless the time already has an execution."""
        executions = RecurringExecution.objects.using(self.db)
        if executions.filter(task=row, run_at=time).exists():
            return None
        job = enqueue(row, wait)
        # Of two concurrent inserts, the constraint rejects one; its job is rolled back with it.
        executions.bulk_create([RecurringExecution(task=row, run_at=time, job=job)])
        return job

    def _at(self, row: RecurringTask) -> RecurringTaskQuerySet:
        return self.model._default_manager.using(self.db).filter(pk=row.pk)
