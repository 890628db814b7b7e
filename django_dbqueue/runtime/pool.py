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

logger = logging.getLogger("django_dbqueue")

Run = Callable[[ThreadCall], "Settlement | None"]


class Pool:
    """Runs jobs by ``run`` and passes each outcome to ``settle``; calls ``wake`` when there is room for more.

    What waits is on the ``board``. Of one series, a job waits until the one before it has ended.
    """

    # So much work, in seconds, is kept claimed ahead: enough to hide a claim, little enough to give back.
    AHEAD = 0.2

    def __init__(
        self, options: Options, board: Board, run: Run, settle: Callable[[Settlement], None], wake: Callable[[], None]
    ) -> None:
        self._options, self._board, self._run, self._settle, self._wake = options, board, run, settle, wake
        self._waiting: deque[Job] = deque()
        # By series, for each that has a job waiting or running: those behind it.
        self._behind: dict[UUID | None, deque[Job]] = {}
        self._running: dict[int, ThreadCall] = {}
        self._changed = threading.Condition()
        self._mean = 1.0
        self._usual: dict[str, float] = {}
        self._closed = False

    def start(self) -> None:
        for number in range(self._options.threads):
            threading.Thread(target=self._work, name=f"job-{number}", daemon=True).start()

    def put(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            for job in jobs:
                self._board.hold(job.pk)
                if job.series in self._behind:
                    self._behind[job.series].append(job)
                else:
                    self._waiting.append(job)
                    if job.series:
                        self._behind[job.series] = deque()
            self._changed.notify(len(jobs))

    def room(self) -> int:
        """How many more jobs to claim: what free threads can start, and what they will be through with soon."""
        with self._changed:
            wanted = self._options.threads - len(self._running) + self._ahead() - len(self._waiting)
            # Claims stay few and large: the next one is due when half of what was ahead is gone.
            most = self._options.threads + self._options.prefetch - len(self._running) - len(self.waiting())
            return min(wanted, most) if len(self._waiting) <= self._ahead() // 2 else 0

    def in_a_row(self, task: str) -> int:
        """How many jobs of a task one thread will be through with soon, as far as it has run here before."""
        return min(self._options.prefetch, int(self.AHEAD / max(self._usual.get(task, self.AHEAD), 1e-4)))

    def waiting(self) -> list[Job]:
        with self._changed:
            return [*self._waiting, *chain.from_iterable(self._behind.values())]

    def running(self) -> list[ThreadCall]:
        with self._changed:
            return list(self._running.values())

    def take_back(self, older_than: float = 0.0) -> list[Job]:
        """The jobs that have waited here for that many seconds; they will not be started."""
        with self._changed:
            limit = time.monotonic() - older_than
            stale = [job for job in self.waiting() if job.clock <= limit]
            self._waiting = deque(job for job in self._waiting if job.clock > limit)
            here = {job.series for job in [*self._waiting, *(call.job for call in self._running.values())]}
            self._behind = {
                series: deque(job for job in jobs if job.clock > limit) for series, jobs in self._behind.items() if series in here
            }
            for job in stale:
                self._board.drop(job.pk)
            return stale

    def close(self) -> None:
        """End the idle threads at once, and the others with their jobs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _ahead(self) -> int:
        return min(self._options.prefetch, int(self._options.threads * self.AHEAD / max(self._mean, 1e-4)))

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
            self._usual[job.task] = (self._usual.get(job.task, seconds) + seconds) / 2
            short = len(self._waiting) <= self._ahead() // 2
        if short:
            self._wake()
