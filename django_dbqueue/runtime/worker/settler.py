"""Writes attempt results in groups.

Results that arrive while one group is being written form the next group.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import replace

from django.db import transaction

from ...core import error_reports
from ...core.internal_errors import report
from ...core.options import Options
from ...core.safe_log import logger
from ...core.transactions import is_conflict, writing
from ...engine.attempt_result import AttemptResult
from ...engine.settle import settle
from ...models.enums import Fence, Outcome, State
from ..connections import close_connections, discard, prepare
from ..socket_watchdog import deadline
from .services import DEFAULT, WorkerServices

_LOST = "settler: job %s (attempt %s) was lost to another process; its result is dropped"
# The third argument is the lost commit: "its claim" or "its end".
TWICE = (
    "worker: job %s (attempt %s) runs twice: %s was lost, as in a failover that lost the last "
    "commits"
)


class Settler:
    """A thread that writes buffered attempt results."""

    LARGEST_GROUP = 500
    # The longest pause between two retries during an outage, in seconds.
    OUTAGE = 2.0
    # A result whose row another transaction has locked, or that the database refuses in any form,
    # is retried on its own, so that other results are written meanwhile. The pause doubles from
    # HELD_FIRST to HELD_LONGEST seconds. With more than MOST_HELD such results, no further jobs are
    # started.
    HELD_FIRST, HELD_LONGEST, MOST_HELD = 0.02, 1.0, 10_000
    # The settler pauses after a group for REST times its write time, at most LONGEST_REST seconds,
    # so that the next group is larger. A small group costs almost as much as a large one (1 ms of
    # Python, and 10 µs per result), and tasks have to wait for it. A result that other jobs wait
    # for cuts the pause short.
    REST, LONGEST_REST = 20.0, 0.05

    def __init__(self, database: str, options: Options, services: WorkerServices = DEFAULT) -> None:
        self._database, self._options, self._services = database, options, services
        self._waiting: list[AttemptResult] = []
        self._writing: list[AttemptResult] = []
        # A heap of results whose rows are locked elsewhere: the time of the next retry, a sequence
        # number as a tie-breaker, the pause, and the result.
        self._held: list[tuple[float, int, float, AttemptResult]] = []
        self._numbers = itertools.count()
        # The last pause of each result that is being retried now.
        self._pauses: dict[Fence, float] = {}
        self._changed = threading.Condition()
        self._idle = self._resting = self._closed = False
        self._thread = threading.Thread(target=self._run, name="settler", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    @property
    def full(self) -> bool:
        """Back-pressure: True if too many results are unwritten to start further jobs."""
        return len(self._waiting) > 2 * self.LARGEST_GROUP or len(self._held) > self.MOST_HELD

    @property
    def unwritten(self) -> int:
        """The number of results that are not written yet."""
        return len(self._waiting) + len(self._writing) + len(self._held)

    def put(self, result: AttemptResult) -> None:
        # Appends without the lock, for which all threads would contend.
        self._waiting.append(result)
        if self._idle or (self._resting and self._is_awaited(result)):
            with self._changed:
                self._changed.notify()

    def unwritten_results(self) -> list[AttemptResult]:
        """Return the results that are not written yet."""
        with self._changed:
            return [*self._writing, *self._waiting, *(held[-1] for held in self._held)]

    def close(self) -> None:
        """Write the remaining results, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        prepare(self._database, self._options.statement_limit)
        pause = rest = 0.0
        while group := self._take(pause, rest):
            began = time.monotonic()
            with deadline(self._options.answer_limit):
                left = self._write(group)
            pause = min(self.OUTAGE, pause * 2 or 0.02) * random.uniform(0.5, 1.0) if left else 0.0
            # No pause after a single result, nor after a full group: another full one may wait.
            is_part = 1 < len(group) < self.LARGEST_GROUP
            rest = (
                min(self.LONGEST_REST, (time.monotonic() - began) * self.REST) if is_part else 0.0
            )
            self._put_back(left)
        close_connections()

    def _take(self, pause: float, rest: float) -> list[AttemptResult]:
        """Return the next group: empty once the settler is closed and has written all results."""
        time.sleep(pause)
        with self._changed:
            self._resting = bool(rest)
            if rest:
                self._changed.wait_for(
                    lambda: self._closed or any(map(self._is_awaited, self._waiting)), rest
                )
            self._resting, self._idle = False, True
            while (
                not self._waiting
                and (self._held or not self._closed)
                and (left := self._until_held()) != 0.0
            ):
                self._changed.wait(left)
            self._idle = False
            again = self._due_of_held()
            number = self.LARGEST_GROUP - len(again)
            self._writing = [*self._waiting[:number], *again]
            del self._waiting[:number]
            return self._writing

    def _until_held(self) -> float | None:
        """Seconds until the next retry of a result whose row is locked; None if there is none."""
        return max(0.0, self._held[0][0] - time.monotonic()) if self._held else None

    def _due_of_held(self) -> list[AttemptResult]:
        due: list[AttemptResult] = []
        self._pauses = {}
        while self._until_held() == 0.0 and len(due) < self.LARGEST_GROUP // 2:
            _at, _number, pause, result = heapq.heappop(self._held)
            self._pauses[result.fence] = pause
            due.append(result)
        return due

    def _hold(self, results: Iterable[AttemptResult]) -> None:
        with self._changed:
            for result in results:
                pause = min(
                    self.HELD_LONGEST, 2 * self._pauses.get(result.fence, self.HELD_FIRST / 2)
                )
                heapq.heappush(
                    self._held, (time.monotonic() + pause, next(self._numbers), pause, result)
                )

    def _is_awaited(self, result: AttemptResult) -> bool:
        """Return whether other jobs may wait until the result is written.

        They wait for its slot, or its place in a queue with a limit. The next stage waits if a
        thread is free for it.
        """
        job = result.job
        return bool(
            (job.limits and not self._services.keeps_slot(job))
            or (result.new and self._services.has_room())
            or job.queue in self._services.limited_queues()
        )

    def _put_back(self, results: list[AttemptResult]) -> None:
        with self._changed:
            self._waiting[:0] = results
            self._writing = []

    def _write(self, group: list[AttemptResult]) -> list[AttemptResult]:
        """Settle a group. Return the results to retry after an outage."""
        error = self._settle(group)
        return self._after_error(group, error) if error else []

    def _settle(self, group: list[AttemptResult]) -> Exception | None:
        """Settle a group. Return the error if it could not be written."""
        try:
            settled = settle(self._database, group, self._services.keeps_slot)
            self._services.settled(settled)
        except Exception as error:
            discard(self._database)
            return error
        self._hold(settled.locked_elsewhere)
        for result in settled.lost:
            line = (
                (TWICE, *result.fence[:2], "its claim")
                if result in settled.twice
                else (_LOST, *result.fence[:2])
            )
            logger.error(*line, extra=result.job.log_fields)
        return None

    def _after_error(self, group: list[AttemptResult], error: Exception) -> list[AttemptResult]:
        """Return the results to retry after an error.

        After an outage, this is the whole group. If the database works, it refuses a result of
        the group: the group is bisected, so that the other results are written.
        """
        if not self._services.owns():
            report(
                error,
                "settler: process was declared dead, attempt results dropped (%d): %s",
                len(group),
                error,
            )
            return []
        if is_conflict(error):
            logger.debug(
                "settler: transaction conflict, retrying attempt results (%d): %s",
                len(group),
                error,
            )
            return group
        if not self._would_take(_without_text(group[0], error)):
            report(
                error,
                "settler: attempt results could not be written, retrying (%d): %s",
                len(group),
                error,
                level=logging.WARNING,
            )
            return group
        if len(group) > 1:
            half = len(group) // 2
            return self._write(group[:half]) + self._write(group[half:])
        self._write_refused(group[0])
        return []

    def _would_take(self, result: AttemptResult) -> bool:
        """Return whether the database works: settle a result, and roll back."""
        try:
            with writing(self._database):
                settle(self._database, [result])
                transaction.set_rollback(True, using=self._database)
            return True
        except Exception:
            discard(self._database)
            return False

    def _write_refused(self, result: AttemptResult) -> None:
        """Write a result that the database refused.

        First unchanged, as the error may have been temporary; then with its log and progress in
        ASCII; then without the values that a database can refuse. If that is refused too, the
        result is retried on its own: the cause may be temporary, and no other result waits for it.
        """
        error = self._settle([result]) and self._settle([_said_in_ascii(result)])
        if error is None:
            return
        job = result.job
        report(
            error,
            "settler: database refused the attempt result of job %s: %s",
            job.pk,
            error,
            extra=job.log_fields,
        )
        if self._settle([_plain(result, error)]):
            self._hold([result])


