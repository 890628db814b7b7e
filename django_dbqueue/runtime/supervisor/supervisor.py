"""Supervisor: starts the other roles, watches them, replaces those that end, and stops them."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections import Counter, deque

from django.db import DatabaseError, InterfaceError

from ... import signals
from ...backend import DatabaseBackend
from ...core.internal_errors import report, send_beside
from ...core.options import Options
from ...core.safe_log import logger
from ...models import Job, Process, StackTrace
from ...models.process import ProcessQuerySet
from .. import lifecycle, process_identity, recovery
from ..announcer import Announcements
from ..connections import close_connections, discard, leave_old_connections, prepare
from ..heartbeat import Heartbeat
from ..logging_setup import RepeatedProblem
from ..recovery import ExitReason
from ..shared_status import ENDURING, SharedStatus
from ..shutdown import Shutdown
from ..socket_watchdog import deadline
from .child_spec import ChildSpec, selectors, specs
from .children import Child, ChildProcess, ChildThread
from .drain import Drain, JointDrain
from .recycling import reason_to_recycle
from .restart_backoff import RestartBackoff
from .roles import CANNOT_IMPORT, EXIT_JOBS_RUNNING
from .rolling_replacement import RollingReplacement
from .settings_reader import BackendSettings, settings_of


class Supervisor:
    """Keep ``roles`` running for a backend: its groups of workers, and one of each other role.

    ``changes`` are the command line's changes to the backend's options. ``drains`` are the drains
    of all backends that this process serves.
    """

    # Seconds that a stopping child has in addition to those of its jobs.
    GRACE = 5.0
    # Seconds without a run of its interpreter after which a process has a thread that does not
    # release the GIL.
    FROZEN = 3.0
    # Seconds between two rounds if no child ends, and while an event is expected.
    REST, SHORT = 1.0, 0.1
    # Number of children in a row that die right after their start at which the log reports a crash
    # loop.
    CRASH_LOOP = 5

    def __init__(
        self,
        backend: DatabaseBackend,
        roles: list[str],
        changes: dict[str, object],
        *,
        drain: bool = False,
        drains: JointDrain | None = None,
    ) -> None:
        self._backend, self.alias, self.changes = backend, backend.alias, changes
        self.database = backend.database
        self._roles = [
            f"draining {role}" if drain and role == "dispatcher" else role for role in roles
        ]
        self._use(settings_of(backend))
        self._reloaded: deque[BackendSettings] = deque()
        self._status = SharedStatus.private()
        details: dict[str, object] = {"roles": [spec.role for spec in self._specs]}
        self._heartbeat = Heartbeat(
            Process.Kind.SUPERVISOR, backend.database, self.options, self._status, details
        )
        self._drains = drains or JointDrain([self.alias]) if drain else None
        self._announcements = Announcements()
        self._children: list[Child] = []
        self._backoff = RestartBackoff()
        self._replacement = RollingReplacement(self._start, self._retire, self._backoff.may_start)
        self._recycle_at = 0.0
        self._first_children: list[Child] = []
        # Dead processes whose jobs could not be recovered yet.
        self._unrecovered: list[tuple[ProcessQuerySet, ExitReason]] = []
        self._problem = RepeatedProblem(
            "supervisor: jobs of dead processes could not be recovered, retrying"
        )
        # Children that are already replaced, and when they are killed.
        self._leaving: dict[Child, float] = {}
        # The counts of workers that have ended. None is read while a worker is on its way there.
        self._ended_counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._code = 0
        self._is_serving = self._has_ended = False
        self._wake, self._was_woken = threading.Event(), False

    def run(self, stop: Shutdown) -> int:
        """Run until ``stop`` is requested or the queues are drained. Returns the exit code.

        The code is 1 if a drained job failed, the database was unavailable for too long, or tasks
        cannot be imported; EXIT_JOBS_RUNNING if a job of an embedded worker cannot be stopped.
        """
        self._status.tick()
        prepare(self._backend.database, self.options.statement_limit)
        self._process = self._heartbeat.start()
        self._process.refresh_from_db(using=self._backend.database)
        stop.on_request(self._wake.set)
        self._say_who_runs()
        lifecycle.send("started", self._process, "supervisor")
        self._recover(self._gone(), ExitReason(how="is gone from this host", silent=True))
        try:
            self._start_missing()
            self._first_children = list(self._children)
            self._is_serving = True
            while not self._code and not self._rest(stop):
                self._status.tick()
                leave_old_connections()
                self._recover_dead()
                self._look_after_members()
                self._use_reloaded()
                self._recycle()
                self._start_missing()
                if self._drains and self._drains.is_over(
                    self.alias, self._drain().is_over, self._claims
                ):
                    break
                self._give_up_at_last()
        finally:
            self._has_ended = True
            self._stop_members(stop)
        if self._drains and not self._code and self._drain().any_failed():
            self._code = 1
        self._announcements.close()
        self._heartbeat.stop()
        close_connections()
        lifecycle.send("stopped", self._process, "supervisor")
        return self._code

    def take_over(self, settings: BackendSettings) -> None:
        """Use new settings, and replace the children one by one. Called from another thread."""
        self._reloaded.append(settings)
        self._wake.set()

    @property
    def slowest_options(self) -> Options:
        """The options with the largest shutdown_timeout of all that are in use.

        Children that a reload has not replaced yet have older ones.
        """
        older = [child.spec.options for child in [*self._children, *self._leaving]]
        return max([self.options, *older], key=lambda each: each.shutdown_timeout)

    @property
    def composition(self) -> str:
        """The processes that are to run, by role, such as ``2 workers, 1 dispatcher``."""
        roles = Counter(spec.role for spec in self._specs)
        return ", ".join(f"{number} {role}{'s' * (number > 1)}" for role, number in roles.items())

    def worker_measures(self) -> dict[str, float]:
        """Return the sums of what this process's workers count and measure.

        Of the delays before a poll, the longest. Called from another thread.
        """
        with self._counts_lock:
            found = [
                child.status.measures()
                for child in {*self._children, *self._leaving}
                if child.role == "worker"
            ]
            sums = Counter(self._ended_counts)
        for each in found:
            sums.update(each)
        return {**sums, "poll_delay": max((each["poll_delay"] for each in found), default=0.0)}

    def why_not_live(self) -> list[str]:
        """Return why this process should be replaced; empty if it should not.

        Called from another thread.
        """
        seconds = self._status.since_loop_tick()
        if seconds <= self.options.patience + self.slowest_options.longest_shutdown:
            return []
        return [f"the main loop has made no progress for {seconds:.0f} s"]

    def why_not_ready(self) -> list[str]:
        """Return why the queues are not served as they should be; empty if they are.

        Called from another thread.
        """
        if self._has_ended:
            return ["is shutting down"]
        if not self._is_serving:
            return ["is starting: it waits for the database, or recovers jobs"]
        found = self.why_not_live()
        if not self._heartbeat.healthy:
            silent = self._heartbeat.silent_for
            found.append(f"the database has not answered for {silent:.0f} s")
        ready = [child.spec for child in list(self._children) if child.status.is_ready]
        for role in dict.fromkeys(spec.role for spec in self._specs):
            wanted = [spec.role for spec in self._specs].count(role)
            started = min(wanted, [spec.role for spec in ready].count(role))
            if started < wanted:
                found.append(f"{started} of {wanted} {role}s have started")
        return found

    @property
    def stuck_after(self) -> float:
        """Seconds without progress of the main loop after which the process ends."""
        return self.options.patience + self.slowest_options.longest_shutdown

    def end_if_stuck(self) -> None:
        """Exit if the main loop has made no progress for very long.

        A service manager then restarts the process. Called from another thread. It does not log: a
        log handler that hangs may be the cause.
        """
        if self._status.since_loop_tick() > self.stuck_after:
            os.write(
                2,
                b"CRITICAL supervisor: no progress; this process ends. Its threads:\n",
            )
            faulthandler.dump_traceback(file=2, all_threads=True)
            os._exit(EXIT_JOBS_RUNNING)

    def _use(self, settings: BackendSettings) -> None:
        self.settings, self.options = settings, settings.config.changed(**self.changes)
        self._specs = specs(settings.config, self._roles, self.changes)
        workers = [spec for spec in self._specs if spec.role == "worker"]
        self._selectors = selectors(workers or self._specs, settings.queues)

    def _use_reloaded(self) -> None:
        while self._reloaded:
            self._use(self._reloaded.popleft())
            for child in self._children:
                child.is_outdated = True
            self._say_who_runs("was reloaded and runs")

    def _drain(self) -> Drain:
        process = self._heartbeat.process
        return Drain(self._backend.database, self._selectors, self.options, process)

    def _claims(self) -> dict[str, int]:
        children = [*self._children, *self._leaving]
        return {child.status.name: child.status.claimed for child in children}

    def _rest(self, stop: Shutdown) -> bool:
        """Wait until the next check of the children. Returns whether to stop."""
        # The exit code is available a moment after the end is reported.
        soon = self._drains or self._was_woken or self._backoff.is_waiting
        self._was_woken = self._wake.wait(self.SHORT if soon else self.REST)
        self._wake.clear()
        if self._heartbeat.is_to_stop:
            stop.request()
        return stop.requested

    def _say_who_runs(self, verb: str = "runs") -> None:
        how = "in this process" if self.options.embedded else "each in a process of its own"
        fields = self._process.log_fields
        logger.info(
            "%s %s %s, %s, for the queues %s.",
            self._process,
            verb,
            self.composition,
            how,
            "; ".join(map(str, self._selectors)),
            extra=fields,
        )

    def _give_up_at_last(self) -> None:
        if self._heartbeat.silent_for > self.options.give_up_after:
            logger.critical(
                "supervisor: database unavailable for %d s; giving up.", self._heartbeat.silent_for
            )
            self._code = 1

    def _start_missing(self) -> None:
        self._replacement.proceed(self._specs, self._children)

    def _start(self, spec: ChildSpec) -> Child | None:
        kind = ChildThread if self.options.embedded else ChildProcess
        finished = self._announcements.reader
        try:
            child = kind(spec, self.alias, self._process.pk, finished, self._wake.set)
        except OSError as error:
            report(
                error,
                "supervisor: %s could not be started; retrying: %s",
                spec.role,
                error,
                extra=self._process.log_fields,
            )
            return None
        child.status.keep(not self._has_room_to_replace(spec))
        self._children.append(child)
        return child

    def _retire(self, child: Child) -> None:
        child.status.request_drain()
        self._replace(child, float("inf"))

    def _recycle(self) -> None:
        """Mark worker processes that are too old or too large as outdated.

        Of each specification, no more than it has: processes that are replaced may run jobs for
        long, and each of them is one more than usual. That many keep the others past max_jobs.
        """
        for child in self._children:
            child.status.keep(not self._has_room_to_replace(child.spec))
        if time.monotonic() < self._recycle_at:
            return
        self._recycle_at = time.monotonic() + self.REST
        for child in self._children:
            if (
                not child.is_outdated
                and self._has_room_to_replace(child.spec)
                and (why := reason_to_recycle(child))
            ):
                child.is_outdated = True
                logger.info("supervisor: %s (pid %s) %s; replacing it.", child.role, child.pid, why)

    def _has_room_to_replace(self, spec: ChildSpec) -> bool:
        outdated = [child for child in self._children if child.is_outdated]
        replaced = [child.spec for child in [*outdated, *self._leaving]]
        return replaced.count(spec) < self._specs.count(spec)

    def _look_after_members(self) -> None:
        for child in [*self._children, *self._leaving]:
            self._status.tick()
            if child.exitcode is not None:
                self._deregister_dead(child)
            elif self._is_frozen(child):
                self._end_frozen(child)
            elif child.status.since_loop_tick() > child.spec.options.patience:
                child.stop()
                timeout = child.spec.options.shutdown_timeout
                self._replace(child, time.monotonic() + timeout + self.GRACE)
            elif child.status.is_draining:
                self._replace(child, float("inf"))
            if self._leaving.get(child, float("inf")) < time.monotonic():
                self._kill(child, "made no progress", innocent=True)
                # A thread still runs; it ends with its process.
                self._code = self._code or EXIT_JOBS_RUNNING * isinstance(child, ChildThread)

    def _deregister_dead(self, child: Child) -> None:
        if child.exitcode == EXIT_JOBS_RUNNING and isinstance(child, ChildThread):
            logger.error(
                "supervisor: a job does not stop; exiting with code 75 so that the service manager "
                "restarts us."
            )
            self._code = EXIT_JOBS_RUNNING
            return
        self._say_exited(child, _death(child).how)
        self._forget(child)
        if child.status.exit_code == CANNOT_IMPORT and child in self._first_children:
            logger.critical(
                "supervisor: tasks cannot be imported for the reasons above; shutting down. "
                "Fix them (`manage.py check` shows them), or serve the other tasks with "
                "--allow-import-errors."
            )
            self._code = 1
            return
        if _leaves_jobs(child):
            level = logging.ERROR if _has_crashed(child) else logging.INFO
            logger.log(
                level, "supervisor: %s (pid %s) %s.", child.role, child.pid, _death(child).how
            )
            self._recover(self._of(child), _death(child))
        if _has_crashed(child):
            # Crash loop: back off before restarting a child that died within 10 s.
            crashes = self._backoff.record(child.spec, born=child.born)
            if crashes % self.CRASH_LOOP == 0:
                logger.critical(
                    "supervisor: crash loop: the last %d processes died within 10 s of their "
                    "start; this one, a %s, %s. "
                    "See the errors above and the output of `manage.py check`.",
                    crashes,
                    child.role,
                    _death(child).how,
                )

    def _replace(self, child: Child, end: float) -> None:
        """Let a replacement start while the child comes to its end."""
        with self._counts_lock:
            if child in self._children:
                self._children.remove(child)
            self._leaving[child] = min(end, self._leaving.get(child, end))

    def _forget(self, child: Child) -> None:
        measures = child.status.measures()
        with self._counts_lock:
            if child.role == "worker":
                self._ended_counts.update({name: measures[name] for name in ENDURING})
            self._leaving.pop(child, None)
            if child in self._children:
                self._children.remove(child)
        child.close()

    def _is_frozen(self, child: Child) -> bool:
        """Return whether no thread of the child has run for long and the child must end.

        It must end if others will declare it dead, or if a job has timed out.
        """
        silent = child.status.since_gil_alive()
        if silent < self.FROZEN:
            return False
        return silent > child.spec.options.patience or bool(self._overdue(child))

    def _overdue(self, child: Child) -> list[Job]:
        try:
            with deadline(self.options.answer_limit):
                rows = Job.objects.using(self._backend.database).overdue(self.options.timeout_grace)
                return list(rows.filter(process__in=self._of(child)))
        except (DatabaseError, InterfaceError) as error:
            report(
                error,
                "supervisor: could not check for overdue jobs: %s",
                error,
                level=logging.WARNING,
            )
            discard(self._backend.database)
            return []

    def _end_frozen(self, child: Child) -> None:
        overdue, stacks = self._overdue(child), child.stacks()
        try:
            for job in overdue:
                StackTrace.objects.using(self._backend.database).record(job, stacks, {})
        except (DatabaseError, InterfaceError) as error:
            report(
                error,
                "supervisor: could not store the stack traces of overdue jobs: %s\n%s",
                error,
                stacks,
                level=logging.WARNING,
            )
            discard(self._backend.database)
        self._kill(child, "did not let go of its interpreter", innocent=bool(overdue))

    def _kill(self, child: Child, why: str, *, innocent: bool) -> None:
        logger.error("supervisor: %s (pid %s) %s; it is killed.", child.role, child.pid, why)
        child.kill()
        child.join(1.0)
        self._say_exited(child, f"{why} and was killed")
        self._forget(child)
        not_started = frozenset(child.status.not_started())
        self._recover(
            self._of(child),
            ExitReason(how=f"{why} and was killed", innocent=innocent, not_started=not_started),
        )

    def _say_exited(self, child: Child, reason: str) -> None:
        signal = signals.worker_exited if child.role == "worker" else signals.dispatcher_exited
        send_beside(
            signal,
            Process,
            process=self._process,
            pid=child.pid,
            exitcode=child.exitcode,
            reason=reason,
        )

    def _of(self, child: Child) -> ProcessQuerySet:
        """Return the process that a child has registered.

        Not by its process id: threads share that of their supervisor.
        """
        rows = Process.objects.using(self._backend.database)
        status = child.status.name
        return rows.filter(supervisor=self._process.pk, details__shared_status=status)

    def _gone(self) -> ProcessQuerySet:
        """Return the processes that were killed together with their supervisor, on this host."""
        rows = Process.objects.using(self._backend.database)
        here = rows.filter(hostname=self._process.hostname).exclude(pk=self._process.pk)
        return rows.filter(
            pk__in=[each.pk for each in here if process_identity.is_gone(each.pid, each.facts)]
        )

    def _recover(self, dead: ProcessQuerySet, death: ExitReason) -> None:
        self._unrecovered.append((dead, death))
        # The connection may have been lost since its last use: the second try has a new one.
        if not self._recover_dead():
            self._recover_dead()

    def _recover_dead(self) -> bool:
        """Recover the jobs of dead processes.

        Returns whether none are left to the next round or to a dispatcher.
        """
        while self._unrecovered:
            self._status.tick()
            try:
                with deadline(self.options.answer_limit):
                    recovery.recover(self._backend, *self._unrecovered[0], self._announcements.put)
                self._unrecovered.pop(0)
                self._problem.over()
            except (DatabaseError, InterfaceError) as error:
                self._unrecovered.append(self._unrecovered.pop(0))
                self._problem.report(error)
                discard(self._backend.database)
                return False
        return True

    def _stop_members(self, stop: Shutdown) -> None:
        logger.info(
            "%s is shutting down its children.", self._process, extra=self._process.log_fields
        )
        children = [*self._children, *self._leaving]
        for child in children:
            child.stop()
        lifecycle.send("stopping", self._process, "supervisor")
        end = time.monotonic() + self.slowest_options.shutdown_timeout + self.GRACE
        hurried = False
        while any(m.exitcode is None for m in children) and time.monotonic() < end:
            self._status.tick()
            if stop.immediate and not hurried:
                hurried = True
                for child in children:
                    child.stop(now=True)
            for child in children:
                child.join(0.02)
        for child in children:
            if child.exitcode is None:
                self._kill(child, "did not end", innocent=True)
            else:
                self._say_exited(child, _death(child).how)
                if _leaves_jobs(child):
                    self._recover(self._of(child), _death(child))
            child.close()


def _has_crashed(child: Child) -> bool:
    """Return whether a child with an exit code has crashed. A task may exit with any code."""
    return child.status.exit_code != child.exitcode or child.exitcode not in (0, EXIT_JOBS_RUNNING)


def _leaves_jobs(child: Child) -> bool:
    return _has_crashed(child) or child.exitcode == EXIT_JOBS_RUNNING


def _death(child: Child) -> ExitReason:
    """Return the exit reason of a child that has an exit code."""
    code, not_started = child.exitcode or 0, frozenset(child.status.not_started())
    clock = min(child.ended_at, time.monotonic())
    if not _has_crashed(child) and code == EXIT_JOBS_RUNNING:
        return ExitReason(how="was shut down", innocent=True, not_started=not_started, clock=clock)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ExitReason(how=how, not_started=not_started, clock=clock)
