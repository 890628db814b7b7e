"""Celery's options of a task and a call, and its schedules, as those of this queue."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from ...compat import task_backends
from ...limits import Rate
from ..usual_place import usual_place
from .subset import NEED_NOTHING, refuse

TIMES = ("expires", "soft_time_limit", "time_limit")
# Seconds of a unit of ``rate_limit``.
RATES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
HIGHEST_PRIORITY = 9
# The error with which retry() has ended the last attempt. Each attempt has a context of its own.
last_error: ContextVar[BaseException | None] = ContextVar("dbqueue_celery_error", default=None)


@dataclass(frozen=True)
class Backoff:
    """Celery's delays of automatic retries, in seconds.

    After n retries: ``factor * 2**n``, at most ``longest``; with jitter, a random whole number from
    0 to that. A factor of 0 means always ``delay``.
    """

    delay: float
    factor: int
    longest: int
    jitter: bool
    never_for: tuple[type[BaseException], ...]

    def __call__(self, error: BaseException, task_result: Any) -> float | None:
        if isinstance(error, self.never_for) or error is last_error.get():
            return None
        if not self.factor:
            return self.delay
        wait: int = min(self.longest, self.factor * 2 ** max(0, len(task_result.errors) - 1))
        return random.randrange(wait + 1) if self.jitter else wait


def settings_of(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return Celery's options of a call as those of ``Task.using()``.

    Raises TypeError for options that are not served.
    """
    given = {name: value for name, value in options.items() if value is not None}
    found: dict[str, Any] = {}
    countdown, eta = given.pop("countdown", None), given.pop("eta", None)
    if countdown is not None and eta is not None:
        refuse(where, "eta", eta, "Give either countdown or eta.")
    if (run_after := timedelta(seconds=countdown) if countdown else eta) is not None:
        found["run_after"] = run_after
    if (expires := given.pop("expires", None)) is not None:
        found["expires"] = _expires(expires, run_after)
    if (queue := given.pop("queue", None)) is not None:
        found["queue_name"] = queue
    if (priority := given.pop("priority", None)) is not None:
        found["priority"] = _priority(priority, where)
    timeout = _timeout(given.pop("soft_time_limit", None), given.pop("time_limit", None), where)
    if timeout is not None:
        found["timeout"] = timeout
    given.pop("retry_policy", None)  # An INSERT has no retries of its own.
    for name, value in given.items():
        if value not in NEED_NOTHING.get(name, ()):
            refuse(where, name, value)
    return found


def _expires(expires: Any, run_after: timedelta | datetime | None) -> timedelta | datetime:
    """Return the time by which a job must start. Celery counts from the call."""
    if isinstance(expires, datetime):
        return expires
    delay = timedelta(seconds=expires)
    if isinstance(run_after, datetime):
        return timezone.now() + delay
    return delay - (run_after or timedelta())


def _priority(priority: Any, where: str) -> int:
    """Return a priority for which a higher one runs first."""
    broker = getattr(settings, "DBQUEUE_CELERY_BROKER", None)
    if type(priority) is not int or not 0 <= priority <= HIGHEST_PRIORITY:
        refuse(where, "priority", priority, "Give a whole number from 0 to 9.")
    if broker not in ("rabbitmq", "redis"):
        remedy = (
            f"The setting DBQUEUE_CELERY_BROKER is {broker!r}: give 'rabbitmq' if 9 was the "
            "highest priority, or 'redis' if that was 0."
        )
        refuse(where, "priority", priority, remedy)
    return priority if broker == "rabbitmq" else -priority


def _timeout(soft: float | None, hard: float | None, where: str) -> float | None:
    if soft is None or hard is None:
        return hard if soft is None else soft
    grace = task_backends[usual_place()["backend"]].options.get("timeout_grace", 5.0)
    if hard > soft + grace:
        remedy = (
            f"Its process is ended {grace:g} s after soft_time_limit={soft!r}. Raise "
            f"OPTIONS['timeout_grace'] to {hard - soft:g}, or leave time_limit out."
        )
        refuse(where, "time_limit", hard, remedy)
    return soft


def rate_of(limit: Any, where: str) -> Rate | tuple[()]:
    """Return Celery's ``rate_limit`` as a Rate; an empty tuple for none. Raises TypeError."""
    if not limit:
        return ()
    number, _, unit = str(limit).partition("/")
    try:
        return Rate(1, per=RATES[unit] / float(number))
    except (KeyError, ValueError, ZeroDivisionError):
        refuse(where, "rate_limit", limit, "Give such as '100/m', with s, m or h.")


def crontab(
    minute: object = "*",
    hour: object = "*",
    day_of_week: object = "*",
    day_of_month: object = "*",
    month_of_year: object = "*",
) -> str:
    """Return Celery's schedule as a cron expression, for ``@recurring``.

    Each argument is a number, text such as ``*/15`` or ``mon-fri``, or a list of numbers. Raises
    TypeError for days of the week and of the month together: Celery runs on days that are both, a
    cron expression on days that are either.
    """
    both = str(day_of_week), str(day_of_month)
    if not any(each.startswith("*") for each in both):
        remedy = "Write a cron expression, such as 'mon#1' for the first Monday."
        refuse("crontab()", "day_of_week, day_of_month", both, remedy)
    fields = minute, hour, day_of_month, month_of_year, day_of_week
    return " ".join(map(_field, fields))


def _field(value: Any) -> str:
    if isinstance(value, str):
        # Celery reads only the first three letters of a name.
        return re.sub(r"([a-z]{3})[a-z]+", r"\1", value.replace(" ", ""), flags=re.IGNORECASE)
    numbers = sorted(value) if isinstance(value, Iterable) else [value]
    return ",".join(map(str, numbers))
