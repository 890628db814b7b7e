"""Delay before a worker's next poll. All times are in seconds."""

from __future__ import annotations

import time

from ...core.notify import QUIET


class PollBackoff:
    # Delay after a claim that found fewer jobs than there was room for. The threads start their
    # jobs first, which the GIL prevents during a claim, and jobs enqueued meanwhile are claimed
    # together. The time from enqueue to start fell from 2.5 ms to 1.9 ms.
    REST = 0.002
    FIRST = 0.01
    # For this time after the last job, the delay does not grow: without NOTIFY, jobs that arrive
    # one by one, 10 per second, start after 10 to 12 ms instead of 27 to 30 ms. This takes 4 % of a
    # core, and nothing once no more jobs arrive.
    LINGER = 0.1

    def __init__(self) -> None:
        self._pause, self._notified_at, self._found_at = 0.0, float("-inf"), float("-inf")

    def note_notify(self) -> None:
        """Record a NOTIFY: jobs may be ready.

        NOTIFY is throttled, so jobs enqueued right after it send none.
        """
        self._notified_at = time.monotonic()

    def after_jobs(self, full: bool) -> float:
        """Return the delay after a claim that found jobs.

        ``full``: the claim filled all the room.
        """
        self._pause, self._found_at = 0.0, time.monotonic()
        return 0.0 if full else self.REST

    def after_none(self, began: float, longest: float, listens: bool) -> float:
        """Return the delay after an empty claim that began at ``began``.

        The delay is short after work and grows by a factor of 1.5 up to ``longest``. If the worker
        ``listens`` for NOTIFY, it polls once when the NOTIFY throttle has expired, and then every
        ``longest`` seconds.
        """
        lingers = began - self._found_at < self.LINGER
        pause = (
            longest
            if listens
            else min(longest, self.FIRST if lingers else self._pause * 1.5 or self.FIRST)
        )
        since = began - self._notified_at
        self._pause = min(pause, QUIET * 1.3 - since) if since < QUIET else pause
        return self._pause
