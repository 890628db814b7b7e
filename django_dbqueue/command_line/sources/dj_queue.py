"""dj-queue: a job has a row, and one more in the table of its state, which workers lock."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from django.conf import settings
from django.db.models import F

from ...compat import task_backends
from ...limits import LONGEST_GROUP, limit
from .source import Schedule, Source, Unfit, Waiting, check_days

# Days of the month that are the same as * there.
ALL_DAYS = ("*/1", "1-31", "1-31/1")


class DjQueue(Source):
    name, app = "dj-queue", "dj_queue"
    order, related = ("job__created_at", "pk"), ("job",)

    def databases(self) -> list[str]:
        alias_of = import_module("dj_queue.db").get_database_alias
        backends = (task_backends[alias] for alias in task_backends)
        own = [each for each in backends if type(each).__module__.startswith("dj_queue.")]
        if not own:
            raise Unfit("TASKS has no backend of dj-queue. Keep it there until its jobs are moved.")
        return sorted({alias_of(each.alias) for each in own})

    def parts(self) -> list[Any]:
        states = ("ReadyExecution", "BlockedExecution", "ScheduledExecution")
        found = [self.model(name).objects.all() for name in states]
        return [*found, self.model("FailedExecution").objects.exclude(retry_at=None)]

    def read(self, row: Any) -> Waiting:
        job = row.job
        options: dict[str, Any] = {}
        if job.concurrency_key:
            options["concurrency"] = limit(
                job.concurrency_limit or 1,
                group=job.concurrency_key[:LONGEST_GROUP],
                on_conflict="discard" if job.concurrency_on_conflict == "discard" else "wait",
            )
        return Waiting(
            task=job.task_path,
            args=job.payload["args"],
            kwargs=job.payload["kwargs"],
            queue=job.queue_name,
            priority=job.priority,
            run_after=getattr(row, "retry_at", None) or job.scheduled_at,
            options=options,
        )

    def identity(self, row: Any) -> str:
        return f"{self.name} {row.job_id}"

    def remove(self, rows: Sequence[Any]) -> None:
        database, ids = rows[0]._state.db, [row.job_id for row in rows]
        if type(rows[0]).__name__ == "ReadyExecution":
            slots = self.model("Semaphore").objects.using(database)
            for row in rows:
                if key := row.job.concurrency_key:  # It holds a slot.
                    slots.filter(key=key).update(
                        value=F("value") + 1, active_count=F("active_count") - 1
                    )
        # Without its job, it would be enqueued again.
        self.model("RecurringExecution").objects.using(database).filter(job__in=ids).delete()
        self.model("Job").objects.using(database).filter(pk__in=ids).delete()

    def schedules(self) -> list[Any]:
        return [self.model("RecurringTask").objects.filter(static=False)]

    def read_schedule(self, row: Any) -> Schedule:
        return Schedule(
            name=row.key,
            task=row.task_path,
            args=row.payload["args"],
            kwargs=row.payload["kwargs"],
            queue=row.queue_name,
            priority=row.priority or 0,
            when={
                "cron": _cron(row.schedule),
                # It reads expressions on the clock of timezone.now().
                "timezone": "UTC" if settings.USE_TZ else "",
                # Its scheduler makes up for any number of missed runs with one.
                "missed": "one",
                "next_run_at": row.next_run_at,
            },
        )


def _cron(expression: str) -> str:
    """Return an expression as one that means the same here. Raises Unfit."""
    fields = expression.split()
    if len(fields) in (5, 6) and fields[-3] in ALL_DAYS:
        fields[-3] = "*"
    check_days(f"schedule={expression!r}", fields[-5:])
    return " ".join(fields)
