"""The result of an attempt that ended with an exception: retry, release, or the end of the job."""

from __future__ import annotations

import logging
import random
import time
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

from django.db import DatabaseError, InterfaceError

from ...compat import TaskError
from ...core import error_reports, internal_errors
from ...core.error_reports import is_a
from ...core.safe_log import logger
from ...engine.attempt_result import AttemptResult
from ...exceptions import (
    Discarded,
    Interrupted,
    InvalidTaskPath,
    JobLost,
    Retried,
    Snoozed,
    Stopped,
    TimedOut,
)
from ...models import ClaimedJob
from ...models.enums import OnLost, Outcome, State
from ...tasks import AnyTask
from .attempt import Attempt, frames_of_the_task
from .retry_policy import wait_before_retry

# A job with an unknown task is released and delayed by a tenth of the time that it has waited,
# between these limits.
SHORTEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
# Attempts in a row that may end in a transaction conflict. The next conflict counts as a failure.
MOST_CONFLICTS = 20


def fail(attempt: Attempt, error: BaseException) -> AttemptResult:
    """Return the attempt result for an error.

    Called while ``error`` is being handled, as receivers of the signal expect.
    """
    attempt.error = error
    try:
        return _decide(attempt, error)
    except BaseException as another:
        # For example a MemoryError: the job must not stay RUNNING.
        return _decide_again(attempt, error, error_reports.report(another))


def _decide(attempt: Attempt, error: BaseException) -> AttemptResult:
    report = error_reports.report(error, frames_of_the_task(error))
    if is_a(error, (Interrupted, JobLost)):
        return _interrupt(attempt, report)
    if is_a(error, Snoozed):
        return _snooze(attempt, error)
    if (
        attempt.is_unserialized
        and _conflicts(attempt, report.type) < MOST_CONFLICTS
        and attempt.job.on_lost == OnLost.RETRY
    ):
        attempt.warn("released, retrying: its transaction could not be serialized: %s", error)
        return attempt.end(
            Outcome.INTERRUPTED, State.SCHEDULED, wait=random.uniform(0.5, 1.5), error=report
        )
    if attempt.task is None:
        return _decide_not_started(attempt, error, report)
    if is_a(error, TimedOut) and not report.message and attempt.job.timeout:
        seconds = attempt.job.timeout.total_seconds()
        report = replace(report, message=f"It ran longer than its timeout of {seconds:g} s.")
    if is_a(error, Retried):
        report = report.caused_by(error.__cause__, error.reason)
    attempt.result.errors.append(
        TaskError(exception_class_path=report.type, traceback=report.traceback)
    )
    if is_a(error, Stopped) and attempt.call.is_retried:
        attempt.warn("stopped, to run again")
        return attempt.end(Outcome.STOPPED, State.READY, error=report)
    if is_a(error, _discarding(attempt.task)) and not is_a(error, Retried):
        return _give_up(attempt, Outcome.DISCARDED, State.DISCARDED, report)
    outcome = Outcome.TIMED_OUT if is_a(error, TimedOut) else Outcome.FAILED
    wait = wait_before_retry(attempt.job, attempt.task, error, attempt.result, attempt.options)
    if wait is None:
        return _give_up(attempt, outcome, State.FAILED, report)
    attempt.warn("retrying in %.3g s: %s", wait, report.headline)
    return attempt.end(outcome, State.SCHEDULED if wait else State.READY, wait=wait, error=report)


def _decide_again(
    attempt: Attempt, error: BaseException, report: error_reports.ErrorReport
) -> AttemptResult:
    """Return the result after the decision itself has failed: only a retry, or the end of the job.

    Log nothing and send no signal: they may be what has failed.
    """
    wait = None
    with suppress(BaseException):
        if attempt.task and not is_a(error, _discarding(attempt.task)):
            wait = wait_before_retry(
                attempt.job, attempt.task, error, attempt.result, attempt.options
            )
    state = State.FAILED if wait is None else State.SCHEDULED if wait else State.READY
    return attempt.end(Outcome.FAILED, state, wait=wait or 0.0, error=report)


def _discarding(task: AnyTask) -> tuple[type[BaseException], ...]:
    return (Stopped, *task.discard_on)


