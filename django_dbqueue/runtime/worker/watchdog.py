"""Looks at the jobs that a worker runs: ends those whose time is over, and notes where those are that take too long."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...backend import DatabaseBackend
from ...exceptions import TimedOut
from ...models import Job
from ..shutdown import Shutdown
from .durations import RunTimes
from .task_call import Call

logger = logging.getLogger("django_dbqueue")


class Watchdog:
    """A thread that uses no database: the stacks that it takes are for the worker to store.

    ``wake`` is called when there is something for the worker to do.
    """

    # So often it looks, in seconds: while there are jobs, and while there are none.
    LOOK, IDLE = 0.2, 0.5
    # If it comes round so much later, in seconds, no thread of this process could run meanwhile.
    HELD_UP = 1.0
    # A job hangs that runs so many times as long as its task usually does, and for so many seconds at least.
    TIMES, LEAST = 20.0, 60.0
    # A hanging job's stack is taken again after so many seconds.
    AGAIN = 60.0

    def __init__(
        self,
        backend: DatabaseBackend,
        grace: float,
        durations: RunTimes,
        running: Callable[[], Sequence[Call]],
        wake: Callable[[], None],
    ) -> None:
        self._backend, self._grace, self._durations = backend, grace, durations
        self._running, self._wake = running, wake
        self._looked: dict[Call, float] = {}
        self._stacks: deque[tuple[Job, str]] = deque()
        self.stuck: set[Call] = set()

    def start(self, ended: Shutdown) -> None:
        threading.Thread(target=self._run, args=(ended,), name="watch", daemon=True).start()

    def stacks(self) -> Iterator[tuple[Job, str]]:
        """Those that were taken since the last time."""
        while self._stacks:
            yield self._stacks.popleft()

    def _run(self, ended: Shutdown) -> None:
        calls: Sequence[Call] = ()
        expected_at = time.monotonic() + self.IDLE
        while not ended.wait(self.LOOK if calls else self.IDLE):
            calls = self._running()
            self._forget(calls)
            self._note_hold_up(calls, time.monotonic() - expected_at)
            for call in calls:
                self._look(call, time.monotonic())
            expected_at = time.monotonic() + (self.LOOK if calls else self.IDLE)

    def _note_hold_up(self, calls: Iterable[Call], late: float) -> None:
        """Somebody's C code has not let go of the interpreter, or the host was suspended."""
        if late > self.HELD_UP:
            for call in calls:
                call.held_up += min(late, time.monotonic() - call.began)

    def _look(self, call: Call, now: float) -> None:
        job = call.job
        if job.timeout and self._ran(call, now) > job.timeout.total_seconds():
            call.ask(TimedOut)
        if now - call.asked_at > self._grace and call not in self.stuck:
            logger.error("Job %s of %s does not stop; its worker is replaced.", job.pk, job.task, extra=job.log_fields)
            self._take_stack(call, now)
            self.stuck.add(call)
        elif now - call.began > self._longest(job) and now - self._looked.get(call, float("-inf")) > self.AGAIN:
            logger.warning("Job %s of %s hangs.", job.pk, job.task, extra=job.log_fields)
            self._take_stack(call, now)

    def _ran(self, call: Call, now: float) -> float:
        """In seconds. Time in which it was held up does not count, up to as much as its timeout: it may be the cause of it."""
        timeout = call.job.timeout.total_seconds() if call.job.timeout else 0.0
        return now - call.began - min(call.held_up, timeout)

    def _longest(self, job: Job) -> float:
        usual = self._durations.estimate(job.task)
        longest = self._backend.options_of(job.queue).hanged_after
        return longest if usual is None else min(longest, max(self.LEAST, usual * self.TIMES))

    def _take_stack(self, call: Call, now: float) -> None:
        self._looked[call] = now
        self._stacks.append((call.job, call.stack()))
        self._wake()

    def _forget(self, calls: Iterable[Call]) -> None:
        for over in self._looked.keys() - set(calls):
            del self._looked[over]
        self.stuck.intersection_update(calls)
