"""Who may say that another process is silent: who has heard all others speak meanwhile."""

from __future__ import annotations

import time
from datetime import datetime


class FailureDetector:
    """Has watched the database for ``long_enough`` seconds without a ``gap`` of so many, by a clock that did not jump.

    After an outage, and after a step of the database's clock, all processes look silent until their next beat: whoever
    judged by that moment would take the jobs of all that live.
    """

    def __init__(self, long_enough: float, gap: float) -> None:
        self._long_enough, self._gap = long_enough, gap
        self._since = self._looked_at = time.monotonic()
        self._seen: datetime | None = None

    def look(self, seen: datetime) -> bool:
        """The database has told its time. Returns whether its clock was set back since the last time."""
        now = time.monotonic()
        here = now - self._looked_at
        there = (seen - self._seen).total_seconds() if self._seen else here
        if here > self._gap or abs(there - here) > self._gap:
            self._since = now
        self._seen, self._looked_at = seen, now
        return there - here < -self._gap

    @property
    def can_declare_dead(self) -> bool:
        return time.monotonic() - self._since > self._long_enough
