"""Starts the other roles, watches them, replaces those that end, and stops them."""

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
from ...models import Job, Process, Stack
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
    """Keeps ``roles`` running for a backend. ``changes`` are those of the command line to the backend's options."""

    # A member that is told to stop has so many seconds more than its jobs have.
    GRACE = 5.0
    # A process whose interpreter has not run for so long has a thread that does not let go of it.
    FROZEN = 3.0
    # How long it rests, in seconds, if no member ends; and if there is something to wait for.
    REST, SHORT = 1.0, 0.1
    # The number of members that die right after their start, in a row, at which the log names a crash loop.
    CRASH_LOOP = 5

    def __init__(self, backend: DatabaseBackend, roles: list[str], changes: dict[str, Any], *, drain: bool = False) -> None:
        self._backend, self._changes = backend, changes
        self._roles = [f"draining {role}" if drain and role == "dispatcher" else role for role in roles]
        self.options = backend.config.changed(**changes)
        self._selector = QueueSelector(self.options.queues, frozenset(backend.queues))
        self._board = SharedStatus.private()
        self._heartbeat = Heartbeat(Process.Kind.SUPERVISOR, backend.database, self.options, self._board, {"roles": roles})
        self._drain = Drain(backend.database, self._selector, self.options, self._heartbeat.process) if drain else None
        self._announcements = Announcements()
        self._members: list[Child] = []
        self._first_members: list[Child] = []
        # Dead processes whose jobs could not be recovered yet.
        self._unrecovered: list[tuple[ProcessQuerySet, ExitReason]] = []
        self._trouble = Trouble("Jobs of dead processes could not be recovered, and recovery is tried again")
        # Those that are replaced already, and when they are killed.
        self._leaving: dict[Child, float] = {}
        self._crashes, self._start_at = 0, 0.0
        self._code = 0
        self._wake, self._was_woken = threading.Event(), False

    def run(self, stop: Shutdown) -> int:
        """Until ``stop`` is asked for, or the queues are drained. Returns the exit code.

        1 if a drained job failed, the database was away for too long, or tasks cannot be imported; EXIT_JOBS_RUNNING if a job of an
        embedded worker does not let itself be stopped.
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
        """End the process if the main loop has not come round for very long, to be started again by a service manager.

        Called from another thread. It does not log: a log handler that hangs may be the cause.
        """
        if self._board.since_loop_tick() > self.options.patience + self.options.longest_shutdown:
            os.write(2, b"CRITICAL The supervisor makes no progress: this process ends. Where its threads are:\n")
            faulthandler.dump_traceback(file=2, all_threads=True)
            os._exit(EXIT_JOBS_RUNNING)

    def _rest(self, stop: Shutdown) -> bool:
        """Until it is time to look at its members. Returns whether to stop."""
        # The exit code is there a moment after the end is told of.
        soon = self._drain or self._was_woken or time.monotonic() < self._start_at
        self._was_woken = self._wake.wait(self.SHORT if soon else self.REST)
        self._wake.clear()
        return stop.asked

    def _say_who_runs(self) -> None:
        what = ", ".join(f"{number} {role}{'s' * (number > 1)}" for role, number in Counter(self._roles).items())
        how = "in this process" if self.options.embedded else "each in a process of its own"
        fields = self._process.log_fields
        logger.info("%s runs %s, %s, for the queues %s.", self._process, what, how, self._selector, extra=fields)

    def _give_up_at_last(self) -> None:
        if self._heartbeat.silent_for > self.options.give_up_after:
            logger.critical("The database has been away for %d s: giving up.", self._heartbeat.silent_for)
            self._code = 1

    def _start_missing(self) -> None:
        finished = self._announcements.reader
        kind = ChildThread if self.options.embedded else ChildProcess
        if time.monotonic() < self._start_at:
            return
        for role in (Counter(self._roles) - Counter(member.role for member in self._members)).elements():
            try:
                member = kind(role, self._backend.alias, self.options, self._changes, self._process.pk, finished, self._wake.set)
            except OSError as error:
                logger.error("A %s could not be started, and is tried again: %s", role, error, extra=self._process.log_fields)
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
                # A thread is still there; it ends with its process.
                self._code = self._code or EXIT_JOBS_RUNNING * isinstance(member, ChildThread)

    def _deregister_dead(self, member: Child) -> None:
        if member.exitcode == EXIT_JOBS_RUNNING and isinstance(member, ChildThread):
            logger.error("A job does not stop: this process ends, to be started again by whoever started it.")
            self._code = EXIT_JOBS_RUNNING
            return
        self._forget(member)
        if member.exitcode == CANNOT_IMPORT and member in self._first_members:
            logger.critical(
                "Tasks cannot be imported, for the reasons above: this process ends. Cure them (`manage.py check` shows them), "
                "or serve the other tasks with --allow-import-errors."
            )
            self._code = 1
            return
        if member.exitcode:
            level = logging.INFO if member.exitcode == EXIT_JOBS_RUNNING else logging.ERROR
            logger.log(level, "The %s with process id %s %s.", member.role, member.pid, _death(member).how)
            self._recover(self._of(member), _death(member))
        if member.exitcode not in (0, EXIT_JOBS_RUNNING):
            # Who dies as soon as it is born is not born again at once.
            self._crashes = self._crashes + 1 if time.monotonic() - member.born < 10 else 1
            if self._crashes % self.CRASH_LOOP == 0:
                logger.critical(
                    "Crash loop: the last %d processes died within 10 s of their start; this one, a %s, %s. "
                    "See the errors above, and what `manage.py check` says.",
                    self._crashes,
                    member.role,
                    _death(member).how,
                )
            self._start_at = time.monotonic() + min(30.0, 0.1 * 2 ** min(self._crashes - 1, 10))

    def _replace(self, member: Child, deadline: float) -> None:
        """Have another in its place while it comes to its end."""
        if member in self._members:
            self._members.remove(member)
        self._leaving[member] = min(deadline, self._leaving.get(member, deadline))

    def _forget(self, member: Child) -> None:
        member.close()
        self._leaving.pop(member, None)
        if member in self._members:
            self._members.remove(member)

    def _is_frozen(self, member: Child) -> bool:
        """No thread of it has run for long, and it must end: others will take it for dead, or a job's time is over."""
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
            logger.warning("Whether its jobs are overdue cannot be seen: %s", error)
            discard(self._backend.database)
            return []

    def _end_frozen(self, member: Child) -> None:
        overdue, stacks = self._overdue(member), member.stacks()
        try:
            for job in overdue:
                Stack.objects.using(self._backend.database).record(job, stacks)
        except (DatabaseError, InterfaceError) as error:
            logger.warning("Where its jobs were could not be stored: %s\n%s", error, stacks)
            discard(self._backend.database)
        self._kill(member, "did not let go of its interpreter", blameless=bool(overdue))

    def _kill(self, member: Child, why: str, *, blameless: bool) -> None:
        logger.error("The %s with process id %s %s; it is killed.", member.role, member.pid, why)
        member.kill()
        member.join(1.0)
        self._forget(member)
        not_started = frozenset(member.board.not_started())
        self._recover(self._of(member), ExitReason(how=f"{why} and was killed", blameless=blameless, not_started=not_started))

    def _of(self, member: Child) -> ProcessQuerySet:
        rows = Process.objects.using(self._backend.database).filter(supervisor=self._process.pk, pid=member.pid or 0)
        return rows.filter(kind=member.role)

    def _gone(self) -> ProcessQuerySet:
        """Those that were killed together with their supervisor, on this host."""
        rows = Process.objects.using(self._backend.database)
        here = rows.filter(hostname=self._process.hostname).exclude(pk=self._process.pk)
        return rows.filter(pk__in=[each.pk for each in here if process_identity.is_gone(each.pid, each.details)])

    def _recover(self, dead: ProcessQuerySet, death: ExitReason) -> None:
        self._unrecovered.append((dead, death))
        # The connection may have been lost since it was used: the second try has a new one.
        if not self._recover_dead():
            self._recover_dead()

    def _recover_dead(self) -> bool:
        """Recover the jobs of processes that died. Returns whether none are left to the next round, or to a dispatcher."""
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
        logger.info("%s stops its members.", self._process, extra=self._process.log_fields)
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
    """How a member died that has an exit code."""
    code, not_started = member.exitcode or 0, frozenset(member.board.not_started())
    clock = min(member.ended_at, time.monotonic())
    if code == EXIT_JOBS_RUNNING:
        return ExitReason(how="was told to end", blameless=True, not_started=not_started, clock=clock)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ExitReason(how=how, not_started=not_started, clock=clock)
