"""Recurrence rules, validated as a whole, and the times that follow from them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any, NamedTuple

from django.conf import settings

from ..core.time_values import seconds_of
from ..exceptions import InvalidSchedule
from .cron import EPOCH, LONGEST, Cron, Every, Schedule, last_times, shortest_gap

MISSED = ("skip", "one", "all")
MOST_MISSED = 1000
LONGEST_NAME = 255
LONGEST_CRON = 100
# A time that is no later than this is not missed, even if the next time has come too.
LATE = timedelta(minutes=1)
INSTANT = timedelta(microseconds=1)


class Plan(NamedTuple):
    """The times for which jobs run now, and the next time."""

    times: list[datetime]
    following: datetime | None


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Rule of a recurring task. Raises InvalidSchedule, with the value, for an invalid rule.

    name: the text from which ``H`` in a cron expression is derived.
    cron, timezone: an expression, on the wall clock of a time zone (default: ``TIME_ZONE``).
    every, drift: an interval from one planned time to the next, or from the end of a run to the
        next.
    missed, most_missed: the treatment of times at which no dispatcher ran, and the largest number
        of them that runs make up for.
    jitter: each run waits for a random part of it.
    starts_at, ends_at: the rule has no times before, or after.
    """

    name: str
    cron: str = ""
    timezone: str = ""
    every: timedelta | None = None
    drift: bool = False
    missed: str = "skip"
    most_missed: int = 10
    jitter: timedelta = timedelta()
    starts_at: datetime | None = None
    ends_at: datetime | None = None

    def __post_init__(self) -> None:
        # In this order: each check relies on the one before.
        for check in (self._check_what_is_given, self._check_span, self._check_runs):
            try:
                check()
            except InvalidSchedule as error:
                raise InvalidSchedule(f"{self.name!r}: {error}") from None

    @classmethod
    def from_settings(cls, name: str, given: Mapping[str, Any]) -> Recurrence:
        """Return the rule of an entry of ``OPTIONS["recurring"]``; numbers are seconds."""
        check_name(name)
        when = {each.name: given[each.name] for each in fields(cls) if each.name in given}
        try:
            for key in {"every", "jitter"} & when.keys():
                when[key] = timedelta(seconds=seconds_of(when[key], key))
        except (TypeError, ValueError) as error:
            raise InvalidSchedule(f"{name!r}: {error}") from None
        return cls(**{**when, "name": name})

    @cached_property
    def schedule(self) -> Schedule:
        if self.every is None:
            return Cron(self.cron, self.timezone or settings.TIME_ZONE, self.name)
        return Every(self.every, self.drift, self.starts_at or EPOCH)

    def time_after(self, moment: datetime, planned: datetime | None = None) -> datetime | None:
        """Return the first of its times after a moment; None if there is none before its end.

        An interval continues from the ``planned`` time, if there is one.
        """
        if self.starts_at and self.starts_at > moment:
            moment = self.starts_at - INSTANT
        return self._before_the_end(self._from(planned).next_after(moment))

    def time_from(self, end: datetime) -> datetime | None:
        """Return the next time of a rule that drifts, from the end of its last run."""
        return self._before_the_end(end + (self.every or timedelta()))

    def latest_time(self, now: datetime, planned: datetime | None) -> datetime | None:
        """Return the latest possible next time; None if there is none before its end."""
        following = self.time_after(now, planned)
        return (
            max(following, now + self.every)
            if following and self.drift and self.every
            else following
        )

    def next_times(
        self,
        number: int,
        after: datetime,
        planned: datetime | None = None,
        until: datetime | None = None,
    ) -> list[datetime]:
        """Return the next of its times, without jitter, and none after ``until``.

        A rule that drifts has the times that it would have if its runs took no time.
        """
        found: list[datetime] = []
        following = planned if planned and planned > after else self.time_after(after, planned)
        while following and len(found) < number and not (until and following > until):
            found.append(following)
            following = self.time_after(following, planned)
        return found

    def plan(self, planned: datetime, now: datetime) -> Plan:
        """Return the plan for a due time."""
        if self.drift:
            return Plan([planned], None)
        schedule, following = self._from(planned), self.time_after(now, planned)
        second = self._before_the_end(schedule.next_after(planned))
        if self.missed == "skip" and second and second <= now and now - planned > LATE:
            return Plan([], following)
        number = self.most_missed if self.missed == "all" else 1
        until = min(now, self.ends_at) if self.ends_at else now
        return Plan(last_times(schedule, planned - INSTANT, until, number), following)

    def any_jitter(self) -> timedelta:
        return self.jitter * random.random()

    def _before_the_end(self, time: datetime | None) -> datetime | None:
        return None if time is None or (self.ends_at and time > self.ends_at) else time

    def _from(self, planned: datetime | None) -> Schedule:
        if isinstance(self.schedule, Every) and planned:
            return replace(self.schedule, anchor=EPOCH + (planned - EPOCH) % self.schedule.interval)
        return self.schedule

    def _check_what_is_given(self) -> None:
        if self.cron and self.every is not None:
            raise InvalidSchedule(
                f"both cron={self.cron!r} and every={self.every!s} are given. Leave one out."
            )
        if not self.cron and self.every is None:
            raise InvalidSchedule(
                "neither a cron expression nor every is given. Give one, such as '0 9 * * mon-fri'."
            )
        if isinstance(self.cron, str) and len(self.cron) > LONGEST_CRON:
            raise InvalidSchedule(
                f"cron={self.cron!r} has {len(self.cron)} characters, more than {LONGEST_CRON}. "
                "Shorten it by ranges and steps, or declare two schedules, each with a name."
            )
        if self.cron and self.drift:
            raise InvalidSchedule(
                "drift counts from the end of a run; a cron expression does not. "
                "Use every=timedelta(...)."
            )
        if self.timezone and self.every is not None:
            raise InvalidSchedule(
                f"timezone={self.timezone!r} has no effect on every. Leave it out."
            )

    def _check_span(self) -> None:
        for name in ("starts_at", "ends_at"):
            time: object = getattr(self, name)
            if time is not None and (not isinstance(time, datetime) or time.utcoffset() is None):
                raise InvalidSchedule(f"{name} must be an aware datetime, not {time!r}.")
            if time is not None and not _is_in_calendar(time):
                raise InvalidSchedule(
                    f"{name} must be within the years 1 to 9999 in UTC, not {time}. Leave it out."
                )
        if self.starts_at and self.ends_at and self.ends_at <= self.starts_at:
            raise InvalidSchedule(
                f"ends_at={self.ends_at} is not after starts_at={self.starts_at}. Change one."
            )

    def _check_runs(self) -> None:
        if self.missed not in MISSED:
            raise InvalidSchedule(f"missed={self.missed!r} is not one of {', '.join(MISSED)}.")
        if type(self.most_missed) is not int or not 1 <= self.most_missed <= MOST_MISSED:
            raise InvalidSchedule(
                f"most_missed={self.most_missed!r} is not a whole number from 1 to {MOST_MISSED}."
            )
        if not isinstance(self.jitter, timedelta) or not timedelta() <= self.jitter <= LONGEST:
            raise InvalidSchedule(
                f"jitter must be a timedelta from zero to {LONGEST.days:,} days, "
                f"not {self.jitter!r}."
            )
        schedule = self.schedule
        if self.jitter and (gap := shortest_gap(schedule)) and self.jitter >= gap:
            raise InvalidSchedule(
                f"jitter={self.jitter!s} is not shorter than {gap!s}, the shortest time between "
                "two runs. Lower it."
            )


def check_name(name: object) -> None:
    """Raise InvalidSchedule for a value that cannot be the name of a recurring task."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or "\x00" in name:
        raise InvalidSchedule(
            f"{name!r} is not a name of up to {LONGEST_NAME} characters without NUL. Give another."
        )


def _is_in_calendar(time: datetime) -> bool:
    try:
        time.astimezone(timezone.utc)
    except OverflowError:
        return False
    return True
