"""Supervisor: starts the other roles, watches them, replaces those that end, and stops them."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections import Counter

from django.db import DatabaseError, InterfaceError

from ...backend import DatabaseBackend
from ...core.queue_selector import QueueSelector
from ...models import Job, Process, StackTrace
from ...models.process import ProcessQuerySet
from .. import process_identity, recovery
from ..announcer import Announcements
from ..connections import close_connections, discard, leave_old_connections, prepare
from ..heartbeat import Heartbeat
from ..logging_setup import RepeatedProblem
from ..recovery import ExitReason
from ..shared_status import SharedStatus
from ..shutdown import Shutdown
from ..socket_watchdog import deadline
from .children import Child, ChildProcess, ChildThread
from .drain import Drain
from .roles import CANNOT_IMPORT, EXIT_JOBS_RUNNING

logger = logging.getLogger("django_dbqueue")


class Supervisor:
    """Keep ``roles`` running for a backend.

    ``changes`` are the command line's changes to the backend's options.
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
    ) -> None:
        self._backend, self._changes = backend, changes
        self._roles = [
            f"draining {role}" if drain and role == "dispatcher" else role for role in roles
        ]
        self.options = backend.config.changed(**changes)
        self._selector = QueueSelector(self.options.queues, frozenset(backend.queues))
        self._status = SharedStatus.private()
        self._heartbeat = Heartbeat(
            Process.Kind.SUPERVISOR, backend.database, self.options, self._status, {"roles": roles}
        )
        self._drain = (
            Drain(backend.database, self._selector, self.options, self._heartbeat.process)
            if drain
            else None
        )
        self._announcements = Announcements()
        self._children: list[Child] = []
        self._first_children: list[Child] = []
        # Dead processes whose jobs could not be recovered yet.
        self._unrecovered: list[tuple[ProcessQuerySet, ExitReason]] = []
        self._problem = RepeatedProblem(
            "supervisor: jobs of dead processes could not be recovered, retrying"
        )
        # Children that are already replaced, and when they are killed.
        self._leaving: dict[Child, float] = {}
        self._crashes, self._start_at = 0, 0.0
        self._code = 0
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
        self._recover(self._gone(), ExitReason(how="is gone from this host", silent=True))
        try:
            self._start_missing()
            self._first_children = list(self._children)
            while not self._code and not self._rest(stop):
                self._status.tick()
                leave_old_connections()
                self._recover_dead()
                self._look_after_members()
                self._start_missing()
                if self._drain and self._drain.is_over():
                    break
                self._give_up_at_last()
        finally:
            self._stop_members(stop)
        if self._drain and not self._code and self._drain.any_failed():
            self._code = 1
        self._announcements.close()
        self._heartbeat.stop()
        close_connections()
        return self._code

    def end_if_stuck(self) -> None:
        """Exit if the main loop has made no progress for very long.

        A service manager then restarts the process. Called from another thread. It does not log: a
        log handler that hangs may be the cause.
        """
        if self._status.since_loop_tick() > self.options.patience + self.options.longest_shutdown:
            os.write(
                2,
                b"CRITICAL supervisor: no progress; this process ends. Its threads:\n",
            )
            faulthandler.dump_traceback(file=2, all_threads=True)
            os._exit(EXIT_JOBS_RUNNING)

    def _rest(self, stop: Shutdown) -> bool:
        """Wait until the next check of the children. Returns whether to stop."""
        # The exit code is available a moment after the end is reported.
        soon = self._drain or self._was_woken or time.monotonic() < self._start_at
        self._was_woken = self._wake.wait(self.SHORT if soon else self.REST)
        self._wake.clear()
        return stop.requested

    def _say_who_runs(self) -> None:
        what = ", ".join(
            f"{number} {role}{'s' * (number > 1)}" for role, number in Counter(self._roles).items()
        )
        how = "in this process" if self.options.embedded else "each in a process of its own"
        fields = self._process.log_fields
        logger.info(
            "%s runs %s, %s, for the queues %s.",
            self._process,
            what,
            how,
            self._selector,
            extra=fields,
        )

    def _give_up_at_last(self) -> None:
        if self._heartbeat.silent_for > self.options.give_up_after:
            logger.critical(
                "supervisor: database unavailable for %d s; giving up.", self._heartbeat.silent_for
            )
            self._code = 1

    def _start_missing(self) -> None:
        finished = self._announcements.reader
        kind = ChildThread if self.options.embedded else ChildProcess
        if time.monotonic() < self._start_at:
            return
        for role in (
            Counter(self._roles) - Counter(child.role for child in self._children)
        ).elements():
            try:
                child = kind(
                    role,
                    self._backend.alias,
                    self.options,
                    self._changes,
                    self._process.pk,
                    finished,
                    self._wake.set,
                )
            except OSError as error:
                logger.error(
                    "supervisor: %s could not be started; retrying: %s",
                    role,
                    error,
                    extra=self._process.log_fields,
                )
                return
            self._children.append(child)

    def _look_after_members(self) -> None:
        for child in [*self._children, *self._leaving]:
            self._status.tick()
            if child.exitcode is not None:
                self._deregister_dead(child)
            elif self._is_frozen(child):
                self._end_frozen(child)
            elif child.status.since_loop_tick() > self.options.patience:
                child.stop()
                self._replace(child, time.monotonic() + self.options.shutdown_timeout + self.GRACE)
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
        self._forget(child)
        if child.exitcode == CANNOT_IMPORT and child in self._first_children:
            logger.critical(
                "supervisor: tasks cannot be imported for the reasons above; shutting down. "
                "Fix them (`manage.py check` shows them), or serve the other tasks with "
                "--allow-import-errors."
            )
            self._code = 1
            return
        if child.exitcode:
            level = logging.INFO if child.exitcode == EXIT_JOBS_RUNNING else logging.ERROR
            logger.log(
                level, "supervisor: %s (pid %s) %s.", child.role, child.pid, _death(child).how
            )
            self._recover(self._of(child), _death(child))
        if child.exitcode not in (0, EXIT_JOBS_RUNNING):
            # Crash loop: back off before restarting a child that died within 10 s.
            self._crashes = self._crashes + 1 if time.monotonic() - child.born < 10 else 1
            if self._crashes % self.CRASH_LOOP == 0:
                logger.critical(
                    "supervisor: crash loop: the last %d processes died within 10 s of their "
                    "start; this one, a %s, %s. "
                    "See the errors above and the output of `manage.py check`.",
                    self._crashes,
                    child.role,
                    _death(child).how,
                )
            self._start_at = time.monotonic() + min(30.0, 0.1 * 2 ** min(self._crashes - 1, 10))

    def _replace(self, child: Child, end: float) -> None:
        """Let a replacement start while the child comes to its end."""
        if child in self._children:
            self._children.remove(child)
        self._leaving[child] = min(end, self._leaving.get(child, end))

    def _forget(self, child: Child) -> None:
        child.close()
        self._leaving.pop(child, None)
        if child in self._children:
            self._children.remove(child)

    def _is_frozen(self, child: Child) -> bool:
        """Return whether no thread of the child has run for long and the child must end.

        It must end if others will declare it dead, or if a job has timed out.
        """
        silent = child.status.since_gil_alive()
        if silent < self.FROZEN:
            return False
        return silent > self.options.patience or bool(self._overdue(child))

    def _overdue(self, child: Child) -> list[Job]:
        try:
            with deadline(self.options.answer_limit):
                rows = Job.objects.using(self._backend.database).overdue(self.options.timeout_grace)
                return list(rows.filter(process__in=self._of(child)))
        except (DatabaseError, InterfaceError) as error:
            logger.warning("supervisor: could not check for overdue jobs: %s", error)
            discard(self._backend.database)
            return []

    def _end_frozen(self, child: Child) -> None:
        overdue, stacks = self._overdue(child), child.stacks()
        try:
            for job in overdue:
                StackTrace.objects.using(self._backend.database).record(job, stacks)
        except (DatabaseError, InterfaceError) as error:
            logger.warning(
                "supervisor: could not store the stack traces of overdue jobs: %s\n%s",
                error,
                stacks,
            )
            discard(self._backend.database)
        self._kill(child, "did not let go of its interpreter", innocent=bool(overdue))

    def _kill(self, child: Child, why: str, *, innocent: bool) -> None:
        logger.error("supervisor: %s (pid %s) %s; it is killed.", child.role, child.pid, why)
        child.kill()
        child.join(1.0)
        self._forget(child)
        not_started = frozenset(child.status.not_started())
        self._recover(
            self._of(child),
            ExitReason(how=f"{why} and was killed", innocent=innocent, not_started=not_started),
        )

    def _of(self, child: Child) -> ProcessQuerySet:
        rows = Process.objects.using(self._backend.database).filter(
            supervisor=self._process.pk, pid=child.pid or 0
        )
        return rows.filter(kind=child.role)

    def _gone(self) -> ProcessQuerySet:
        """Return the processes that were killed together with their supervisor, on this host."""
        rows = Process.objects.using(self._backend.database)
        here = rows.filter(hostname=self._process.hostname).exclude(pk=self._process.pk)
        return rows.filter(
            pk__in=[each.pk for each in here if process_identity.is_gone(each.pid, each.details)]
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
        end = time.monotonic() + self.options.shutdown_timeout + self.GRACE
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
            elif child.exitcode:
                self._recover(self._of(child), _death(child))
            child.close()


def _death(child: Child) -> ExitReason:
    """Return the exit reason of a child that has an exit code."""
    code, not_started = child.exitcode or 0, frozenset(child.status.not_started())
    clock = min(child.ended_at, time.monotonic())
    if code == EXIT_JOBS_RUNNING:
        return ExitReason(how="was shut down", innocent=True, not_started=not_started, clock=clock)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ExitReason(how=how, not_started=not_started, clock=clock)
