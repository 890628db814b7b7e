"""Schedules: cron expressions and intervals. The only module that uses croniter.

croniter parses expressions and finds their times on a calendar; it gets no time zones. This module
maps a wall-clock time to its moment, or to two or none, as Debian's cron does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from itertools import islice, pairwise
from zoneinfo import ZoneInfo, available_timezones

from croniter import CroniterError, croniter

from ..exceptions import InvalidSchedule
from .cron_syntax import ALLOWED, FIELDS, checked, follows_elapsed_time

UTC = timezone.utc
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
LONGEST = timedelta(days=3650)
# An expression without a match within this many years is invalid.
YEARS = 5
# Number of a schedule's times that determine its shortest gap.
SAMPLE = 20


@dataclass(frozen=True)
class Cron:
    """The times of a cron expression on the wall clock of a time zone.

    An expression has five fields (minute, hour, day of month, month, day of week), or six with the
    seconds first. ``H`` stands for a value that is derived from ``name``. Raises InvalidSchedule
    for an expression that has no time, or more than one meaning.
    """

    expression: str
    timezone: str = "UTC"
    name: str = ""

    def __post_init__(self) -> None:
        _zone(self.timezone)
        expression = checked(self.expression)
        try:
            first = next(_walls(expression, self.name, datetime(2024, 1, 1)), None)
        except CroniterError as error:
            raise InvalidSchedule(
                f"{self.expression!r} is not a cron expression: "
                f"{_invalid_field(expression) or error}"
            ) from None
        if first is None:
            raise InvalidSchedule(
                f"{self.expression!r} never matches: there is no such date. "
                "Change its day or its month."
            )

    def next_after(self, moment: datetime) -> datetime | None:
        """Return the first time after a moment, both in UTC; None if none within five years.

        A fixed time of day occurs once a day: where clocks are put forward over it, at the change;
        where they are put back, at the first of the two. An expression that steps (its seconds,
        minutes or hours begin with ``*``) follows elapsed time: it has no times in the hour that is
        skipped, and has times in both copies of the hour that is repeated.
        """
        if follows_elapsed_time(checked(self.expression)):
            return self._next_by_elapsed_time(moment.astimezone(UTC))
        return self._next_by_day(moment.astimezone(UTC))

    def next_times(self, number: int, after: datetime) -> list[datetime]:
        return list(islice(_each(self, after), number))

    def _next_by_day(self, moment: datetime) -> datetime | None:
        zone = _zone(self.timezone)
        for wall in self._walls_after(moment.astimezone(zone).replace(tzinfo=None, fold=0)):
            first, second = (
                wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1)
            )
            # In a gap of the clock, the offset from before the change (fold 0) gives a later moment
            # than the offset from after it.
            at = _change(zone, second, first) if second < first else first
            if at and at > moment:
                return at
        return None

    def _next_by_elapsed_time(self, moment: datetime) -> datetime | None:
        zone = _zone(self.timezone)
        local = moment.astimezone(zone)
        start, offset = local.replace(tzinfo=None, fold=0), local.utcoffset()
        while wall := next(self._walls_after(start), None):
            at = (wall - (offset or timedelta())).replace(tzinfo=UTC)
            change = _change(zone, moment, at)
            if change is None:
                return at
            # The offset changes before that time: search again from the change, by the new offset.
            moment, local = change, change.astimezone(zone)
            start, offset = local.replace(tzinfo=None, fold=0) - SECOND, local.utcoffset()
        return None

    def _walls_after(self, start: datetime) -> Iterator[datetime]:
        return _walls(checked(self.expression), self.name, start)

    def __str__(self) -> str:
        return f"{self.expression} ({self.timezone})"


@dataclass(frozen=True)
class Every:
    """Interval, counted from the planned time, so that it does not drift.

    With ``drift``, it counts from the end of the last run. Raises InvalidSchedule for an interval
    of less than a second or of more than ten years.
    """

    interval: timedelta
    drift: bool = False
    anchor: datetime = EPOCH

    def __post_init__(self) -> None:
        if not isinstance(self.interval, timedelta):
            raise InvalidSchedule(
                f"every must be a timedelta, such as timedelta(minutes=5), not {self.interval!r}."
            )
        if not SECOND <= self.interval <= LONGEST:
            raise InvalidSchedule(
                f"every must be from one second to {LONGEST.days:,} days, not {self.interval}."
            )

    def next_after(self, moment: datetime) -> datetime | None:
        """Return the first time after a moment, in UTC.

        It is a whole number of intervals away from the anchor.
        """
        steps = max(0, (moment - self.anchor) // self.interval + 1)
        return (self.anchor + steps * self.interval).astimezone(UTC)

    def next_times(self, number: int, after: datetime) -> list[datetime]:
        return list(islice(_each(self, after), number))

    def __str__(self) -> str:
        return f"every {self.interval}"


Schedule = Cron | Every


def last_times(schedule: Schedule, after: datetime, until: datetime, number: int) -> list[datetime]:
    """Return the last times after a moment and up to another, oldest first.

    However long that span is, few times are computed.
    """
    span = timedelta(minutes=1)
    while True:
        start = max(after, until - span)
        found = []
        for time in _each(schedule, start):
            if time > until:
                break
            found.append(time)
        if len(found) >= number or start == after:
            return found[-number:]
        span *= 4


def shortest_gap(schedule: Schedule) -> timedelta | None:
    """Return the shortest gap between its next times; None if there is only one time."""
    if isinstance(schedule, Every):
        return schedule.interval
    times = schedule.next_times(SAMPLE, EPOCH)
    return min((late - early for early, late in pairwise(times)), default=None)


def _each(schedule: Schedule, after: datetime) -> Iterator[datetime]:
    moment: datetime | None = after
    while moment and (moment := schedule.next_after(moment)):
        yield moment


def _invalid_field(expression: str) -> str:
    """Return which field of an expression is invalid, and what it may hold; "" if none is alone."""
    given = expression.split()
    for place, field in enumerate(given, start=len(FIELDS) - len(given)):
        alone = ["*"] * len(FIELDS)
        alone[place] = field
        try:
            next(_walls(" ".join(alone), "", datetime(2024, 1, 1)), None)
        except CroniterError:
            return f"{field!r} as {FIELDS[place]}. Give {ALLOWED[place]}."
    return ""


def _walls(expression: str, name: str, start: datetime) -> Iterator[datetime]:
    """Yield the times of an expression after ``start``, on a calendar without time zones."""
    times: Iterator[datetime] = croniter(
        expression,
        start,
        ret_type=datetime,
        second_at_beginning=True,
        implement_cron_bug=True,
        hash_id=name,
        max_years_between_matches=YEARS,
    ).all_next()
    return times


def _change(zone: ZoneInfo, start: datetime, end: datetime) -> datetime | None:
    """Return the first change of the zone's offset after ``start`` and up to ``end``.

    None means that the offset does not change.
    """
    offset = start.astimezone(zone).utcoffset()
    while start < end:
        there = min(start + DAY, end)
        if there.astimezone(zone).utcoffset() != offset:
            low, high = int(start.timestamp()), -int(-there.timestamp() // 1)
            while high - low > 1:
                middle = (low + high) // 2
                same = datetime.fromtimestamp(middle, zone).utcoffset() == offset
                low, high = (middle, high) if same else (low, middle)
            return datetime.fromtimestamp(high, UTC)
        start = there
    return None


@lru_cache(maxsize=256)
def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, TypeError, OSError):
        pass
    near = difflib.get_close_matches(str(name), sorted(available_timezones()), n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else "Give a name such as 'Europe/Berlin'."
    raise InvalidSchedule(f"{name!r} is not a time zone. {hint}")