def _said_in_ascii(result: AttemptResult) -> AttemptResult:
    """Return the result with its log and progress in ASCII.

    A log line or progress note that the database refuses must not cost a job its return value.
    """
    log, progress = error_reports.in_ascii(result.log), result.progress
    return replace(result, log=log, progress=progress and progress.in_ascii())


def _without_text(result: AttemptResult, error: Exception) -> AttemptResult:
    """Return a result for the same job with nothing of its task's: a database that works takes it.

    Any text that is refused here would make one result look like an outage.
    """
    return replace(_plain(result, error), error=None, wait=0.0)


def _plain(result: AttemptResult, error: Exception) -> AttemptResult:
    """Return the result without any value that a database could refuse.

    A result with a return value or new jobs becomes a failure.
    """
    kind, state, report = result.outcome, result.state, result.error
    if result.result is not None or result.new:
        kind, state, report = Outcome.FAILED, State.FAILED, error_reports.report(error)
        next_stage = result.then and f"stage {result.then.stage} of the pipeline"
        refused = next_stage or "the return value of the task"
        report = replace(report, message=f"The database refused {refused}: {report.message}")
    return AttemptResult.of(
        result.job,
        kind,
        state,
        started_at=result.started_at,
        wait=result.wait,
        error=report and report.in_ascii(),
    )
