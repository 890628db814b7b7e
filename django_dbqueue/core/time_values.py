"""Times and delays, for ``expires``, ``context.snooze()`` and ``context.retry()``."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from django.conf import settings
from django.utils import timezone

from ..compat import InvalidTask

# After a longer wait, a time may be later than the latest datetime.
LONGEST_WAIT = timedelta(days=36_500)
# Databases store times after this year only.
FIRST_YEAR = 1000


def check_expires(expires: object, run_after: object) -> None:
    """Raise InvalidTask, with the value, for an ``expires`` by which no job could start."""
    if expires is None:
        return
    if isinstance(expires, timedelta):
        if not timedelta() < expires <= LONGEST_WAIT:
            raise InvalidTask(
                f"expires must be above 0 and within {LONGEST_WAIT.days:,} days, not {expires!r}."
            )
    elif not isinstance(expires, datetime):
        raise InvalidTask(
            f"expires must be a timedelta such as timedelta(minutes=10), or {_a_datetime()}, "
            f"not {expires!r}."
        )
    elif timezone.is_aware(expires) != settings.USE_TZ:
        raise InvalidTask(
            f"expires must be {_a_datetime()}, not {expires!r}. Take it from django.utils.timezone."
        )
    elif problem := problem_of(expires):
        raise InvalidTask(f"expires: {problem}")
    else:
        _check_order(expires, run_after)


def _check_order(expires: datetime, run_after: object) -> None:
    # This host's clock is enough, as the result is not stored: the check only avoids a job that
    # would wait in vain.
    first = timezone.now() + run_after if isinstance(run_after, timedelta) else run_after
    if (
        isinstance(first, datetime)
        and timezone.is_aware(first) == settings.USE_TZ
        and expires <= first
    ):
        raise InvalidTask(
            f"expires must be later than run_after: {expires} is not later than {first}."
        )


def _a_datetime() -> str:
    return "an aware datetime" if settings.USE_TZ else "a naive datetime, as USE_TZ is False"


def seconds_of(delay: object, name: str) -> float:
    """Return a delay in seconds.

    Raises TypeError or ValueError, with the value, for an invalid delay.
    """
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name}: {delay!r} is not a delay. Give seconds, or a timedelta.")
    if not math.isfinite(seconds) or not 0 <= seconds <= LONGEST_WAIT.total_seconds():
        raise ValueError(
            f"{name}: {delay!r} is not a delay from 0 to {LONGEST_WAIT.days:,} days. Change it."
        )
    return float(seconds)


def problem_of(at: datetime) -> str:
    """Return why a job cannot start or expire at this time; "" if it can."""
    if at.year <= FIRST_YEAR:
        return f"{at} is not later than the year {FIRST_YEAR}. Give a later time."
    if at - datetime.now(at.tzinfo) > LONGEST_WAIT:
        return f"{at} is not within {LONGEST_WAIT.days:,} days from now. Give an earlier time."
    return ""


def seconds_or_time(delay: object, name: str) -> float | datetime:
    """Return a delay in seconds, or the time at which it ends. Raises as ``seconds_of()``."""
    if not isinstance(delay, datetime):
        return seconds_of(delay, name)
    if timezone.is_aware(delay) != settings.USE_TZ:
        raise ValueError(
            f"{name}: {delay!r} is not {_a_datetime()}. Take it from django.utils.timezone."
        )
    if problem := problem_of(delay):
        raise ValueError(f"{name}: {problem}")
    return delay
