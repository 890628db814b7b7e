"""Processor time of running jobs, as other threads see it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress


class JobCpuTime:
    """Processor time that the thread of each running job has used since its last job ended.

    Between two jobs a thread sleeps, or uses some microseconds. Where the system has no clock of
    another thread, a running job counts as one that computes.
    """

    def __init__(self) -> None:
        # The clock of each thread. That of a thread that has ended is invalid, and does no harm.
        self._clocks: dict[int, int] = {}
        self._began: dict[int, float] = {}

    def enter(self) -> None:
        """Make the clock of this thread known."""
        thread = threading.get_ident()
        self._began[thread] = time.thread_time()
        if hasattr(time, "pthread_getcpuclockid"):
            self._clocks[thread] = time.pthread_getcpuclockid(thread)

    def end(self) -> float:
        """Return the time of this thread's job in seconds, as the job ends."""
        thread, now = threading.get_ident(), time.thread_time()
        used, self._began[thread] = now - self._began[thread], now
        return used

    def of(self, thread: int) -> float:
        """Return the time of another thread's job in seconds; infinite if it is not known."""
        with suppress(KeyError, OSError):
            return time.clock_gettime(self._clocks[thread]) - self._began[thread]
        return float("inf")
