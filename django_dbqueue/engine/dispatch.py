"""What a dispatcher does with jobs, and the one query with which it finds out whether to do it."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from django.db import connections, models
from django.db.models import Exists, Subquery

from ..core.transactions import writing
from ..models import Batch, Job, Process, RecurringTask, StatisticDelta
from ..models.enums import State
from ..models.expressions import Now, composed
from ..models.locking import lock_first


class PendingMaintenance(NamedTuple):
    """The maintenance that a database needs now. An idle dispatcher runs no other query.

    now: the database's time. due: the time of the next scheduled job.
    silent: processes have missed their heartbeat. orphaned: processes are gone and have left jobs.
    blocked: jobs wait for others. batches: some batches are to be finished.
    recurring: tasks are due, or new. counts: some are not in the statistics.
    """

    now: datetime
    due: datetime | None
    silent: bool
    orphaned: bool
    blocked: bool
    batches: bool
    recurring: bool
    counts: bool

    @property
    def due_in(self) -> float | None:
        """Seconds until the next scheduled job is due, at least 0; None if there is none."""
        return None if self.due is None else max(0.0, (self.due - self.now).total_seconds())


def dispatch(database: str, limit: int = 1000) -> list[str]:
    """Make scheduled jobs ready that are due. Return the queue of each."""
    jobs = Job.objects.using(database)
    with writing(database):
        due = dict(lock_first(jobs.due().order_by("run_after").values_list("pk", "queue"), limit))
        jobs.filter(pk__in=list(due), state=State.SCHEDULED).update(state=State.READY)
    return list(due.values())


def next_due_in(database: str, limit: int = 1) -> list[float]:
    """Return the seconds until the first scheduled jobs that are not yet due."""
    later = (
        Job.objects.using(database)
        .filter(state=State.SCHEDULED, run_after__gt=Now())
        .order_by("run_after")
        .values_list("run_after", Now())
    )
    return [(run_after - now).total_seconds() for run_after, now in later[:limit]]


def fetch_pending(database: str) -> PendingMaintenance | None:
    """Fetch the pending maintenance with one query; None if there is no process.

    The calling process is then missing too: others have declared it dead.
    """
    if connections[database].vendor != "postgresql":
        row = _facts(database).first()
    else:
        with connections[database].cursor() as cursor:
            cursor.execute(*_query(database))
            row = cursor.fetchone()
    return PendingMaintenance(*row) if row else None


@cache
def _query(database: str) -> tuple[str, tuple[Any, ...]]:
    """Compose the query once: this takes 4 ms, two thirds of the cost of an idle queue.

    On other databases, the times in the result need the ORM.
    """
    return composed(_facts(database)[:1])


def _facts(database: str) -> models.QuerySet[Process, Any]:
    processes, jobs = Process.objects.using(database), Job.objects.using(database)
    scheduled = jobs.filter(state=State.SCHEDULED).order_by("run_after")
    return processes.order_by("pk").values_list(
        Now(),
        Subquery(scheduled.values("run_after")[:1]),
        Exists(processes.silent()),
        Exists(jobs.orphaned()),
        Exists(jobs.filter(state=State.BLOCKED)),
        Exists(Batch.objects.using(database).swept()),
        Exists(RecurringTask.objects.using(database).waiting()),
        Exists(StatisticDelta.objects.using(database).all()),
    )
