"""The threads of a worker, and the claimed jobs that wait for one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from uuid import UUID

from ..models import Job, Settlement
from ..options import Options
from .board import Board
from .calls import ThreadCall
from .connection import close_connections, look_after_connections, ready_connections
from .durations import Durations

logger = logging.getLogger("django_dbqueue")

Run = Callable[[ThreadCall], "Settlement | None"]


class Pool:
    """Runs jobs by ``run`` and passes each outcome to ``settle``; calls ``wake`` when there is room for more.

    What waits is on the ``board``. Of one series, a job waits until the one before it has ended. Those that have slots of
    limits go first: others wait for these.
    """

    # So much work, in seconds, is kept claimed ahead: enough to hide a claim, little enough to give back.
    AHEAD = 0.2
    # What has waited longer, in seconds, is given back.
    LATE = 2.0
    # The same of a series whose jobs another slot may be free for.
    AHEAD_IN_A_ROW, LATE_IN_A_ROW = 0.025, 0.05

    def __init__(
        self,
        options: Options,
        board: Board,
        durations: Durations,
        run: Run,
        settle: Callable[[Settlement], None],
        wake: Callable[[], None],
    ) -> None:
        self._options, self._board, self._durations = options, board, durations
        self._run, self._settle, self._wake = run, settle, wake
        self._waiting: deque[Job] = deque()
        # By series, for each that has a job waiting or running: those behind it.
        self._behind: dict[UUID | None, deque[Job]] = {}
        self._running: dict[int, ThreadCall] = {}
        self._changed = threading.Condition()
        self._mean = 1.0
        self._closed = False

    def start(self) -> None:
        for number in range(self._options.threads):
            threading.Thread(target=self._work, name=f"job-{number}", daemon=True).start()

    def put(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            first = []
            for job in jobs:
                self._board.hold(job.pk)
                if not job.series:
                    self._waiting.append(job)
                elif job.series in self._behind:
                    self._behind[job.series].append(job)
                else:
                    first.append(job)
                    self._behind[job.series] = deque()
            self._waiting.extendleft(reversed(first))
            self._changed.notify(len(jobs))

    def room(self) -> int:
        """How many more jobs to claim: what free threads can start, and what they will be through with soon."""
        with self._changed:
            wanted = self._options.threads - len(self._running) + self._ahead() - len(self._waiting)
            # Claims stay few and large: the next one is due when half of what was ahead is gone.
            most = self._options.threads + self._options.prefetch - len(self._running) - len(self.waiting())
            return min(wanted, most) if len(self._waiting) <= self._ahead() // 2 else 0

    def in_a_row(self, job: Job) -> int:
        """How many such jobs one thread will be through with soon, as far as their task has run here before."""
        ahead = self.AHEAD if _has_the_only_slot(job) else self.AHEAD_IN_A_ROW
        usual = self._durations.usual(job.task)
        return 1 if usual is None else min(self._options.prefetch, int(ahead / max(usual, 1e-4)))

    def waiting(self) -> list[Job]:
        with self._changed:
            return [*self._waiting, *chain.from_iterable(self._behind.values())]

    def running(self) -> list[ThreadCall]:
        with self._changed:
            return list(self._running.values())

    def late_in(self) -> float:
        """Seconds until one of those that wait has waited for too long."""
        with self._changed:
            late = [job.clock + self.LATE for job in self._waiting]
            late += [behind[0].clock + self._late(behind) for behind in self._behind.values() if behind]
            return min(late, default=float("inf")) - time.monotonic()

    def take_back(self, late: bool = False) -> list[Job]:
        """Those that wait, or that have waited for too long; they will not be started."""
        with self._changed:
            now = time.monotonic() if late else float("inf")
            stale = _take_old(self._waiting, now - self.LATE)
            for behind in self._behind.values():
                stale += _take_old(behind, now - self._late(behind))
            here = {job.series for job in [*self._waiting, *(call.job for call in self._running.values())]}
            self._behind = {series: behind for series, behind in self._behind.items() if series in here}
            for job in stale:
                self._board.drop(job.pk)
            return stale

    def close(self) -> None:
        """End the idle threads at once, and the others with their jobs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _ahead(self) -> int:
        """How many jobs the threads will be through with soon, if they take as long as they do now."""
        mean = max(self._mean, 1e-4)
        if len(self._running) == self._options.threads:
            mean = max(mean, time.monotonic() - max(call.began for call in self._running.values()))
        return min(self._options.prefetch, int(self._options.threads * self.AHEAD / mean))

    def _late(self, behind: deque[Job]) -> float:
        return self.LATE if behind and _has_the_only_slot(behind[0]) else self.LATE_IN_A_ROW

    def _work(self) -> None:
        while call := self._next():
            try:
                ready_connections()
                if outcome := self._run(call):
                    self._settle(outcome)
                look_after_connections()
            except BaseException:
                logger.exception("After job %s; the thread goes on.", call.job.pk, extra=call.job.log_fields)
            finally:
                self._done(call)
        close_connections()

    def _next(self) -> ThreadCall | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            job = self._waiting.popleft()
            self._board.drop(job.pk)
            self._running[threading.get_ident()] = call = ThreadCall(job)
            return call

    def _done(self, call: ThreadCall) -> None:
        job, seconds = call.job, time.monotonic() - call.began
        with self._changed:
            del self._running[threading.get_ident()]
            if behind := self._behind.get(job.series):
                self._waiting.appendleft(behind.popleft())
            else:
                self._behind.pop(job.series, None)
            self._mean += (seconds - self._mean) * 0.1
            short = len(self._waiting) <= self._ahead() // 2
        if short:
            self._wake()


def _has_the_only_slot(job: Job) -> bool:
    """Those behind it could not start any sooner elsewhere."""
    return any(limit.get("most") == 1 for limit in job.limits or ())


def _take_old(jobs: deque[Job], since: float) -> list[Job]:
    old = [job for job in jobs if job.clock <= since]
    young = [job for job in jobs if job.clock > since]
    jobs.clear()
    jobs.extend(young)
    return old
