"""How soon a worker looks for jobs again. All times are in seconds."""

from __future__ import annotations

import time

from ...core.notify import QUIET


class PollBackoff:
    # Where there was room for more than it found, the threads begin first, which they cannot while Python claims; and what
    # is enqueued meanwhile is claimed together. From the call to the start, 2.5 ms became 1.9.
    REST = 0.002
    FIRST = 0.01
    # For so long after the last job, the pauses do not grow: where jobs come one by one, 10 a second, and nobody tells of
    # them, they start after 10 to 12 ms instead of 27 to 30. That takes 4 % of a core, and nothing once no more jobs come.
    LINGER = 0.1

    def __init__(self) -> None:
        self._pause, self._told_at, self._found_at = 0.0, float("-inf"), float("-inf")

    def tell(self) -> None:
        """There may be jobs, and of those that follow in a moment it is not told."""
        self._told_at = time.monotonic()

    def after_jobs(self, full: bool) -> float:
        """``full``: they were as many as there was room for."""
        self._pause, self._found_at = 0.0, time.monotonic()
        return 0.0 if full else self.REST

    def after_none(self, began: float, longest: float, would_be_told: bool) -> float:
        """It looks often after work, then less and less, up to ``longest``; if it would be told of more, once when it would be
        again, and then seldom. ``began`` is when it looked.
        """
        lingers = began - self._found_at < self.LINGER
        pause = longest if would_be_told else min(longest, self.FIRST if lingers else self._pause * 1.5 or self.FIRST)
        since = began - self._told_at
        self._pause = min(pause, QUIET * 1.3 - since) if since < QUIET else pause
        return self._pause