def _conflicts(attempt: Attempt, error_type: str) -> int:
    """Number of attempts in a row, up to the previous one, that the same error interrupted."""
    alike = takewhile(
        lambda each: (each.outcome, each.error_type) == (Outcome.INTERRUPTED, error_type),
        reversed(attempt.earlier),
    )
    return sum(1 for _ in alike)


def _interrupt(attempt: Attempt, report: error_reports.ErrorReport) -> AttemptResult:
    """Release an interrupted job.

    A job with ``on_lost="fail"`` that was interrupted from outside fails as LOST instead: it
    must not run twice. One that raised Interrupted itself is released.
    """
    if attempt.task and attempt.job.on_lost == OnLost.FAIL and attempt.call.reason is Interrupted:
        return _give_up(attempt, Outcome.LOST, State.FAILED, report)
    attempt.warn("interrupted and released")
    return attempt.end(Outcome.INTERRUPTED, State.READY)


def _snooze(attempt: Attempt, asked: Snoozed) -> AttemptResult:
    logger.info(
        "executor: job %s of %s snoozed",
        attempt.job.pk,
        attempt.job.task,
        extra=attempt.job.log_fields,
    )
    return attempt.end(
        Outcome.SNOOZED, State.SCHEDULED if asked.until else State.READY, wait=asked.until
    )


def _decide_not_started(
    attempt: Attempt, error: BaseException, report: error_reports.ErrorReport
) -> AttemptResult:
    """Return the result of an attempt that did not start.

    The job was discarded or has expired, its task could not be found, or its earlier attempts
    could not be read.
    """
    if is_a(error, Discarded):
        attempt.warn("discarded: %s", error)
        return attempt.end(Outcome.DISCARDED, State.DISCARDED, error=replace(report, traceback=""))
    if is_a(error, (DatabaseError, InterfaceError)):
        internal_errors.report(
            error,
            "executor: job %s of %s released: its earlier attempts could not be read: %s",
            attempt.job.pk,
            attempt.job.task,
            error,
            level=logging.WARNING,
            extra=attempt.job.log_fields,
        )
        return attempt.end(Outcome.INTERRUPTED, State.SCHEDULED, wait=1.0)
    if is_a(error, InvalidTaskPath):
        waited = _unknown_for(attempt, report.type)
        if waited is None or waited < attempt.options.unknown_task_after:
            return _wait_for_the_task(attempt, waited, report)
    attempt.warn("cannot run: %s", error)
    return attempt.end(Outcome.FAILED, State.FAILED, error=report)


def _unknown_for(attempt: Attempt, error_type: str) -> float | None:
    """Seconds since the job was first released for this error, with no other outcome since.

    None if the last execution has another outcome. Later releases in a row are not recorded.
    """
    attempts = attempt.executions.filter(job=attempt.job, attempt__gt=attempt.job.attempts_before)
    last = attempts.order_by("-attempt").values_list("outcome", "error_type", "finished_at").first()
    if last and last[:2] == (Outcome.INTERRUPTED, error_type):
        return float((attempt.job.now() - last[2]).total_seconds())
    return None


def _wait_for_the_task(
    attempt: Attempt, waited: float | None, report: error_reports.ErrorReport
) -> AttemptResult:
    """Release the job: other workers may know its task, or a deployment may be in progress."""
    _unknown_tasks.report(attempt.job, report.message)
    wait = min(
        max((waited or 0.0) / 10, SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS
    ) * random.uniform(0.8, 1.0)
    return attempt.end(
        Outcome.INTERRUPTED, State.SCHEDULED, wait=wait, error=report, recorded=waited is None
    )


def _give_up(
    attempt: Attempt, outcome: Outcome, state: State, report: error_reports.ErrorReport
) -> AttemptResult:
    attempt.warn("%s: %s", outcome.value.replace("_", " "), report.headline)
    return attempt.announce(attempt.end(outcome, state, error=report))


class _UnknownTasks:
    """Warns at most once a minute per unknown task, regardless of how many of its jobs wait."""

    AGAIN = 60.0

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def report(self, job: ClaimedJob, why: str) -> None:
        if time.monotonic() - self._said.get(job.task, float("-inf")) > self.AGAIN:
            self._said[job.task] = time.monotonic()
            logger.warning(
                "executor: unknown task: job %s and others of %s wait: %s",
                job.pk,
                job.task,
                why,
                extra=job.log_fields,
            )


_unknown_tasks = _UnknownTasks()
