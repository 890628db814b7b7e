"""Processor time of running jobs, as other threads see it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress


class JobCpuTime:
    """Processor time that the thread of each running job has used for it, and FRESH more at most.

    Between two jobs a thread sleeps, or uses some microseconds. Where the system has no clock of
    another thread, a running job counts as one that computes.
    """

    # Seconds between two readings of a thread's clock. A reading is a call of the system, which
    # takes 18 µs on some: a tenth of what a job that does nothing takes.
    FRESH = 0.002

    def __init__(self) -> None:
        # The clock of each thread. That of a thread that has ended is invalid, and does no harm.
        self._clocks: dict[int, int] = {}
        # For each thread, the time of the last reading at the end of a job, and what it was.
        self._read: dict[int, tuple[float, float]] = {}

    def enter(self) -> None:
        """Make the clock of this thread known."""
        thread = threading.get_ident()
        self._read[thread] = time.monotonic(), time.thread_time()
        if hasattr(time, "pthread_getcpuclockid"):
            self._clocks[thread] = time.pthread_getcpuclockid(thread)

    def end(self, run_time: float) -> float:
        """Return the time of this thread's job, which ends after ``run_time``. All in seconds."""
        thread, now = threading.get_ident(), time.monotonic()
        read_at, before = self._read[thread]
        if now - read_at < self.FRESH:
            return run_time
        used = time.thread_time()
        self._read[thread] = now, used
        return min(run_time, used - before)

    def of(self, thread: int) -> float:
        """Return the time of another thread's job in seconds; infinite if it is not known."""
        with suppress(KeyError, OSError):
            return time.clock_gettime(self._clocks[thread]) - self._read[thread][1]
        return float("inf")
