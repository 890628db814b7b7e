"""Watches the running jobs of a worker.

Interrupts jobs that exceed their timeout, and takes the stacks of hanging jobs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from ...backend import DatabaseBackend
from ...core.safe_log import logger
from ...exceptions import TimedOut
from ...models import ClaimedJob
from ..connections import sessions
from ..shutdown import Shutdown
from .run_times import RunTimes
from .services import WorkerServices
from .task_call import Call


class Watchdog:
    """A thread that does not use the database: the worker stores the stacks that it takes."""

    # Check interval in seconds: BUSY with running jobs, IDLE without.
    BUSY, IDLE = 0.2, 0.5
    # If a check runs later than expected by more than this, in seconds, no thread of this process
    # could run meanwhile.
    HELD_UP = 1.0
    # A job hangs if it runs TIMES times as long as the estimate for its task, and at least LEAST
    # seconds.
    TIMES, LEAST = 20.0, 60.0
    # Seconds after which the stack of a hanging job is taken again.
    AGAIN = 60.0

    def __init__(
        self, backend: DatabaseBackend, grace: float, run_times: RunTimes, services: WorkerServices
    ) -> None:
        self._backend, self._grace, self._run_times = backend, grace, run_times
        self._services = services
        self._stack_taken_at: dict[Call, float] = {}
        # The stacks that the worker has yet to store.
        self.stacks: deque[tuple[ClaimedJob, str, dict[str, int]]] = deque()
        self.stuck: set[Call] = set()

    def start(self, ended: Shutdown) -> None:
        threading.Thread(target=self._run, args=(ended,), name="watchdog", daemon=True).start()

    def _run(self, ended: Shutdown) -> None:
        calls: Sequence[Call] = ()
        expected_at = time.monotonic() + self.IDLE
        while not ended.wait(self.BUSY if calls else self.IDLE):
            calls = [call for call in self._services.running() if call.runs_task]
            self._forget(calls)
            self._note_hold_up(calls, time.monotonic() - expected_at)
            for call in calls:
                self._check(call, time.monotonic())
            expected_at = time.monotonic() + (self.BUSY if calls else self.IDLE)

    def _note_hold_up(self, calls: Iterable[Call], late: float) -> None:
        """Credit running calls with the time in which no thread could run.

        The cause is C code that did not release the GIL, or a suspended host.
        """
        if late > self.HELD_UP:
            for call in calls:
                call.held_up += min(late, time.monotonic() - call.began)

    def _check(self, call: Call, now: float) -> None:
        job = call.job
        if job.timeout and self._ran(call, now) > job.timeout.total_seconds():
            call.interrupt(TimedOut)
        if now - call.interrupted_at > self._grace and call not in self.stuck:
            logger.error(
                "watchdog: job %s of %s does not stop; replacing its worker",
                job.pk,
                job.task,
                extra=job.log_fields,
            )
            self._take_stack(call, now)
            self.stuck.add(call)
        elif (
            now - call.began > self._longest(job)
            and now - self._stack_taken_at.get(call, float("-inf")) > self.AGAIN
        ):
            logger.warning("watchdog: job %s of %s hangs", job.pk, job.task, extra=job.log_fields)
            self._take_stack(call, now)

    def _ran(self, call: Call, now: float) -> float:
        """Run time in seconds, without the time in which no thread could run.

        At most the job's timeout is subtracted, as the job itself may be the cause.
        """
        timeout = call.job.timeout.total_seconds() if call.job.timeout else 0.0
        return now - call.began - min(call.held_up, timeout)

    def _longest(self, job: ClaimedJob) -> float:
        usual = self._run_times.estimate(job.task)
        longest = self._backend.options_of(job.queue).hanged_after
        return longest if usual is None else min(longest, max(self.LEAST, usual * self.TIMES))

    def _take_stack(self, call: Call, now: float) -> None:
        self._stack_taken_at[call] = now
        self.stacks.append((call.job, call.stack(), sessions(call.connections)))
        self._services.wake()

    def _forget(self, calls: Iterable[Call]) -> None:
        for over in self._stack_taken_at.keys() - set(calls):
            del self._stack_taken_at[over]
        self.stuck.intersection_update(calls)
