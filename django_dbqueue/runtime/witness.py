"""Who may say that another process is silent: who has heard all others speak meanwhile."""

from __future__ import annotations

import time
from datetime import datetime


class Witness:
    """Has watched the database without a gap, by a clock that did not jump, or has not.

    After an outage, and after a step of the database's clock, all processes look silent until their next beat: whoever
    judged by that moment would take the jobs of all that live.
    """

    # By so many seconds the two clocks may differ between two looks.
    TOLERANCE = 1.0

    def __init__(self, long_enough: float) -> None:
        self._long_enough = long_enough
        self._since = self._looked_at = time.monotonic()
        self._seen: datetime | None = None

    def look(self, seen: datetime) -> None:
        """The database has told its time."""
        now = time.monotonic()
        passed = (seen - self._seen).total_seconds() if self._seen else 0.0
        if abs(passed - (now - self._looked_at)) > self.TOLERANCE:
            self._since = now
        self._seen, self._looked_at = seen, now

    def miss(self) -> None:
        """The database was not to be had."""
        self._since = time.monotonic()

    @property
    def may_judge(self) -> bool:
        return time.monotonic() - self._since > self._long_enough
