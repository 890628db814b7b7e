"""Supervisor: starts the other roles, watches them, replaces those that end, and stops them."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections import Counter
from typing import Any

from django.db import DatabaseError, InterfaceError

from ...backend import DatabaseBackend
from ...core.queue_selector import QueueSelector
from ...models import Job, Process, StackTrace
from ...models.process import ProcessQuerySet
from .. import process_identity, recovery
from ..announcer import Announcements
from ..connections import close_connections, discard, leave_old_connections, prepare
from ..heartbeat import Heartbeat
from ..logging_setup import Trouble
from ..recovery import ExitReason
from ..shared_status import SharedStatus
from ..shutdown import Shutdown
from ..socket_watchdog import answered_within
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
        changes: dict[str, Any],
        *,
        drain: bool = False,
    ) -> None:
        self._backend, self._changes = backend, changes
        self._roles = [
            f"draining {role}" if drain and role == "dispatcher" else role for role in roles
        ]
        self.options = backend.config.changed(**changes)
        self._selector = QueueSelector(self.options.queues, frozenset(backend.queues))
        self._board = SharedStatus.private()
        self._heartbeat = Heartbeat(
            Process.Kind.SUPERVISOR, backend.database, self.options, self._board, {"roles": roles}
        )
        self._drain = (
            Drain(backend.database, self._selector, self.options, self._heartbeat.process)
            if drain
            else None
        )
        self._announcements = Announcements()
        self._members: list[Child] = []
        self._first_members: list[Child] = []
        # Dead processes whose jobs could not be recovered yet.
        self._unrecovered: list[tuple[ProcessQuerySet, ExitReason]] = []
        self._trouble = Trouble(
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
        self._board.turn()
        prepare(self._backend.database, self.options.statement_limit)
        self._process = self._heartbeat.start()
        self._process.refresh_from_db(using=self._backend.database)
        stop.wakes(self._wake.set)
        self._say_who_runs()
        self._recover(self._gone(), ExitReason(how="is gone from this host", silent=True))
        try:
            self._start_missing()
            self._first_members = list(self._members)
            while not self._code and not self._rest(stop):
                self._board.turn()
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
        if self._board.since_loop_tick() > self.options.patience + self.options.longest_shutdown:
            os.write(
                2,
                b"CRITICAL The supervisor makes no progress: this process ends. Where its threads are:\n",
            )
            faulthandler.dump_traceback(file=2, all_threads=True)
            os._exit(EXIT_JOBS_RUNNING)

    def _rest(self, stop: Shutdown) -> bool:
        """Wait until the next check of the children. Returns whether to stop."""
        # The exit code is available a moment after the end is reported.
        soon = self._drain or self._was_woken or time.monotonic() < self._start_at
        self._was_woken = self._wake.wait(self.SHORT if soon else self.REST)
        self._wake.clear()
        return stop.asked

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
            Counter(self._roles) - Counter(member.role for member in self._members)
        ).elements():
            try:
                member = kind(
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
            self._members.append(member)

    def _look_after_members(self) -> None:
        for member in [*self._members, *self._leaving]:
            self._board.turn()
            if member.exitcode is not None:
                self._deregister_dead(member)
            elif self._is_frozen(member):
                self._end_frozen(member)
            elif member.board.since_loop_tick() > self.options.patience:
                member.stop()
                self._replace(member, time.monotonic() + self.options.shutdown_timeout + self.GRACE)
            elif member.board.is_draining:
                self._replace(member, float("inf"))
            if self._leaving.get(member, float("inf")) < time.monotonic():
                self._kill(member, "made no progress", blameless=True)
                # A thread still runs; it ends with its process.
                self._code = self._code or EXIT_JOBS_RUNNING * isinstance(member, ChildThread)

    def _deregister_dead(self, member: Child) -> None:
        if member.exitcode == EXIT_JOBS_RUNNING and isinstance(member, ChildThread):
            logger.error(
                "supervisor: a job does not stop; exiting with code 75 so that the service manager restarts us."
            )
            self._code = EXIT_JOBS_RUNNING
            return
        self._forget(member)
        if member.exitcode == CANNOT_IMPORT and member in self._first_members:
            logger.critical(
                "supervisor: tasks cannot be imported for the reasons above; shutting down. Fix them "
                "(`manage.py check` shows them), or serve the other tasks with --allow-import-errors."
            )
            self._code = 1
            return
        if member.exitcode:
            level = logging.INFO if member.exitcode == EXIT_JOBS_RUNNING else logging.ERROR
            logger.log(
                level, "supervisor: %s (pid %s) %s.", member.role, member.pid, _death(member).how
            )
            self._recover(self._of(member), _death(member))
        if member.exitcode not in (0, EXIT_JOBS_RUNNING):
            # Crash loop: back off before restarting a child that died within 10 s.
            self._crashes = self._crashes + 1 if time.monotonic() - member.born < 10 else 1
            if self._crashes % self.CRASH_LOOP == 0:
                logger.critical(
                    "supervisor: crash loop: the last %d processes died within 10 s of their start; this one, a %s, %s. "
                    "See the errors above and the output of `manage.py check`.",
                    self._crashes,
                    member.role,
                    _death(member).how,
                )
            self._start_at = time.monotonic() + min(30.0, 0.1 * 2 ** min(self._crashes - 1, 10))

    def _replace(self, member: Child, deadline: float) -> None:
        """Let a replacement start while the child comes to its end."""
        if member in self._members:
            self._members.remove(member)
        self._leaving[member] = min(deadline, self._leaving.get(member, deadline))

    def _forget(self, member: Child) -> None:
        member.close()
        self._leaving.pop(member, None)
        if member in self._members:
            self._members.remove(member)

    def _is_frozen(self, member: Child) -> bool:
        """Return whether no thread of the child has run for long and the child must end.

        It must end if others will declare it dead, or if a job has timed out.
        """
        silent = member.board.since_gil_alive()
        if silent < self.FROZEN:
            return False
        return silent > self.options.patience or bool(self._overdue(member))

    def _overdue(self, member: Child) -> list[Job]:
        try:
            with answered_within(self.options.answer_limit):
                rows = Job.objects.using(self._backend.database).overdue(self.options.timeout_grace)
                return list(rows.filter(process__in=self._of(member)))
        except (DatabaseError, InterfaceError) as error:
            logger.warning("supervisor: could not check for overdue jobs: %s", error)
            discard(self._backend.database)
            return []

    def _end_frozen(self, member: Child) -> None:
        overdue, stacks = self._overdue(member), member.stacks()
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
        self._kill(member, "did not let go of its interpreter", blameless=bool(overdue))

    def _kill(self, member: Child, why: str, *, blameless: bool) -> None:
        logger.error("supervisor: %s (pid %s) %s; it is killed.", member.role, member.pid, why)
        member.kill()
        member.join(1.0)
        self._forget(member)
        not_started = frozenset(member.board.not_started())
        self._recover(
            self._of(member),
            ExitReason(how=f"{why} and was killed", blameless=blameless, not_started=not_started),
        )

    def _of(self, member: Child) -> ProcessQuerySet:
        rows = Process.objects.using(self._backend.database).filter(
            supervisor=self._process.pk, pid=member.pid or 0
        )
        return rows.filter(kind=member.role)

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
            self._board.turn()
            try:
                with answered_within(self.options.answer_limit):
                    recovery.recover(self._backend, *self._unrecovered[0], self._announcements.put)
                self._unrecovered.pop(0)
                self._trouble.over()
            except (DatabaseError, InterfaceError) as error:
                self._unrecovered.append(self._unrecovered.pop(0))
                self._trouble.report(error)
                discard(self._backend.database)
                return False
        return True

    def _stop_members(self, stop: Shutdown) -> None:
        logger.info(
            "%s is shutting down its children.", self._process, extra=self._process.log_fields
        )
        members = [*self._members, *self._leaving]
        for member in members:
            member.stop()
        deadline = time.monotonic() + self.options.shutdown_timeout + self.GRACE
        hurried = False
        while any(m.exitcode is None for m in members) and time.monotonic() < deadline:
            self._board.turn()
            if stop.now and not hurried:
                hurried = True
                for member in members:
                    member.stop(now=True)
            for member in members:
                member.join(0.02)
        for member in members:
            if member.exitcode is None:
                self._kill(member, "did not end", blameless=True)
            elif member.exitcode:
                self._recover(self._of(member), _death(member))
            member.close()


def _death(member: Child) -> ExitReason:
    """Return the exit reason of a child that has an exit code."""
    code, not_started = member.exitcode or 0, frozenset(member.board.not_started())
    clock = min(member.ended_at, time.monotonic())
    if code == EXIT_JOBS_RUNNING:
        return ExitReason(how="was shut down", blameless=True, not_started=not_started, clock=clock)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ExitReason(how=how, not_started=not_started, clock=clock)
