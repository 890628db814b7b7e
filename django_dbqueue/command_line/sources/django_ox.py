"""django-ox: a table of jobs, and one of schedules. What its workflows hold (WAITING) stays there.

Schedules in its settings are in no table. What has run is in its log of ticks.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from importlib import import_module
from typing import Any

from django.utils import timezone

from ...models.recurring_task import aware
from ...recurrence.rule import INSTANT, Recurrence
from .source import Schedule, Source, Unfit, Waiting, check_days

EPOCH = datetime(1970, 1, 1)
HOUR, DAY, WEEK = 3600, 86_400, 604_800
# The weekday of EPOCH in a cron expression.
THURSDAY = 4


class DjangoOx(Source):
    name, app = "django-ox", "django_ox"
    order = ("-priority", "enqueued_at")

    def parts(self) -> list[Any]:
        return [self.model("OxTask").objects.filter(status="READY")]

    def read(self, row: Any) -> Waiting:
        left = row.max_attempts - row.attempts
        return Waiting(
            task=row.task_path,
            args=row.args,
            kwargs=row.kwargs,
            queue=row.queue_name,
            priority=row.priority,
            run_after=row.run_after,
            # Attempts that were made there count.
            options={"max_attempts": max(1, left)} if row.attempts else {},
        )

    def schedules(self) -> list[Any]:
        return [self.model("OxSchedule").objects.all()]

    def read_schedule(self, row: Any) -> Schedule:
        if seconds := row.starting_deadline_seconds:
            raise Unfit(
                f"It has starting_deadline_seconds={seconds}. Give its task "
                f"expires=timedelta(seconds={seconds}), and empty it there."
            )
        task, kwargs = _call(row)
        # Its workers make up for any number of missed runs with one.
        times = _times(row) | {"missed": "one"}
        if row.enabled:
            times["next_run_at"] = self._next_run(row, times)
        return Schedule(
            name=row.name,
            task=task.module_path,
            kwargs=kwargs,
            queue=task.queue_name,
            priority=task.priority,
            is_enabled=row.enabled,
            when=times,
        )

    def remove_schedule(self, row: Any) -> None:
        # Its workers notice the change.
        import_module("django_ox.stored").delete_schedule(row)

    def _next_run(self, row: Any, times: dict[str, Any]) -> datetime:
        ticks = self.model("OxScheduleTick").objects.using(row._state.db)
        last = ticks.filter(schedule_name=f"db:{row.pk}").order_by("-scheduled_for").first()
        moment = _start(row) - INSTANT
        if last:
            moment = max(moment, aware(last.scheduled_for))
        following = Recurrence(name=row.name, **times).time_after(moment)
        if following is None or _is_over(row.name, times):
            raise _ended(row)
        return following


def _call(row: Any) -> tuple[Any, dict[str, Any]]:
    """Return the task of a row as the other queue has it, and its arguments. Raises Unfit."""
    try:
        kind = import_module("django_ox.registry").get(row.task_key)
    except KeyError:
        raise Unfit(
            f"Its task_key {row.task_key!r} is not registered. Keep @schedulable or "
            "SCHEDULABLE_TASKS there until it is moved."
        ) from None
    if not isinstance(row.arguments, dict):
        raise Unfit(f"Its arguments are no mapping: {row.arguments!r}. Correct them there.")
    if kind.form is None:
        return kind.task, row.arguments
    form = kind.form(row.arguments)
    if not form.is_valid():
        errors = "; ".join(f"{name}: {' '.join(each)}" for name, each in form.errors.items())
        raise Unfit(f"Its arguments {row.arguments!r} are invalid: {errors} Correct them there.")
    return kind.task, form.cleaned_data


def _times(row: Any) -> dict[str, Any]:
    times = _cron(row) if row.trigger == "cron" else _interval(row)
    if row.end_time:
        times["ends_at"] = aware(row.end_time)
        if times["ends_at"] <= times["starts_at"]:
            raise _ended(row)
    return times


def _is_over(name: str, times: dict[str, Any]) -> bool:
    """Return True if the latest time by now is after the end: only that one would still run."""
    if not (end := times.get("ends_at")):
        return False
    later = Recurrence(name=name, **{**times, "ends_at": None}).time_after(end)
    return later is not None and later <= aware(timezone.now())


def _ended(row: Any) -> Unfit:
    return Unfit(f"It ends at {row.end_time}, before its next time. Delete it there.")


def _start(row: Any) -> datetime:
    """Return the time before which nothing runs: now, after a change that its workers missed."""
    is_current = import_module("django_ox.stored").boundary_digest(row) == row.boundary_for
    return aware(row.start_time if is_current else timezone.now())


def _cron(row: Any) -> dict[str, Any]:
    """Return the times of an expression. Raises Unfit for one that means something else here."""
    try:
        import_module("django_ox.cron").CronExpression(row.cron)
    except ValueError as error:
        raise Unfit(f"It has cron={row.cron!r}: {error} Correct it there.") from None
    check_days(f"cron={row.cron!r}", row.cron.split()[-5:])
    return {"cron": row.cron, "starts_at": _start(row)}


def _interval(row: Any) -> dict[str, Any]:
    """Return the times of an interval, which the other queue counts on the wall clock."""
    every, phase, start = row.every_seconds or 0, row.phase_seconds, _start(row)
    if not 0 <= phase < every:
        raise Unfit(f"It has every_seconds={every}, phase_seconds={phase}. Correct it there.")
    module = import_module("django_ox.schedules")
    if HOUR % every == 0 or not module.zone_repeats_an_hour():
        interval = timedelta(seconds=every)
        wall = timezone.make_naive(start) - EPOCH - timedelta(seconds=phase)
        return {"every": interval, "starts_at": start + -wall % interval}
    if every % HOUR == phase % 60 == 0 and (DAY % every == 0 or every == WEEK):
        return {"cron": _daily(every, phase), "starts_at": start}
    raise Unfit(
        f"It has every_seconds={every}, {timedelta(seconds=every)} on a clock that is put back "
        "once a year. Make it here with every, which counts elapsed time, or with cron."
    )


def _daily(every: int, phase: int) -> str:
    """Return the cron expression of an interval that divides a day, or of a week."""
    hours = ",".join(str(each // HOUR) for each in range(phase % min(every, DAY), DAY, every))
    weekday = (THURSDAY + phase // DAY) % 7 if every == WEEK else "*"
    return f"{phase // 60 % 60} {hours} * * {weekday}"
