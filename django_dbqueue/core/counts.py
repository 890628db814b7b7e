"""Counts of jobs and attempts, and histograms of their times. Both can be added up."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

# The upper bounds of the buckets, in seconds: 1 ms to 28 hours, six for each power of ten. A last
# bucket has the longer times.
BOUNDS = (
    *(step * 10.0**power for power in range(-3, 5) for step in (1, 1.5, 2, 3, 5, 7)),
    100_000.0,
)
_place = partial(bisect_left, BOUNDS)
# The largest number in a stored document that is added to others.
_MOST = 1e12
# An id of a failure, in a stored document.
_ID = re.compile(r"[1-9]\d{0,17}", re.ASCII)
_PLACES = {str(place): place for place in range(len(BOUNDS) + 1)}


@dataclass(slots=True)
class Times:
    """A number of measured times: their sum, the longest, and how many are in each bucket.

    Times are in seconds. A bucket is the place of its upper bound in BOUNDS.
    """

    sum: float = 0.0
    longest: float = 0.0
    buckets: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, times: Iterable[float]) -> Times:
        """Measure these times. A negative time, from two clocks that differ, counts as 0."""
        seconds = [time if time > 0.0 else 0.0 for time in times]
        return cls(sum(seconds), max(seconds), Counter(map(_place, seconds)))

    @classmethod
    def from_json(cls, total: float, longest: float, stored: object) -> Times:
        """Return stored times. Buckets that this version does not know are left out."""
        if not isinstance(stored, dict):
            return cls(total, longest)
        known = {_PLACES[at]: int(_addable(n)) for at, n in stored.items() if at in _PLACES}
        return cls(total, longest, Counter(known))

    def as_json(self) -> dict[str, int]:
        """Return the buckets as a JSON object."""
        return {str(place): number for place, number in sorted(self.buckets.items())}

    def merge(self, other: Times) -> None:
        """Add all times of another histogram."""
        self.sum += other.sum
        self.longest = max(self.longest, other.longest)
        self.buckets.update(other.buckets)

    @property
    def number(self) -> int:
        """The number of times."""
        return self.buckets.total()

    @property
    def mean(self) -> float | None:
        """The mean, in seconds; None without a time."""
        return self.sum / self.number if self.number else None

    def percentile(self, percent: float) -> float | None:
        """Return the time that ``percent`` of the times do not exceed, in seconds; None if empty.

        It is exact to the bounds of one bucket, and interpolated between them. Raises ValueError
        for a percentage outside 0 to 100.
        """
        if type(percent) not in (int, float) or not 0 <= percent <= 100:
            raise ValueError(f"percentile must be a number from 0 to 100, not {percent!r}.")
        left = self.number * percent / 100
        for place, number in sorted(self.buckets.items()):
            if left <= number:
                lower = BOUNDS[place - 1] if place else 0.0
                upper = min(self.longest, BOUNDS[place]) if place < len(BOUNDS) else self.longest
                return min(self.longest, lower + (upper - lower) * max(0.0, left) / number)
            left -= number
        return self.longest if self.number else None


# The names of counts: numbers, and measured times.
NUMBERS, TIMES = ("enqueued", "runs", "failures", "retries"), ("run_time", "wait_time")


@dataclass(slots=True)
class Counts:
    """Counts of jobs and of attempts.

    enqueued: jobs that were enqueued, and further runs of jobs with a key.
    runs: attempts that ended.
    failures: attempts that failed, timed out or were lost.
    retries: attempts that followed a failure.
    run_time: the times from an attempt's start to its end.
    wait_time: the times from when an attempt was due to its start.
    """

    enqueued: int = 0
    runs: int = 0
    failures: int = 0
    retries: int = 0
    run_time: Times = field(default_factory=Times)
    wait_time: Times = field(default_factory=Times)

    def as_json(self) -> dict[str, object]:
        """Return the numbers that are not 0, and times as lists of sum, longest and histogram."""
        found: dict[str, object] = {}
        for name in NUMBERS:
            if number := getattr(self, name):
                found[name] = number
        for name in TIMES:
            times: Times = getattr(self, name)
            if times.buckets:
                found[name] = [times.sum, times.longest, times.as_json()]
        return found

    @classmethod
    def from_json(cls, stored: object) -> Counts:
        """Return stored counts. What cannot be added to others counts as 0."""
        document = stored if isinstance(stored, dict) else {}
        found = cls()
        for name in NUMBERS:
            setattr(found, name, int(_addable(document.get(name))))
        for name in TIMES:
            match document.get(name):
                case [total, longest, buckets]:
                    times = Times.from_json(_addable(total), _addable(longest), buckets)
                    setattr(found, name, times)
        return found

    def merge(self, other: Counts) -> None:
        """Add other counts to these."""
        self.enqueued += other.enqueued
        self.runs += other.runs
        self.failures += other.failures
        self.retries += other.retries
        self.run_time.merge(other.run_time)
        self.wait_time.merge(other.wait_time)


def by_failure(stored: object) -> dict[int, int]:
    """Return a document's numbers of failed attempts by the id of their failure."""
    found = stored.get("by_failure") if isinstance(stored, dict) else None
    if not isinstance(found, dict):
        return {}
    numbers = {int(key): int(_addable(n)) for key, n in found.items() if _ID.fullmatch(key)}
    return {failure: number for failure, number in numbers.items() if number}


def _addable(value: object) -> float:
    """Return a number that can be added to others; 0 for anything else."""
    # NaN and infinity are in no range.
    return value if isinstance(value, (int, float)) and 0 <= value <= _MOST else 0
