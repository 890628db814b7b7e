"""Failure detector: decides when this dispatcher may declare other processes dead."""

from __future__ import annotations

import time
from datetime import datetime


class FailureDetector:
    """Failure detector that trusts itself after ``long_enough`` seconds of observing the database.

    A gap in the observation, or a jump of the database's clock, of more than ``gap`` seconds starts
    this time again. After an outage, or a step of the clock, all processes look silent until their
    next heartbeat. A decision at that moment would take the jobs of all live processes.
    """

    def __init__(self, long_enough: float, gap: float) -> None:
        self._long_enough, self._gap = long_enough, gap
        self._since = self._observed_at = time.monotonic()
        self._seen: datetime | None = None

    def observe(self, seen: datetime) -> bool:
        """Record the database's time. Returns whether its clock was set back meanwhile."""
        now = time.monotonic()
        here = now - self._observed_at
        there = (seen - self._seen).total_seconds() if self._seen else here
        if here > self._gap or abs(there - here) > self._gap:
            self._since = now
        self._seen, self._observed_at = seen, now
        return there - here < -self._gap

    @property
    def can_declare_dead(self) -> bool:
        return time.monotonic() - self._since > self._long_enough
