"""The threads of a worker, and the claimed jobs that wait for a thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from uuid import UUID

from ...core.internal_errors import report
from ...core.options import Options
from ...engine.slot_group import COUNTED
from ...models import ClaimedJob
from ...models.enums import Fence
from ..connections import (
    close_connections,
    close_interrupted,
    keep_handlers,
    look_after_connections,
    of_this_thread,
    ready_connections,
)
from ..shared_status import SharedStatus
from .active_threads import ActiveThreads
from .run_times import RunTimes
from .services import DEFAULT, WorkerServices
from .task_call import ThreadCall


class ThreadPool:
    """Runs jobs with ``run``, and wakes the worker when it has room.

    The shared ``status`` lists the waiting jobs. A job of a slot group waits until the previous
    job of the group has ended. Jobs that hold slots of limits run first: other jobs wait for the
    slots.

    Threads that find work take no lock, as each would wait for the others. Therefore a job enters
    ``_running`` before it leaves ``_waiting``, and ``_waiting.pop`` decides its owner: a thread, or
    the caller of ``take_back``. How many threads take jobs at a time, ``ActiveThreads`` decides.
    """

    # Seconds of work to keep claimed ahead: enough to hide the latency of a claim, and little
    # enough to release.
    AHEAD = 0.2
    # Jobs that have waited longer than this, in seconds, are released.
    LATE = 2.0
    # The same for a group whose jobs another slot may be free for: without a long line, and always.
    GROUP_AHEAD, GROUP_LATE = 0.025, 0.05
    # A worker whose threads have all been busy for longer claims jobs for its event loop only.
    STALLED = 1.0

    def __init__(
        self,
        options: Options,
        status: SharedStatus,
        run_times: RunTimes,
        run: Callable[[ThreadCall], None],
        services: WorkerServices = DEFAULT,
    ) -> None:
        self._options, self._status, self._run_times = options, status, run_times
        self._run, self._services = run, services
        self._waiting: dict[Fence, ClaimedJob] = {}
        # The order of waiting jobs. Some of them may have been taken back.
        self._order: deque[Fence] = deque()
        # For each group that has a job waiting or running: its jobs that run after that one.
        self._followers: dict[UUID | None, deque[ClaimedJob]] = {}
        # For each of these groups: the time at which its last follower was let go.
        self._advanced_at: dict[UUID | None, float] = {}
        # Of these groups, those that more jobs may join: some have waited for their slot.
        self._with_line: set[UUID | None] = set()
        self._running: dict[int, ThreadCall] = {}
        self._lock = threading.Lock()
        self._active = ActiveThreads(options.threads, self._order, self._running, run_times)
        self._mean = 1.0
        # Whether the worker has been woken to claim since it last asked for the room.
        self._wake_sent = False

    def start(self) -> None:
        self._active.start()
        for number in range(self._options.threads):
            threading.Thread(target=self._work, name=f"job-{number}", daemon=True).start()

    def put(self, jobs: Sequence[ClaimedJob]) -> None:
        with self._lock:
            first, now = [], time.monotonic()
            for job in jobs:
                self._status.mark_claimed(job.pk)
                job.waits_since = now
                if job.slot_group in self._followers:
                    self._followers[job.slot_group].append(job)
                    self._with_line.add(job.slot_group)
                    continue
                self._waiting[job.fence] = job
                if job.slot_group:
                    self._followers[job.slot_group] = deque()
                    first.append(job.fence)
                else:
                    self._order.append(job.fence)
            self._order.extendleft(reversed(first))
        self._active.wake()

    def room(self) -> int:
        """Number of further jobs to claim.

        These are the jobs that free threads can start, plus the jobs that all threads finish within
        AHEAD seconds.
        """
        self._wake_sent = False
        ahead, running, waiting = self._ahead(), len(self._running), len(self._waiting)
        # Keeps claims few and large: the next claim is due when half of the jobs ahead have
        # started.
        if waiting > ahead // 2:
            return 0
        most = self._options.threads + self._options.prefetch - running - len(self.waiting())
        return min(self._options.threads - running + ahead - waiting, most)

    @property
    def active_threads(self) -> int:
        """The number of threads that take jobs."""
        return self._active.number

    @property
    def has_room(self) -> bool:
        """Whether a thread is free for another job."""
        return len(self._running) + len(self._waiting) < self._options.threads

    @property
    def is_stalled(self) -> bool:
        """Whether all threads have run their jobs for longer than STALLED seconds."""
        return len(calls := self.running()) >= self._options.threads and (
            time.monotonic() - max(call.began for call in calls) > self.STALLED
        )

    def keeps_slot(self, job: ClaimedJob) -> bool:
        """Return whether claimed jobs that will run after this one share its slot."""
        return bool(self._followers.get(job.slot_group))

    def group_size(self, job: ClaimedJob, line: int) -> int:
        """Number of jobs of this task that one thread is to run in a row; 1 if unknown.

        That is what it finishes within AHEAD seconds, or else half of the ``line``, the number of
        jobs that wait for each slot, if another slot may be free for them; but at least what it
        finishes within GROUP_AHEAD seconds.
        """
        if (usual := self._run_times.estimate(job.task)) is None:
            return 1
        usual = max(usual, 1e-4)
        most = min(self._options.prefetch, int(self.AHEAD / usual))
        if _has_the_only_slot(job):
            return most
        return min(most, max(line // 2, int(self.GROUP_AHEAD / usual)))

    def short_groups(self) -> list[tuple[ClaimedJob, int]]:
        """Return a running job of each slot group that more waiting jobs may join.

        With the number of its followers, which is less than half of what the group may have. One
        group for each limit; none unless a thread is free, as other jobs must not wait for them.
        """
        found: dict[str, tuple[ClaimedJob, int]] = {}
        now = time.monotonic()
        for call in self.running() if self.has_room else ():
            job, followers = call.job, len(self._followers.get(call.job.slot_group, ()))
            if (
                job.slot_group in self._with_line
                # Jobs with several limits would keep a slot from others that wait for one of them.
                and len(job.limits) == 1
                and followers < self.group_size(job, COUNTED) // 2
                # Jobs behind a long one would wait for it, though another slot may become free.
                and (_has_the_only_slot(job) or now - call.began < self._late_after(job.task))
            ):
                found.setdefault(job.limits[0]["key"], (job, followers))
        return list(found.values())

    def end_group(self, job: ClaimedJob) -> None:
        """Note that no more jobs join the slot group of a job: none waits."""
        self._with_line.discard(job.slot_group)

    def waiting(self) -> list[ClaimedJob]:
        with self._lock:
            return [*self._waiting.values(), *chain.from_iterable(self._followers.values())]

    def held_bytes(self) -> int:
        """Bytes of the large arguments of waiting jobs."""
        return sum(job.size for job in self.waiting())

    def running(self) -> list[ThreadCall]:
        return list(self._running.values())

    def late_in(self) -> float:
        """Seconds until the first waiting job has waited for too long."""
        with self._lock:
            late = [job.waits_since + self.LATE for job in list(self._waiting.values())]
            late += [
                self._late_at(slot_group, followers[0])
                for slot_group, followers in self._followers.items()
                if followers
            ]
            return min(late, default=float("inf")) - time.monotonic()

    def take_back(self, late: bool = False) -> list[ClaimedJob]:
        """Remove waiting jobs, so that they do not start, and return them.

        ``late``: only jobs that have waited for too long. The jobs stay in the
        shared status until they are released.
        """
        with self._lock:
            now = time.monotonic() if late else float("inf")
            old = [
                job for job in list(self._waiting.values()) if job.waits_since <= now - self.LATE
            ]
            stale = [job for job in old if self._waiting.pop(job.fence, None)]
            for slot_group, followers in self._followers.items():
                old = [job for job in followers if self._late_at(slot_group, job) <= now]
                stale += old
                for job in old:
                    followers.remove(job)
                if old:
                    self._with_line.discard(slot_group)
            here = {
                job.slot_group
                for job in [*self._waiting.values(), *(call.job for call in self.running())]
            }
            # Nothing would start the jobs behind one that has been taken back.
            for slot_group in self._followers.keys() - here:
                stale += self._followers.pop(slot_group)
                self._advanced_at.pop(slot_group, None)
            self._with_line &= here
            return stale

    def close(self) -> None:
        """End idle threads immediately, and busy threads after their job."""
        self._active.close()

    def _ahead(self) -> int:
        """Number of jobs that the threads finish within AHEAD seconds at current run times."""
        mean = max(self._mean, 1e-4)
        if len(running := self.running()) == self._options.threads:
            mean = max(mean, time.monotonic() - max(call.began for call in running))
        threads = max(len(running), self._active.number)
        return min(self._options.prefetch, int(threads * self.AHEAD / mean))

    def _late_at(self, slot_group: UUID | None, follower: ClaimedJob) -> float:
        """Return the time at which a follower has waited for too long."""
        if _has_the_only_slot(follower):
            return follower.waits_since + self.LATE
        since = max(follower.waits_since, self._advanced_at.get(slot_group, 0.0))
        return since + self._late_after(follower.task)

    def _late_after(self, task: str) -> float:
        """Return after how many seconds with one job of the task its group is late."""
        return max(self.GROUP_LATE, 2 * (self._run_times.estimate(task) or 0.0))

    def _work(self) -> None:
        own = of_this_thread()
        keep_handlers()
        self._active.enter()
        while call := self._next():
            call.connections = own
            try:
                ready_connections()
                self._run(call)
                if call.reason:
                    close_interrupted()
                look_after_connections()
            except BaseException as error:
                report(
                    error,
                    "thread pool: error after job %s; the thread continues",
                    call.job.pk,
                    extra=call.job.log_fields,
                )
            finally:
                self._done(call)
        close_connections()

    def _next(self) -> ThreadCall | None:
        thread = threading.get_ident()
        while True:
            if self._active.is_one_too_many and not self._active.sleep():
                return None
            try:
                job = self._waiting[self._order.popleft()]
            except IndexError:
                if not self._active.sleep():
                    return None
            except KeyError:
                continue
            else:
                self._running[thread] = call = ThreadCall(job)
                if self._waiting.pop(job.fence, None):
                    self._status.mark_started(job.pk)
                    self._active.begin(job.task)
                    return call
                del self._running[thread]

    def _done(self, call: ThreadCall) -> None:
        job, seconds = call.job, time.monotonic() - call.began
        if job.slot_group:
            self._let_follow(job.slot_group)
        del self._running[threading.get_ident()]
        self._active.end(job.task, seconds)
        self._mean += (seconds - self._mean) * 0.1
        if not self._wake_sent and len(self._waiting) <= self._ahead() // 2:
            self._wake_sent = True
            self._services.wake()

    def _let_follow(self, slot_group: UUID) -> None:
        with self._lock:
            if followers := self._followers.get(slot_group):
                self._waiting[followers[0].fence] = followers[0]
                self._order.appendleft(followers.popleft().fence)
                self._advanced_at[slot_group] = time.monotonic()
            else:
                self._followers.pop(slot_group, None)
                self._advanced_at.pop(slot_group, None)
                self._with_line.discard(slot_group)


def _has_the_only_slot(job: ClaimedJob) -> bool:
    """Return whether a limit of the job has only one slot.

    Jobs behind it then could not start any sooner in another process.
    """
    return any(limit.get("max_running") == 1 for limit in job.limits or ())
