"""Dispatcher: makes due jobs ready and enqueues recurring tasks.

It also recovers the jobs of dead processes and prunes old jobs.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING

from django.db import DatabaseError, InterfaceError

from ..backend import DatabaseBackend
from ..core.notify import notify_queues
from ..core.options import Options
from ..core.safe_log import logger
from ..core.transactions import is_conflict
from ..engine.alerts import prune_alerts
from ..engine.batches import OPEN_SECONDS, seal_abandoned
from ..engine.dispatch import PendingMaintenance, dispatch, fetch_pending, next_due_in
from ..engine.limit_sweeps import replan_rates, reserve_times, sweep, unblock_orphans
from ..engine.ready_jobs import ReadyJobs
from ..engine.retention import (
    prune_batches,
    prune_failures,
    prune_jobs,
    prune_operations,
    prune_semaphores,
    prune_statistics,
)
from ..engine.statistics import fold
from ..models import Failure, Job, Process
from ..models.enums import State
from . import lifecycle, recovery
from .announcer import announce_beside
from .connections import close_connections, discard, leave_old_connections, prepare
from .failure_detector import FailureDetector
from .heartbeat import Heartbeat
from .logging_setup import RepeatedProblem
from .scheduler import Scheduler
from .shared_status import SharedStatus
from .shutdown import Shutdown
from .socket_watchdog import deadline

if TYPE_CHECKING:
    from .alert_watch import AlertWatch


class Dispatcher:
    """A dispatcher. Any number may run, on any hosts: each step is safe under concurrency."""

    # Whether this dispatcher enqueues recurring tasks, and sends alerts.
    schedules = True
    BATCH = 1000
    # Seconds between two scans for rows to prune.
    PRUNE = 60.0
    # Seconds between two scans for blocked jobs with a free slot, and for rates whose next times
    # are to be reserved.
    SWEEP = 2.0
    # Seconds between two additions of new counts to the statistics, and the most rows in one.
    FOLD, MOST_COUNTS = 5.0, 5000
    # The first delay before a due job with a locked row is retried, in seconds.
    LOCKED = 0.01
    # The longest delay after a round rolled back by a conflict with another dispatcher, in seconds.
    CONFLICT = 0.1
    # A statement that reads all blocked jobs is not repeated for REST times its duration.
    REST = 50.0

    def __init__(self, backend: DatabaseBackend, options: Options, status: SharedStatus) -> None:
        self._backend, self._database, self._options, self._status = (
            backend,
            backend.database,
            options,
            status,
        )
        self._jobs = Job.objects.using(backend.database)
        self._heartbeat = Heartbeat(Process.Kind.DISPATCHER, backend.database, options, status, {})
        self._failure_detector = FailureDetector(options.patience, options.statement_limit)
        self._scheduler = Scheduler(backend)
        self._ready = ReadyJobs(backend.database)
        self._prune_at = self._sweep_at = self._unblock_orphans_at = time.monotonic()
        self._fold_at = time.monotonic()
        self._locked_pause = self.LOCKED
        # Whether times may have been planned while the database's clock was ahead.
        self._is_to_replan = True
        self._problem = RepeatedProblem("dispatcher: due jobs could not be made ready")
        self._statistics_problem = RepeatedProblem("dispatcher: statistics could not be written")

    def run(self, stop: Shutdown, supervisor: int | None = None) -> bool:
        """Run until ``stop`` is requested. Returns True: a dispatcher leaves nothing behind."""
        prepare(self._database, self._options.statement_limit)
        process = self._heartbeat.start(supervisor)
        logger.info(
            "%s polls for due jobs every %g s.",
            process,
            self._options.poll_interval,
            extra=process.log_fields,
        )
        kinds = ("dispatcher", "scheduler") if self.schedules else ("dispatcher",)
        lifecycle.send("started", process, *kinds)
        self._status.mark_ready()
        alerts = self._watch_for_alerts()
        try:
            self._loop(stop)
        finally:
            if alerts:
                alerts.stop()
        lifecycle.send("stopping", process, *kinds)
        self._heartbeat.stop()
        close_connections()
        lifecycle.send("stopped", process, *kinds)
        return True

    def _loop(self, stop: Shutdown) -> None:
        while not (
            stop.requested or self._heartbeat.declared_dead or self._status.is_drain_requested
        ):
            self._status.tick()
            with deadline(self._options.answer_limit):
                pause = self._work()
            self._status.tick(ahead=pause)
            stop.wait(pause)

    def _watch_for_alerts(self) -> AlertWatch | None:
        if not (self.schedules and self._options.alerts):
            return None
        # It costs every process of runqueue 3 MB.
        from .alert_watch import AlertWatch

        watch = AlertWatch(self._backend, self._options)
        watch.start()
        return watch

    def _work(self) -> float:
        """Run one round. Returns the number of seconds that the next round can wait."""
        # Often enough for the failure detector, which tolerates no long gap.
        pause = min(
            self._options.poll_interval, self._options.statement_limit / 2
        ) * random.uniform(0.95, 1.0)
        leave_old_connections()
        try:
            if not (pending := fetch_pending(self._database)):
                return pause
            self._replan(pending)
            queues = dispatch(self._database, self.BATCH) if pending.due_in == 0.0 else []
            due_in = self._due_in(pending, bool(queues))
            notify_queues(self._database, queues)
            self._sweep(pending)
            self._recover(pending)
            longest = self._scheduler.turn(pending.recurring) if self.schedules else pause
            self._problem.over()
            self._fold(pending)
            if queues or self._prune():
                return 0.0
            return min(pause, longest, max(0.01, pause if due_in is None else due_in))
        except (DatabaseError, InterfaceError) as error:
            discard(self._database)
            if is_conflict(error):
                return random.uniform(0.0, self.CONFLICT)
            self._problem.report(error)
            return pause

    def _due_in(self, pending: PendingMaintenance, found: bool) -> float | None:
        """Return the seconds until the next job is due.

        A due job with a locked row is retried after delays that double.
        """
        if found or pending.due_in != 0.0:
            self._locked_pause = self.LOCKED
            return pending.due_in
        self._locked_pause *= 2
        return min([self._locked_pause, *next_due_in(self._database)])

    def _sweep(self, pending: PendingMaintenance) -> None:
        """Unblock jobs and finish batches that no settlement has handled.

        Settling a job unblocks the next one and finishes its batch. This scan finds missed cases
        and those without a settlement.
        """
        if time.monotonic() < self._sweep_at:
            return
        self._sweep_at = time.monotonic() + self.SWEEP * random.uniform(0.8, 1.2)
        if pending.blocked:
            if reserve_times(self._database):
                self._sweep_at = time.monotonic()
            notify_queues(self._database, sweep(self._database, self.BATCH, self._ready))
            self._unblock_orphans()
        if pending.batches:
            for batch in seal_abandoned(self._database):
                logger.warning(
                    "dispatcher: batch %s is abandoned: its opener added no job for %g s "
                    "and did not end.",
                    batch,
                    OPEN_SECONDS,
                )
            self._backend.finish_batches()

    def _fold(self, pending: PendingMaintenance) -> None:
        """Add new counts to the statistics; if more remain, again in the next round.

        Statistics that cannot be written delay nothing else.
        """
        if not pending.counts or time.monotonic() < self._fold_at:
            return
        try:
            are_more = fold(self._database, self.MOST_COUNTS)
            self._statistics_problem.over()
        except Exception as error:
            discard(self._database)
            are_more = is_conflict(error)
            if not are_more:
                self._statistics_problem.report(error)
        if not are_more:
            self._fold_at = time.monotonic() + self.FOLD * random.uniform(0.8, 1.2)

    def _unblock_orphans(self) -> None:
        began = time.monotonic()
        if began >= self._unblock_orphans_at:
            queues = unblock_orphans(self._database, self.BATCH, self._ready)
            notify_queues(self._database, queues)
            self._unblock_orphans_at = time.monotonic() + min(
                self.PRUNE, self.REST * (time.monotonic() - began)
            )

    def _replan(self, pending: PendingMaintenance) -> None:
        """Replan future times, at the start and after the database's clock was set back."""
        self._is_to_replan |= self._failure_detector.observe(pending.now)
        if self._is_to_replan:
            self._scheduler.replan()
            replan_rates(self._database)
            self._is_to_replan = False

    def _recover(self, pending: PendingMaintenance) -> None:
        if pending.silent or pending.orphaned:
            processes = Process.objects.using(self._database)
            silent = (
                processes.silent() if self._failure_detector.can_declare_dead else processes.none()
            )
            death = recovery.ExitReason(how="was silent for too long", silent=True)
            recovery.recover(self._backend, silent, death, partial(announce_beside, self._backend))

    def _prune(self) -> bool:
        """Delete some rows past their retention. Returns whether more may remain."""
        if time.monotonic() < self._prune_at:
            return False
        others = [
            self._scheduler.prune(self.BATCH),
            prune_semaphores(self._database, self.BATCH),
            prune_statistics(self._database, self._options.keep_statistics, self.BATCH),
        ]
        if (kept := self._options.keep_operations) is not None:
            others.append(prune_operations(self._database, kept, self.BATCH))
        if self._prune_some() or self.BATCH in others:
            return True
        Failure.objects.using(self._database).unmute()
        prune_alerts(self._database)
        every = [self._options, *self._own_options().values()]
        if times := [each.keep_failed for each in every if each.keep_failed is not None]:
            prune_failures(self._database, max(times))
            prune_batches(self._database, max(times))
        self._prune_at = time.monotonic() + self.PRUNE * random.uniform(0.8, 1.2)
        return False

    def _own_options(self) -> dict[str, Options]:
        """Return the options of the queues that have their own."""
        return {queue: self._backend.options_of(queue) for queue in self._options.per_queue}

    def _prune_some(self) -> bool:
        own = self._own_options()
        kept = [(self._jobs.filter(queue=queue), options) for queue, options in own.items()]
        return any(
            seconds is not None and prune_jobs(rows, states, seconds, self.BATCH)
            for rows, options in [*kept, (self._jobs.exclude(queue__in=list(own)), self._options)]
            for states, seconds in (
                ([State.SUCCESSFUL], options.keep_successful),
                ([State.FAILED, State.DISCARDED], options.keep_failed),
            )
        )


class DrainingDispatcher(Dispatcher):
    """Dispatcher for ``runqueue --drain``, which would never end if jobs were always added."""

    schedules = False
