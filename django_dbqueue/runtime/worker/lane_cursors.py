"""Where the claims of a worker go on in each lane, so that they do not step over the rows of all that was claimed before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from django.db import connections

from ...models import Job
from ...models.states import Lane, Place


class LaneCursors:
    """A mark is a hint: jobs come to stand before it that are committed late, or given back. So lanes are looked at from the
    start each second, and whenever there are fewer jobs than wanted. But an old transaction keeps the rows of all claimed jobs,
    dead as they are, and such a look steps over them: while it takes long, it is made less often. What came since is found
    meanwhile, in the lanes that have marks.
    """

    # What takes longer, in seconds, rests so many times as long; but no longer than that, as it may have been the network.
    LONG, REST, LONGEST_REST = 0.03, 20.0, 5.0

    def __init__(self, database: str) -> None:
        # SQLite keeps no dead rows.
        self._is_of_use = connections[database].vendor != "sqlite"
        self._places: dict[Lane, Place] = {}
        self._rests_until = float("-inf")
        # Whether the last look from the start took long.
        self.slow = False

    def of(self, lane: Lane) -> Place | None:
        return self._places.get(lane)

    @property
    def rested(self) -> bool:
        return time.monotonic() >= self._rests_until

    def look(self, lanes: Callable[[], Iterable[Lane]]) -> set[Lane]:
        """Look from the start for lanes that have jobs: what stands before their marks is found then, too.

        Returns them; while that takes long, with those that are known by their marks.
        """
        began = time.monotonic()
        found = set(lanes())
        took = time.monotonic() - began
        self.slow = self._is_of_use and took > self.LONG
        self._rests_until = began + took + min(took * self.REST, self.LONGEST_REST) if self.slow else float("-inf")
        self._places = {lane: place for lane, place in self._places.items() if self.slow and lane not in found}
        return found | self._places.keys()

    def move(self, lane: Lane, jobs: Sequence[Job], full: bool) -> None:
        """These jobs of a lane were claimed; ``full`` if there may be more."""
        if jobs and self._is_of_use and (full or self.slow):
            self._places[lane] = max((job.run_after, job.id) for job in jobs)
        elif not self.slow:
            self._places.pop(lane, None)
