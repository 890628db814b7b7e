"""django-celery-beat: a table of periodic tasks, and one of times for each kind of schedule.

A running beat saves ``last_run_at`` up to five minutes after it has started a task, or when it
notices a change of the schedules. Saving inserts a row again that is deleted at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from ...contrib.celery.options import crontab, settings_of
from ...models.expressions import Now
from ...models.recurring_task import aware
from ...recurrence.rule import INSTANT, Recurrence
from .source import Schedule, Source, Unfit, Waiting

BUILT_IN = "celery.backend_cleanup"
KINDS = ("interval", "crontab", "solar", "clocked")
ONCE = Q(one_off=True) | Q(clocked__isnull=False)
JSON_NAMES: dict[type, str] = {list: "list", dict: "object"}
# Beat's interval between two polls for changes, unless beat_max_loop_interval is set.
POLL_SECONDS = 5
# Tolerance for tasks that beat starts late, and for different clocks.
LEEWAY = timedelta(seconds=2)


class DjangoCeleryBeat(Source):
    name, app = "django-celery-beat", "django_celery_beat"
    related = ("interval", "crontab", "solar", "clocked")
    # Runs before this time are saved in last_run_at; None in a dry run.
    _saved_until: datetime | None = None

    def prepare(self) -> None:
        self._saved_until = aware(timezone.now()) - LEEWAY
        self.model("PeriodicTasks").update_changed()
        time.sleep((_celery().conf.beat_max_loop_interval or POLL_SECONDS) + 1)

    def parts(self) -> list[Any]:
        # Beat disables a row that has run.
        return [self._rows().filter(ONCE, enabled=True, total_run_count=0)]

    def read(self, row: Any) -> Waiting:
        try:
            _, first = self._times(row)
            expires = row.expires or timedelta(seconds=row.expire_seconds or 0)
            return Waiting(
                run_after=first if settings.USE_TZ else timezone.make_naive(first),
                options={"expires": expires} if expires else {},
                **_call(row),
            )
        except Unfit as error:
            raise Unfit(f"{row.name}: {error}") from None

    def remove(self, rows: Sequence[Any]) -> None:
        found = self.model("PeriodicTask").objects.filter(pk__in=[row.pk for row in rows])
        found._raw_delete(rows[0]._state.db)
        self.model("PeriodicTasks").update_changed()

    def schedules(self) -> list[Any]:
        over = self.model("ClockedSchedule").objects.filter(clocked_time__lte=Now())
        return [self._rows().exclude(ONCE, enabled=True).exclude(clocked__in=over)]

    def is_built_in(self, row: Any) -> bool:
        return bool(row.task == BUILT_IN)

    def read_schedule(self, row: Any) -> Schedule:
        _check(row)
        times, first = self._times(row)
        # Beat makes up for any number of missed runs with one.
        times |= {"missed": "one", "next_run_at": first if row.enabled else None}
        return Schedule(name=row.name, is_enabled=row.enabled, when=times, **_call(row))

    def _rows(self) -> Any:
        return self.model("PeriodicTask").objects.exclude(expires__lte=Now())

    def _times(self, row: Any) -> tuple[dict[str, Any], datetime]:
        """Return the columns of a row's times, and its next run. Raises Unfit."""
        given = [kind for kind in KINDS if getattr(row, f"{kind}_id")]
        if len(given) != 1:
            raise Unfit(f"It has {' and '.join(given) or 'no schedule'}. Give it one schedule.")
        if row.solar_id:
            raise Unfit(
                f"{row.solar}: there are no solar times here. Write a task that runs each day, "
                "computes the time, and enqueues another with run_after."
            )
        times, first = _once(row) if row.clocked_id else _repeated(row)
        if first is None:
            raise Unfit(f"It expires at {row.expires}, before its next time. Delete it there.")
        is_due = self._saved_until and self._saved_until < first <= aware(timezone.now()) + LEEWAY
        if row.enabled and is_due:
            raise Unfit(f"It is due at {first}, which is about now. Repeat the command.")
        return times, first


def _celery() -> Any:
    return import_module("celery").current_app


def _check(row: Any) -> None:
    """Raise Unfit for a row that cannot be moved, whatever its times are."""
    if row.task == BUILT_IN:
        raise Unfit("It deletes Celery's results. The retention here deletes jobs.")
    if row.name in _celery().conf.beat_schedule:
        raise Unfit(
            "It is in beat_schedule, from which beat writes it again when it starts. Take it out "
            "there and repeat, or write it in code here."
        )
    if row.one_off or row.clocked_id:
        raise Unfit(
            "It is disabled, so that it may have run or not. Enable it there, or delete it."
        )
    if row.expire_seconds:
        raise Unfit(
            f"It has expire_seconds={row.expire_seconds}. Give its task "
            f"expires=timedelta(seconds={row.expire_seconds}), and empty it there."
        )


def _once(row: Any) -> tuple[dict[str, Any], datetime]:
    at = aware(row.clocked.clocked_time)
    return {}, max(at, aware(row.start_time)) if row.start_time else at


def _repeated(row: Any) -> tuple[dict[str, Any], datetime | None]:
    start = row.start_time and aware(row.start_time)
    # Without a run, it is due at start_time, or counts from its last change.
    last = aware(row.last_run_at or row.date_changed) if row.last_run_at or not start else None
    times: dict[str, Any] = {"starts_at": start}
    if row.interval_id:
        every = timedelta(**{row.interval.period: row.interval.every})
        times |= {"every": every, "starts_at": max(filter(None, (start, last and last + every)))}
    else:
        times |= _crontab(row.crontab)
    if row.expires:  # Beat does not run it at this very time.
        times["ends_at"] = aware(row.expires) - INSTANT
        if times["starts_at"] and times["ends_at"] <= times["starts_at"]:
            return times, None
    rule = Recurrence(name=row.name, **times)
    return times, rule.time_after(last or start - INSTANT)


def _crontab(given: Any) -> dict[str, str]:
    try:
        zone = given.schedule.tz
        days = given.day_of_week, given.day_of_month, given.month_of_year
        return {"cron": crontab(given.minute, given.hour, *days), "timezone": str(zone)}
    except Exception as error:
        raise Unfit(f"{given}: {str(error).rstrip('.')}. Correct it there.") from None


def _call(row: Any) -> dict[str, Any]:
    """Return the task of a row, its arguments, queue and priority. Raises Unfit."""
    for each in row._meta.related_objects:
        others = each.related_model._base_manager.using(row._state.db)
        if others.filter(**{each.field.name: row}).exists():
            raise Unfit(f"{each.field} refers to it, and might be deleted too. Change that first.")
    sent = {
        "exchange": row.exchange,
        "routing_key": row.routing_key,
        "headers": _json(row, "headers", dict),
    }
    if used := [f"{name}={value!r}" for name, value in sent.items() if value]:
        raise Unfit(f"It has {', '.join(used)}, which jobs here do not have. Empty it there.")
    try:
        priority = settings_of({"priority": row.priority}, row.name).get("priority")
    except TypeError as error:
        raise Unfit(str(error)) from None
    return {
        "task": row.task,
        "args": _json(row, "args", list),
        "kwargs": _json(row, "kwargs", dict),
        "queue": row.queue or None,
        "priority": priority,
    }


def _json(row: Any, name: str, kind: type) -> Any:
    text = getattr(row, name)
    try:
        value = import_module("kombu.utils.json").loads(text) if text else kind()
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise Unfit(
            f"It has {name}={text!r}, which is no JSON {JSON_NAMES[kind]}. Correct it there."
        )
    return value
