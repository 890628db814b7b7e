"""The worker role: claims and runs jobs."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from django.db import DatabaseError, InterfaceError

from ...backend import DatabaseBackend
from ...core.options import Options
from ...core.queue_selector import QueueSelector
from ...core.safe_log import logger
from ...core.transactions import is_conflict
from ...engine.attempt_result import Settled
from ...engine.claim import release
from ...exceptions import Interrupted, JobLost, Stopped
from ...models import ClaimedJob, Process, StackTrace
from ...models.enums import Fence
from ...models.job import JobQuerySet
from .. import lifecycle
from ..connections import close_connections, discard, leave_old_connections, note_outage, prepare
from ..heartbeat import Heartbeat
from ..logging_setup import RepeatedProblem
from ..shared_status import SharedStatus
from ..shutdown import Shutdown
from ..socket_watchdog import deadline
from . import executor
from .after_settle import finish_batches, wake_dependents
from .async_pool import AsyncPool, is_of_coroutine
from .claimer import Claimer
from .notify_listener import NotifyListener, can_listen
from .poll_backoff import PollBackoff
from .progress_writer import ProgressWriter
from .ready_probe import ReadyProbe
from .run_times import RunTimes
from .services import WorkerServices
from .settler import TWICE, Settler
from .task_call import Call, CoroutineCall, ThreadCall, interrupt_each
from .thread_pool import ThreadPool
from .watchdog import Watchdog


class Worker:
    """Claims jobs, runs them on its threads and its event loop, and settles them."""

    # Jobs that have run for longer than this, in seconds, may have a stop request of an operator.
    STOPPABLE = 1.0
    # Seconds that interrupted jobs have for their cleanup (LAST), and that results have to be
    # written once the jobs have ended (LAST_RESULTS).
    LAST = 0.3
    LAST_RESULTS = 4.0

    # Number of ended attempts that are recognised if a failover makes them start again.
    REMEMBERED = 10_000
    # Seconds after which claimed jobs are compared with the jobs held here.
    AUDIT = 30.0

    def __init__(self, backend: DatabaseBackend, options: Options, status: SharedStatus) -> None:
        self._backend, self._options, self._status = backend, options, status
        self._jobs = ClaimedJob.objects.using(backend.database)
        self._selector = QueueSelector(options.queues, frozenset(backend.queues))
        self._poll_backoff = PollBackoff()
        self._listener = NotifyListener(
            backend.database, self._on_notify, self._poll_backoff.note_notify
        )
        self._in_doubt, self._scanned_at = False, 0.0
        self._audit_at = float("inf")
        # Number of jobs that were claimed and not released.
        self._taken = 0
        # _recent: attempts that have ended. _before: all attempts claimed before the last outage of
        # the database, whose claims or ends a failover may have lost. _going_on: those of them that
        # still run, under a second claim.
        self._recent: deque[Fence] = deque(maxlen=self.REMEMBERED)
        self._before: set[Fence] = set()
        self._going_on: set[Fence] = set()
        # Looks for ready jobs where there is no NOTIFY.
        self._probe: ReadyProbe | None = None
        self._problem = RepeatedProblem("worker: jobs could not be claimed")
        self._problem_at_end = RepeatedProblem("worker: database unavailable during shutdown")
        details = {"queues": str(self._selector), "threads": options.threads}
        services = WorkerServices(
            wake=self._listener.wake,
            running=self._running,
            owns=self._owns,
            settled=self._settled,
            limited_queues=lambda: self._claimer.limits,
            has_room=lambda: self._pool.has_room,
            keeps_slot=lambda job: self._pool.keeps_slot(job),
        )
        self._heartbeat = Heartbeat(
            Process.Kind.WORKER, backend.database, options, status, details, services.wake
        )
        self._run_times = RunTimes()
        self._settler = Settler(backend.database, options, services)
        self._watchdog = Watchdog(backend, options.timeout_grace, self._run_times, services)
        self._progress_writer = ProgressWriter(backend.database, services)
        self._pool = ThreadPool(options, status, self._run_times, self._run_call, services)
        self._async_pool = AsyncPool(options, self._await_call, services)

    def run(self, stop: Shutdown, supervisor: int | None = None) -> bool:
        """Work until ``stop`` is requested, then shut down: release, wait, settle, deregister.

        Return False if jobs are left: jobs that cannot be stopped, and jobs whose rows other
        transactions keep locked. They end with their process, and its supervisor or a dispatcher
        recovers them. Raises RuntimeError if the event loop has failed.
        """
        try:
            self._start(stop, supervisor)
        except BaseException:
            self._listener.close()
            raise
        self._status.mark_ready()
        while not stop.requested and self._is_healthy() and not self._is_to_drain():
            self._status.tick()
            began = time.monotonic()
            with deadline(self._options.answer_limit):
                found, full = self._work()
            pause = (
                self._poll_backoff.after_jobs(full)
                if found
                else self._poll_backoff.after_none(began, *self._longest_pause())
            )
            self._measure(pause)
            if pause:
                self._status.tick(ahead=pause)
                self._listener.wait(pause * random.uniform(0.8, 1.0), self._usable_probe())
        leaves_none = self._end(stop)
        if not self._async_pool.alive:
            # A crash, which spends an attempt: the job that did this would do it again for ever.
            raise RuntimeError("The event loop has failed.")
        return leaves_none

    def _measure(self, pause: float) -> None:
        self._status.measure(
            poll_delay=pause,
            active_threads=self._pool.active_threads,
            running_jobs=len(self._running()),
            unsettled_jobs=self._settler.unwritten,
        )

    def _usable_probe(self) -> ReadyProbe | None:
        """Return the probe while the worker could claim a job, and knows of none."""
        is_fit = self._heartbeat.healthy and not self._heartbeat.is_quiet and not self._in_doubt
        return self._probe if is_fit and self._claimer.idle and self._pool.has_room else None

    def _longest_pause(self) -> tuple[float, bool]:
        """Return the longest pause in seconds, and whether new jobs are reported meanwhile.

        Running jobs limit the pause, as they may have to be stopped, and waiting jobs, as they may
        have to be released. A busy pool wakes the worker itself when it has room.
        """
        patience = self._listener.patience if self._claimer.idle and self._heartbeat.healthy else 1
        longest = min(self._options.poll_interval * patience, max(0.005, self._pool.late_in()))
        is_told = patience > 1 or self._usable_probe() is not None
        return min(longest, self.STOPPABLE) if self._running() else longest, is_told

    def _start(self, stop: Shutdown, supervisor: int | None) -> None:
        prepare(self._backend.database, self._options.statement_limit)
        process = self._heartbeat.start(supervisor)
        self._claimer = Claimer(
            self._backend.database, process, self._selector, self._options, self._group_size
        )
        if can_listen(self._backend.database):
            try:
                self._claimer.warm_up()
            except (DatabaseError, InterfaceError):  # The first claim tries again, and reports it.
                discard(self._backend.database)
        else:
            self._probe = ReadyProbe(self._jobs, self._selector, self._claimer.note_ready)
        self._ended = Shutdown()
        stop.on_request(self._listener.wake)
        self._listener.start()
        self._settler.start()
        self._watchdog.start(self._ended)
        self._pool.start()
        logger.info(
            "%s serves %s with %d threads.",
            process,
            self._selector,
            self._options.threads,
            extra=process.log_fields,
        )
        lifecycle.send("started", process, "worker")

    def _on_notify(self, payload: str) -> bool:
        if is_ours := self._claimer.on_notify(payload):
            self._poll_backoff.note_notify()
        return is_ours

    def _work(self) -> tuple[int, bool]:
        """Run one iteration. Return the number of jobs claimed, and whether they fill the room."""
        if leave_old_connections():
            self._listener.listen_anew()
            self._in_doubt = True
        try:
            if self._in_doubt or (self._going_on and not self._going_on <= self._held_fences()):
                self._release_unknown()
            elif time.monotonic() > self._audit_at:
                self._audit()
            if late := self._pool.take_back(late=True):
                self._release(late)
            if self._heartbeat.is_quiet and (waiting := self._pool.take_back()):
                self._release(waiting)
            self._watch_running()
            found, room = self._claim()
            self._problem.over()
            return found, found >= room
        except (DatabaseError, InterfaceError) as error:
            if not is_conflict(error):
                self._problem.report(error)
                # The next claim may reach another server than the threads' connections, before a
                # heartbeat does.
                note_outage()
            discard(self._backend.database)
            self._in_doubt, self._claimer.idle = True, False
            return 0, False

    def _claim(self) -> tuple[int, int]:
        fit = self._heartbeat.healthy and not self._heartbeat.is_quiet and not self._settler.full
        room, claim = self._room() if fit else (0, self._claimer.claim)
        if self._options.max_jobs is not None and not self._status.is_kept:
            room = min(room, max(0, self._options.max_jobs - self._taken))
        before = self._status.claimed
        if room > 0:
            self._extend_groups(room)
        if (left := room - (self._status.claimed - before)) > 0:
            for jobs in claim(left, self._pool.held_bytes()):
                self._take(jobs)
        found = self._status.claimed - before
        if room > 0:
            self._status.count("claims" if found else "empty_claims")
        return found, room

    def _room(self) -> tuple[int, Callable[[int, int], Iterator[list[ClaimedJob]]]]:
        """Return how many jobs to claim, and how: of both kinds, if there is room for both."""
        if not (coroutines := self._async_pool.room()):
            return self._pool.room(), partial(self._claimer.claim_kind, coroutines=False)
        if self._pool.is_stalled:
            return coroutines, partial(self._claimer.claim_kind, coroutines=True)
        room = coroutines if self._async_pool.took_all else self._pool.room()
        return room, self._claimer.claim

    def _extend_groups(self, room: int) -> None:
        """Claim up to ``room`` jobs behind groups that end soon, so that their slots stay used."""
        for job, followers in self._pool.short_groups():
            if room <= 0:
                return
            size = partial(self._size_left, followers)
            if jobs := self._claimer.claim_behind(job, room, size):
                self._take(jobs)
                room -= len(jobs)
            else:
                self._pool.end_group(job)

    def _group_size(self, job: ClaimedJob, line: int) -> int:
        return 1 if is_of_coroutine(job) else self._pool.group_size(job, line)

    def _size_left(self, followers: int, job: ClaimedJob, line: int) -> int:
        return self._pool.group_size(job, line) - followers

    def _take(self, jobs: Sequence[ClaimedJob]) -> None:
        """Pass claimed jobs to the pools."""
        self._status.count_claimed(len(jobs))
        self._taken += len(jobs)
        self._audit_at = min(self._audit_at, time.monotonic() + self.AUDIT)
        new, behind = self._not_held(jobs) if self._before else (jobs, ())
        others, too_many = self._async_pool.take(new, self._claimer.leave)
        self._pool.put(others)
        if left := [*too_many, *behind]:
            self._release(left)

    def _release(self, jobs: Sequence[ClaimedJob]) -> None:
        """Release jobs of the pools without spending an attempt."""
        # At once: they do not start here, even if they are released later.
        self._taken -= len(jobs)
        self._release_owned(jobs)

    def _release_owned(self, jobs: Sequence[ClaimedJob]) -> None:
        """Release jobs that this process owns.

        Jobs whose rows other transactions have locked stay owned by this process: they are in
        doubt, and are released later.
        """
        released = release(self._backend.database, jobs)
        self._in_doubt = self._in_doubt or len(released) < len(jobs)
        for job in released:
            self._status.mark_started(job)

    def _audit(self) -> None:
        """Release jobs that this worker has forgotten: a defect, which must not stall them."""
        self._audit_at = float("inf")
        owned: list[Any] = list(self._owned())
        here = self._held_fences()
        if missing := [job for job in owned if job.fence not in here]:
            # Some have ended since they were read.
            ended = self._recent.copy()
            missing = [job for job in missing if job.fence not in ended]
            self._release(missing)
        for job in missing:
            logger.error(
                "worker: job %s (attempt %s) was claimed and never started; it is released",
                job.pk,
                job.attempt,
                extra=job.log_fields,
            )

    def _release_unknown(self) -> None:
        """Release jobs that belong to this process in the database but are not held here.

        Their claim failed but may have been committed, or their rows were locked at their release.
        """
        # A copy takes no Python code, so that other threads do not extend it meanwhile.
        ended = set(self._recent.copy())
        owned: list[Any] = list(self._owned())
        here = self._held_fences()
        gone = [job for job in owned if job.fence not in here]
        for job in gone:
            if job.fence in ended:
                logger.error(TWICE, job.pk, job.attempt, "its end", extra=job.log_fields)
        self._before, self._going_on, self._in_doubt = here | ended, self._going_on & here, False
        # Not counted: either they were not taken, or were counted at their first release, or ran.
        self._release_owned(gone)

    def _not_held(
        self, jobs: Sequence[ClaimedJob]
    ) -> tuple[Sequence[ClaimedJob], Sequence[ClaimedJob]]:
        """Return the claimed jobs that do not already run here, and those that are to be released.

        A failover may have lost the previous claim of a job that still runs here. Such a job goes
        on under the new claim. The others of its new slot group would run beside it.
        """
        again = [job for job in jobs if job.fence in self._before]
        here = self._held_fences() if again else set()
        for job in again:
            self._before.discard(job.fence)
            if job.fence in here:
                logger.warning(
                    "worker: job %s (attempt %s) goes on: its claim was lost and made again",
                    *job.fence[:2],
                    extra=job.log_fields,
                )
            else:
                logger.error(TWICE, job.pk, job.attempt, "its claim", extra=job.log_fields)
        self._going_on.update(job.fence for job in again if job.fence in here)
        new = [job for job in jobs if job.fence not in here]
        going_on = {job.slot_group for job in jobs if job.slot_group and job.fence in here}
        return (
            [job for job in new if job.slot_group not in going_on],
            [job for job in new if job.slot_group in going_on],
        )

    def _held_fences(self) -> set[Fence]:
        """Fencing tokens of jobs that are claimed and not settled, from this process's memory."""
        # Read in the order in which a job passes through them, so that no job is missed.
        here = {
            job.fence for job in [*self._pool.waiting(), *(call.job for call in self._running())]
        }
        here.update(result.fence for result in self._settler.unwritten_results())
        return here

    def _watch_running(self) -> None:
        """Store the stacks of hanging jobs and the progress of tasks, and interrupt stopped jobs.

        Stopped jobs are those for which an operator has requested a stop.
        """
        if self._watchdog.stacks:
            self._store_stacks()
        self._progress_writer.write()
        now = time.monotonic()
        calls = [call for call in self._running() if now - call.began > self.STOPPABLE]
        if calls and now - self._scanned_at > self.STOPPABLE:
            self._scanned_at = now
            rows = self._owned().stop_requested().values_list("pk", "attempt", "retry_requested")
            requests = {(pk, attempt): is_retried for pk, attempt, is_retried in rows}
            for call in calls:
                is_retried = requests.get((call.job.pk, call.job.attempt))
                if is_retried is not None:
                    call.is_retried = is_retried
                    call.interrupt(Stopped)

    def _store_stacks(self) -> None:
        while self._watchdog.stacks:
            StackTrace.objects.using(self._backend.database).record(
                *self._watchdog.stacks.popleft()
            )

    def _owns(self) -> bool:
        return not self._heartbeat.declared_dead

    def _owned(self) -> JobQuerySet:
        return self._jobs.running().filter(process=self._heartbeat.process)

    def _run_call(self, call: ThreadCall) -> None:
        result = executor.run(call, self._backend)
        self._run_times.observe(call.job.task, time.monotonic() - call.began)
        if isinstance(result, Settled):
            self._settled(result)
        else:
            self._settler.put(result)

    async def _await_call(self, call: CoroutineCall) -> None:
        result = await executor.run_async(call, self._backend)
        self._run_times.observe(call.job.task, time.monotonic() - call.began)
        self._settler.put(result)

    def _settled(self, settled: Settled) -> None:
        self._recent.extend(result.fence for result in settled.written)
        self._status.count("settles")
        self._status.count("settled_jobs", len(settled.written))
        if wake_dependents(settled, self._backend, self._claimer.limits):
            self._listener.wake()
        if finish_batches(settled, self._backend):
            self._listener.wake()

    def _is_healthy(self) -> bool:
        """True while the process is not declared dead, its threads run and no job is stuck."""
        return (
            not self._heartbeat.declared_dead
            and self._settler.alive
            and self._async_pool.alive
            and not self._watchdog.stuck
        )

    def _is_to_drain(self) -> bool:
        most, status = self._options.max_jobs, self._status
        has_done_all = (
            most is not None
            and self._taken >= most
            and not status.is_kept
            and not self._pool.waiting()
        )
        return status.is_drain_requested or has_done_all or self._heartbeat.is_to_stop

    def _running(self) -> list[Call]:
        return [*self._pool.running(), *self._async_pool.running()]

    def _end(self, stop: Shutdown) -> bool:
        self._status.mark_draining()
        end = time.monotonic() + self._options.shutdown_timeout
        self._listener.close()
        if self._probe:
            self._probe.close()
        process = self._heartbeat.process
        logger.info(
            "%s is shutting down; jobs still running: %d",
            process,
            len(self._running()),
            extra=process.log_fields,
        )
        self._try_to(lambda: self._release(self._pool.take_back()))
        lifecycle.send("stopping", process, "worker")
        self._wait_for_running(stop)
        interrupt_each(self._running(), JobLost if self._heartbeat.declared_dead else Interrupted)
        self._wait(time.monotonic() + self.LAST)
        self._try_to(self._store_stacks)
        left = self._running()
        for call in left:
            logger.warning(
                "worker: job %s of %s ends with its process",
                call.job.pk,
                call.job.task,
                extra=call.job.log_fields,
            )
        self._pool.close()
        self._async_pool.close()
        self._settler.close()
        self._wait_for_results(end, stop)
        leaves_none = not left and self._holds_nothing()
        self._heartbeat.stop(deregister=leaves_none)
        self._ended.request()
        close_connections()
        lifecycle.send("stopped", process, "worker")
        logger.info("%s has ended", process, extra=process.log_fields)
        return leaves_none

    def _try_to(self, step: Callable[[], object]) -> None:
        try:
            with deadline(self._options.answer_limit):
                step()
        except (DatabaseError, InterfaceError) as error:
            if not is_conflict(error):
                self._problem_at_end.report(error)
            discard(self._backend.database)
            self._in_doubt = True

    def _wait_for_running(self, stop: Shutdown) -> None:
        """Wait for the running jobs.

        If the worker is to be replaced, the wait has no limit. Otherwise it is ``shutdown_timeout``
        from the moment at which the worker must end.
        """
        while not stop.requested and self._is_healthy() and self._running():
            self._status.tick()
            self._try_to(self._watch_running)
            stop.wait(0.02)
        for call in self._running():
            call.should_stop = True
        if not self._heartbeat.declared_dead:
            self._wait(time.monotonic() + self._options.shutdown_timeout, stop)

    def _wait_for_results(self, end: float, stop: Shutdown) -> None:
        """Wait until attempt results are written and claimed jobs are released.

        While the database is unavailable, or the rows are locked, wait as long as jobs could have
        run.
        """
        longest, least = end + self.LAST_RESULTS, time.monotonic() + self.LAST_RESULTS
        while not self._holds_nothing() and time.monotonic() < (
            least if stop.immediate or not self._owns() else max(longest, least)
        ):
            self._status.tick()
            if self._in_doubt:
                self._try_to(self._release_unknown)
            time.sleep(0.02)

    def _holds_nothing(self) -> bool:
        """True if no result is unwritten and no claim is in doubt. Running jobs do not count."""
        return not self._settler.alive and not (self._in_doubt and self._owns())

    def _wait(self, end: float, stop: Shutdown | None = None) -> None:
        """Wait until ``end`` for running jobs, except those that are stuck."""
        while (
            time.monotonic() < end
            and not (stop and stop.immediate)
            and not self._watchdog.stuck.issuperset(self._running())
        ):
            self._status.tick()
            time.sleep(0.02)
