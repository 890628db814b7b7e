"""steady-queue: a job has a row, and one more in the table of its state, which workers lock."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from django.conf import settings
from django.db.models import F

from .source import Schedule, Source, Unfit, Waiting


class SteadyQueue(Source):
    name, app = "steady-queue", "steady_queue"
    order, related = ("-priority", "job_id"), ("job",)

    def databases(self) -> list[str]:
        return [str(import_module("steady_queue").database)]

    def parts(self) -> list[Any]:
        states = ("ReadyExecution", "BlockedExecution", "ScheduledExecution")
        return [self.model(name).objects.all() for name in states]

    def read(self, row: Any) -> Waiting:
        job = row.job
        args, kwargs = _arguments(job)
        return Waiting(
            task=job.class_name,
            args=args,
            kwargs=kwargs,
            queue=job.queue_name,
            priority=job.priority,
            run_after=job.scheduled_at,
        )

    def identity(self, row: Any) -> str:
        return f"{self.name} {row.job_id}"

    def remove(self, rows: Sequence[Any]) -> None:
        database = rows[0]._state.db
        if type(rows[0]).__name__ == "ReadyExecution":
            slots = self.model("Semaphore").objects.using(database)
            for row in rows:
                if key := row.job.concurrency_key:  # It holds a slot.
                    slots.filter(key=key).update(value=F("value") + 1)
        jobs = self.model("Job").objects.using(database)
        jobs.filter(pk__in=[row.job_id for row in rows]).delete()

    def schedules(self) -> list[Any]:
        return [self.model("RecurringTask").objects.filter(static=False)]

    def read_schedule(self, row: Any) -> Schedule:
        if row.command:
            raise Unfit(f"It has command={row.command!r} instead of a task. Make it here.")
        args, kwargs = _arguments(row)
        return Schedule(
            name=row.key,
            task=row.class_name,
            args=args,
            kwargs=kwargs,
            queue=row.queue_name,
            priority=row.priority,
            # Its scheduler runs only what is declared in code.
            is_enabled=False,
            # It reads expressions on the clock of timezone.now().
            when={"cron": _cron(row.schedule), "timezone": "UTC" if settings.USE_TZ else ""},
        )


def _arguments(row: Any) -> tuple[list[Any], dict[str, Any]]:
    try:
        reader = import_module("steady_queue.arguments").Arguments
        args, kwargs = reader.deserialize_args_and_kwargs(row.arguments["arguments"])
    except Exception as error:
        raise Unfit(f"Its arguments cannot be read: {type(error).__name__}: {error}") from None
    return args, kwargs


def _cron(expression: str) -> str:
    """Return an expression of the package crontab as one that means the same here.

    Its sixth field is a year, the first of seven is seconds, and a day must match both fields.
    Raises Unfit.
    """
    try:
        import_module("crontab").CronTab(expression)
    except Exception as error:
        raise Unfit(
            f"It has schedule={expression!r}, which steady-queue cannot read: {error}. "
            "Correct it there."
        ) from None
    if expression.startswith("@"):
        return expression
    fields = ["*" if each == "?" else each for each in expression.split()]
    if len(fields) > 5 and (year := fields.pop()) != "*":
        raise Unfit(
            f"It has schedule={expression!r}, with {year!r} as year. Make it here with starts_at "
            "and ends_at."
        )
    day, _month, weekday = fields[-3:]
    if special := re.search(r"(?<![a-z0-9])[zl]\d\S*", f"{day} {weekday}", re.I):
        raise Unfit(
            f"It has schedule={expression!r}, with {special[0]!r}, a day counted from the end of "
            "the month. Make it here with L, the last day, and check the day in its task."
        )
    if "*" not in (day, weekday):
        raise Unfit(
            f"It has schedule={expression!r}, with {day!r} as day of the month and {weekday!r} as "
            "day of the week: there both must match, here one. Make it here, and check the day in "
            "its task."
        )
    return " ".join(fields)
