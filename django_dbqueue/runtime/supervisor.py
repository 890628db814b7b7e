"""Starts the other roles, watches them, replaces those that end, and stops them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

from django.db import DatabaseError, InterfaceError

from ..backend import DatabaseBackend
from ..models import Job, Process, Queue
from ..models.expressions import Now
from ..models.job import JobQuerySet
from ..selector import QueueSelector
from . import recovery
from .connection import close_connections, discard, snapshot
from .heartbeat import Heartbeat
from .members import Member, ProcessMember, ThreadMember
from .stop import Stop

logger = logging.getLogger("django_dbqueue")


class Supervisor:
    """Keeps ``roles`` running for a backend. ``changes`` are those of the command line to the backend's options."""

    GRACE = 10.0

    def __init__(self, backend: DatabaseBackend, roles: list[str], changes: dict[str, Any], *, drain: bool = False) -> None:
        self._backend, self._roles, self._changes, self._drain = backend, roles, changes, drain
        self._options = backend.config.changed(**changes)
        self._selector = QueueSelector(self._options.queues, frozenset(backend.queues))
        self._heartbeat = Heartbeat(Process.Kind.SUPERVISOR, backend.database, self._options, {"roles": roles})
        self._members: list[Member] = []
        self._born: dict[Member, float] = {}
        self._crashes = 0

    def run(self, stop: Stop) -> int:
        """Until ``stop`` is asked for, or the queues are drained. Returns the exit code: 1 if a drained job failed."""
        self._process = self._heartbeat.start()
        self._process.refresh_from_db()
        self._say_who_runs()
        try:
            self._start_missing()
            while not stop.wait(0.1 if self._drain else 0.5):
                self._bury_the_dead(stop)
                self._start_missing()
                if self._drain and self._drained():
                    break
        finally:
            self._stop_members(stop)
        code = 1 if self._drain and self._any_failed() else 0
        self._heartbeat.stop()
        close_connections()
        return code

    def _say_who_runs(self) -> None:
        what = ", ".join(f"{number} {role}{'s' * (number > 1)}" for role, number in Counter(self._roles).items())
        how = "in this process" if self._options.embedded else "each in a process of its own"
        fields = self._process.log_fields
        logger.info("%s runs %s, %s, for the queues %s.", self._process, what, how, self._selector, extra=fields)

    def _start_missing(self) -> None:
        kind = ThreadMember if self._options.embedded else ProcessMember
        for role in (Counter(self._roles) - Counter(member.role for member in self._members)).elements():
            try:
                member = kind(role, self._backend.alias, self._changes, self._process.pk)
            except OSError as error:
                logger.error("A %s could not be started, and is tried again: %s", role, error, extra=self._process.log_fields)
                return
            self._members.append(member)
            self._born[member] = time.monotonic()

    def _bury_the_dead(self, stop: Stop) -> None:
        for member in [m for m in self._members if m.exitcode is not None]:
            self._members.remove(member)
            lived = time.monotonic() - self._born.pop(member)
            if member.exitcode:
                logger.error("The %s with process id %s died (%s).", member.role, member.pid, _cause(member.exitcode))
                self._recover(member)
                # Who dies as soon as it is born is not born again at once.
                self._crashes = self._crashes + 1 if lived < 10 else 1
                stop.wait(min(30.0, 0.1 * 2 ** min(self._crashes - 1, 10)))

    def _recover(self, member: Member) -> None:
        dead = Process.objects.filter(supervisor=self._process.pk, pid=member.pid or 0)
        if isinstance(member, ThreadMember):
            dead = dead.filter(kind=member.role)
        try:
            recovery.recover(self._backend.database, dead)
        except (DatabaseError, InterfaceError) as error:
            logger.warning("Its jobs are left to a dispatcher: %s", error)
            discard(self._backend.database)

    def _stop_members(self, stop: Stop) -> None:
        logger.info("%s stops its members.", self._process, extra=self._process.log_fields)
        for member in self._members:
            member.stop()
        deadline = time.monotonic() + self._options.shutdown_timeout + self.GRACE
        hurried = False
        while any(m.exitcode is None for m in self._members) and time.monotonic() < deadline:
            if stop.now and not hurried:
                hurried = True
                for member in self._members:
                    member.stop(now=True)
            for member in self._members:
                member.join(0.02)
        for member in self._members:
            if member.exitcode is None:
                logger.error("The %s with process id %s does not end; it is killed.", member.role, member.pid)
                member.kill()
                member.join(1.0)
            if member.exitcode:
                self._recover(member)

    def _drained(self) -> bool:
        """Nothing is due in the served queues, and nothing runs here."""
        jobs = Job.objects.using(self._backend.database)
        try:
            with snapshot(jobs.db):
                return not self._any_left(jobs)
        except (DatabaseError, InterfaceError) as error:
            logger.warning("Whether there is more to do cannot be seen: %s", error)
            discard(jobs.db)
            return False

    def _any_left(self, jobs: JobQuerySet) -> bool:
        paused = set(Queue.objects.using(jobs.db).paused().values_list("name", flat=True))
        due = {lane.queue for lane in jobs.lanes(self._selector.names())}
        due.update(jobs.due().values_list("queue", flat=True).distinct())
        if any(self._selector.rank(queue) is not None for queue in due - paused):
            return True
        others = Process.objects.using(jobs.db).alive().exclude(supervisor=self._process.pk)
        return jobs.running().exclude(process__in=others).exists()  # Ours, or lost.

    def _any_failed(self) -> bool:
        failed = Job.objects.using(self._backend.database).filter(
            state=Job.State.FAILED, finished_at__gte=self._process.started_at, finished_at__lte=Now()
        )
        return any(self._selector.rank(queue) is not None for queue in failed.values_list("queue", flat=True).distinct())


def _cause(exitcode: int) -> str:
    return f"signal {-exitcode}" if exitcode < 0 else f"exit code {exitcode}"
