"""Writes outcomes in groups: those that come while one group is being written make the next."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Container
from dataclasses import replace

from django.db import transaction

from .. import errors
from ..models import Execution, Job, Settled, Settlement
from ..models.states import Outcome
from ..options import Options
from .connection import close_connections, discard, prepare
from .deadline import answered_within

logger = logging.getLogger("django_dbqueue")


class Settler:
    """A thread with a buffer. ``owns`` tells whether what the process has claimed may still be its own; ``told`` is called
    with what has been settled; ``limited`` are the queues of which only so many jobs may run at a time.
    """

    LARGEST_GROUP = 500
    # Between two tries, in seconds: during an outage, and for rows that somebody else holds at that moment.
    OUTAGE, HELD = 2.0, 0.05
    # After a group it rests so many times as long as writing it took, but no longer than that, in seconds, so that the next
    # is larger: a small one costs almost as much (1 ms of Python, and 10 µs for each outcome), and tasks have to wait for it.
    # What others wait for ends the rest.
    REST, LONGEST_REST = 20.0, 0.05

    def __init__(
        self,
        database: str,
        options: Options,
        owns: Callable[[], bool],
        told: Callable[[Settled], None] = lambda settled: None,
        limited: Callable[[], Container[str]] = tuple,
    ) -> None:
        self._database, self._options, self._owns, self._told, self._limited = database, options, owns, told, limited
        self._executions = Execution.objects.using(database)
        self._waiting: list[Settlement] = []
        self._writing: list[Settlement] = []
        self._changed = threading.Condition()
        self._idle = self._resting = self._closed = False
        self._longest_pause = self.OUTAGE
        self._thread = threading.Thread(target=self._run, name="settler", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether so much is to be written that more had better not be begun."""
        return len(self._waiting) > 2 * self.LARGEST_GROUP

    def put(self, settlement: Settlement) -> None:
        # Without the lock, for which all threads would wait.
        self._waiting.append(settlement)
        if self._idle or (self._resting and self._is_awaited(settlement)):
            with self._changed:
                self._changed.notify()

    def unsettled(self) -> list[Settlement]:
        with self._changed:
            return [*self._writing, *self._waiting]

    def close(self, timeout: float) -> None:
        """Write what is there, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        prepare(self._database, self._options.statement_limit)
        pause = rest = 0.0
        while group := self._take(pause, rest):
            began = time.monotonic()
            with answered_within(self._options.answer_limit):
                left = self._write(group)
            pause = min(self._longest_pause, pause * 2 or 0.02) * random.uniform(0.5, 1.0) if left else 0.0
            # None after a single outcome, nor while another full group is there.
            is_part = 1 < len(group) < self.LARGEST_GROUP
            rest = min(self.LONGEST_REST, (time.monotonic() - began) * self.REST) if is_part else 0.0
            self._put_back(left)
        close_connections()

    def _take(self, pause: float, rest: float) -> list[Settlement]:
        """The next group; empty once the settler is closed and has written all."""
        time.sleep(pause)
        with self._changed:
            self._resting = bool(rest)
            if rest:
                self._changed.wait_for(lambda: self._closed or any(map(self._is_awaited, self._waiting)), rest)
            self._resting, self._idle = False, True
            while not self._waiting and not self._closed:
                self._changed.wait()
            self._idle = False
            self._writing = self._waiting[: self.LARGEST_GROUP]
            del self._waiting[: self.LARGEST_GROUP]
            return self._writing

    def _is_awaited(self, outcome: Settlement) -> bool:
        """Whether other jobs may have to wait until it is written: for its slot, its place in the queue, or the next stage."""
        return bool(outcome.job.limits or outcome.new or outcome.job.queue in self._limited())

    def _put_back(self, settlements: list[Settlement]) -> None:
        with self._changed:
            self._waiting[:0] = settlements
            self._writing = []

    def _write(self, group: list[Settlement]) -> list[Settlement]:
        """Settle a group. Returns what must be tried again."""
        try:
            settled = self._executions.settle(group)
            self._longest_pause = self.HELD
            self._told(settled)
        except Exception as error:
            self._longest_pause = self.OUTAGE
            discard(self._database)
            return self._after_error(group, error)
        for settlement in settled.lost:
            logger.error(
                "Job %s (attempt %s) was lost to another process; its outcome is dropped.",
                *settlement.fence,
                extra=settlement.job.log_fields,
            )
        return settled.held

    def _after_error(self, group: list[Settlement], error: Exception) -> list[Settlement]:
        """An outage is waited for. What the database refuses, though it works, is found by halves: neighbours get through."""
        if not self._owns():
            logger.error("Outcomes are dropped, as this process was declared dead (%d): %s", len(group), error)
            return []
        if not self._would_take(_plain(group[0], error)):
            logger.warning("Outcomes could not be written, and are tried again (%d): %s", len(group), error)
            return group
        if len(group) > 1:
            half = len(group) // 2
            return self._write(group[:half]) + self._write(group[half:])
        return self._write_refused(group[0])

    def _would_take(self, outcome: Settlement) -> bool:
        """Whether the database works: a rehearsal, which is rolled back."""
        try:
            with transaction.atomic(using=self._database):
                self._executions.settle([outcome])
                transaction.set_rollback(True, using=self._database)
            return True
        except Exception:
            discard(self._database)
            return False

    def _write_refused(self, outcome: Settlement) -> list[Settlement]:
        """Once more, as the first error may have been a passing one; then without what the database does not take."""
        error: Exception
        for version in (outcome, _said_in_ascii(outcome)):
            try:
                settled = self._executions.settle([version])
                self._told(settled)
                return settled.held
            except Exception as refusal:
                discard(self._database)
                error = refusal
        job = outcome.job
        logger.error("The database refused the outcome of job %s: %s", job.pk, error, extra=job.log_fields)
        return self._write([_plain(outcome, error)])


def _said_in_ascii(outcome: Settlement) -> Settlement:
    """What its task has logged and noted must not cost a job its result."""
    log = outcome.log.encode("ascii", "backslashreplace").decode()
    return replace(outcome, log=log, noted=outcome.noted and outcome.noted.in_ascii())


def _plain(outcome: Settlement, error: Exception) -> Settlement:
    """The outcome with nothing in it that a database could refuse: a result that it does not take is a failure."""
    kind, state, report = outcome.outcome, outcome.state, outcome.error
    if outcome.result is not None:
        kind, state, report = Outcome.FAILED, Job.State.FAILED, errors.report(error)
        report = replace(report, message=f"The database refused what the task returned: {report.message}")
    return Settlement.of(
        outcome.job, kind, state, started_at=outcome.started_at, wait=outcome.wait, error=report and report.in_ascii()
    )
