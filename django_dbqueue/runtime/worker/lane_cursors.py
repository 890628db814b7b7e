"""Claim cursors of a worker, one per lane.

A claim continues at the cursor, and so does not step over the rows of all jobs claimed before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from django.db import connections

from ...models import ClaimedJob
from ...models.enums import Lane, Place

# The pause after a slow scan is REST times its duration, and at most LONGEST_REST seconds, as the
# network may have been the cause.
REST, LONGEST_REST = 20.0, 5.0


class LaneCursors:
    """The cursor of each lane, and the schedule of full scans.

    A cursor is a hint: late commits and released jobs sort before it. Lanes are therefore scanned
    from their start every second, and whenever a claim finds fewer jobs than wanted. But an old
    transaction keeps the dead rows of all claimed jobs, and a full scan steps over them: while full
    scans are slow, they run less often. Meanwhile, newer jobs are found in the lanes that have
    cursors.
    """

    # A full scan that takes longer than LONG seconds is followed by a pause.
    LONG = 0.03

    def __init__(self, database: str) -> None:
        # SQLite has no dead rows.
        self._is_of_use = connections[database].vendor != "sqlite"
        self._places: dict[Lane, Place] = {}
        self._rests_until = float("-inf")
        # True if the last full scan was slow.
        self.slow = False

    def of(self, lane: Lane) -> Place | None:
        return self._places.get(lane)

    @property
    def rested(self) -> bool:
        return time.monotonic() >= self._rests_until

    def scan(self, lanes: Callable[[], Iterable[Lane]]) -> set[Lane]:
        """Find the lanes that have jobs with a full scan, which also finds jobs before the cursors.

        Return these lanes. While full scans are slow, lanes that have cursors are included.
        """
        began = time.monotonic()
        found = set(lanes())
        took = time.monotonic() - began
        self.slow = self._is_of_use and took > self.LONG
        self._rests_until = rests_until(began) if self.slow else float("-inf")
        self._places = {
            lane: place for lane, place in self._places.items() if self.slow and lane not in found
        }
        return found | self._places.keys()

    def move(self, lane: Lane, jobs: Sequence[ClaimedJob], full: bool) -> None:
        """Advance the cursor of a lane behind its claimed jobs.

        ``full``: the lane may have more jobs.
        """
        if jobs and self._is_of_use and (full or self.slow):
            self._places[lane] = max((job.run_after, job.id) for job in jobs)
        elif not self.slow:
            self._places.pop(lane, None)


def rests_until(began: float, at_least: float = 0.0) -> float:
    """Return when the pause ends after a scan that began at ``began`` and ends now."""
    now = time.monotonic()
    return now + max(at_least, min((now - began) * REST, LONGEST_REST))
