"""Runs claimed jobs.

The outcome of a task is always a return value: no exception of a task leaves this module.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import async_to_sync, sync_to_async
from django.db import DatabaseError, InterfaceError, transaction

from ...backend import DatabaseBackend
from ...compat import TaskError, TaskResultStatus, is_heard, signals
from ...context import JobContext
from ...core import error_reports, serialization
from ...core.transactions import is_conflict, writing
from ...engine.attempt_result import AttemptResult, Settled
from ...engine.claim import mark_started, save_policy
from ...engine.settle import settle
from ...exceptions import (
    Discarded,
    Expired,
    Interrupted,
    Interruption,
    InvalidTaskPath,
    JobLost,
    Retried,
    Snoozed,
    Stopped,
    TimedOut,
)
from ...models import ClaimedJob, Execution, Job
from ...models.enums import OnLost, Outcome, State
from ...models.execution import ExecutionQuerySet
from ...models.job import JobQuerySet
from ...registry import load, task_of
from ...results import JobResult, result_of
from ...tasks import is_coroutine
from ..connections import (
    close_interrupted,
    look_after_connections,
    of_coroutines,
    ready_connections,
)
from . import task_call
from .log_capture import LogCapture
from .pipeline_step import after_stage
from .retry_policy import wait_before_retry
from .task_call import CoroutineCall, ThreadCall

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("django_dbqueue")


def run(call: ThreadCall, backend: DatabaseBackend) -> AttemptResult | Settled:
    """Run a job on this thread.

    Return the attempt result to settle, or the settlement if the attempt has settled itself.
    """
    attempt = Attempt(call, backend)
    try:
        function = attempt.begin()
        if attempt.is_atomic:
            return attempt.settle_in_transaction(function)
        return attempt.announce(
            attempt.succeed(
                call.run(async_to_sync(function) if is_coroutine(function.func) else function)
            )
        )
    except BaseException as error:
        if (
            isinstance(error, KeyboardInterrupt)
            and threading.current_thread() is threading.main_thread()
        ):
            raise  # Workers run tasks on other threads: on the main thread this is Ctrl-C.
        if call.reason:
            close_interrupted()
            error = _behind_the_driver(error)
        return attempt.fail(error)


def _behind_the_driver(error: BaseException) -> BaseException:
    """Return the interruption that a database driver has replaced with an error of its own.

    Return ``error`` itself if no interruption is behind it.
    """
    behind: BaseException | None = error
    while isinstance(error, (DatabaseError, InterfaceError)) and behind is not None:
        if isinstance(behind, Interruption):
            return behind.with_traceback(error.__traceback__)
        behind = behind.__cause__ or behind.__context__
    return error


async def run_async(call: CoroutineCall, backend: DatabaseBackend) -> AttemptResult:
    """Run the job of an ``async def`` task on this event loop."""
    attempt = Attempt(call, backend)
    try:
        if attempt.uses_no_database and not of_coroutines.is_set():
            return attempt.announce(attempt.succeed(await call.run(attempt.begin())))
        function = await _uncancelled(attempt.begin)
        value = await call.run(function)
        return await _uncancelled(lambda: attempt.announce(attempt.succeed(value)))
    except BaseException as error:
        return await _uncancelled(partial(_handle, error, attempt.fail))


async def _uncancelled(step: Callable[[], R]) -> R:
    """Run a step to completion on the database thread, despite cancellations of the asyncio task.

    The task's own code or a late interruption may cancel the asyncio task. Without an outcome, the
    job would stay RUNNING.
    """
    running = asyncio.ensure_future(sync_to_async(_with_ready_connections)(step))
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            continue
        except BaseException:
            break
    return running.result() if not running.cancelled() else await _uncancelled(step)


def _handle(error: BaseException, step: Callable[[BaseException], R]) -> R:
    """Run a step in an ``except`` block, so that ``sys.exc_info()`` is set on its own thread."""
    try:
        raise error
    except BaseException:
        return step(error)


def _with_ready_connections(step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a step on the one thread on which all coroutines of a loop use the database."""
    ready_connections()
    look_after_connections()
    return step(*args, **kwargs)


class Attempt:
    """One attempt to run a job: starts, then succeeds or fails."""

    # A job with an unknown task is released and delayed by a tenth of the time that it has waited,
    # between these limits, in seconds.
    SHORTEST_WAIT, LONGEST_WAIT = 1.0, 30.0
    # Attempts in a row that may end in a transaction conflict. The next conflict counts as a
    # failure.
    MOST_CONFLICTS = 20

    def __init__(self, call: Any, backend: DatabaseBackend) -> None:
        self._call, self._job, self._backend = call, call.job, backend
        self._started_at = call.job.claimed_at
        self._task: Any = None
        self._earlier: list[Execution] = []
        # True if the database rolled back the task's transaction because of a conflict with another
        # transaction.
        self._is_unserialized = False

    @property
    def uses_no_database(self) -> bool:
        """True if neither the start nor the success of the attempt needs the database.

        The event loop then need not wait for another thread, which takes longer than all other
        steps together.
        """
        job = self._job
        is_plain = (
            job.attempt == job.attempts_before + 1
            and job.on_lost != OnLost.FAIL
            and not job.pipeline
        )
        return (
            is_plain
            and job.max_attempts > 0
            and not is_heard(signals.task_started)
            and not is_heard(signals.task_finished)
        )

    def begin(self) -> partial[Any]:
        """Prepare the attempt and send ``task_started``.

        Return the task's function with its arguments.
        """
        job = self._job
        self._started_at, self._options = job.now(), self._backend.options_of(job.queue)
        if job.not_to_run:
            raise Discarded(job.not_to_run)
        if job.has_expired():
            raise Expired(f"It expired at {job.expires_at}, before it was started.")
        task = load(job.task)
        if not job.max_attempts:
            self._backend.set_policy(job, task)
            save_policy(job)
        if job.on_lost == OnLost.FAIL and not mark_started(job):
            raise JobLost
        if job.attempt > job.attempts_before + 1:
            self._earlier = list(self._executions.of_this_stage(job))
        self._task, self.is_atomic = task, task.atomic
        if self._options.keep_log:
            self._call.log = LogCapture(job, self._options.keep_log)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "executor: job %s of %s starts (attempt %d)",
                job.pk,
                job.task,
                job.attempt,
                extra=job.log_fields,
            )
        self._tell(signals.task_started, TaskResultStatus.RUNNING)
        leading = (
            (JobContext(task_result=self._result, job=job, call=self._call),)
            if task.takes_context
            else ()
        )
        return partial(task.func, *leading, *job.args, **job.kwargs)

    @property
    def _executions(self) -> ExecutionQuerySet:
        return Execution.objects.using(self._backend.database)

    @property
    def _jobs(self) -> JobQuerySet:
        return Job.objects.using(self._backend.database)

    @cached_property
    def _result(self) -> JobResult:
        """Task result for signal receivers, the task's context and retry decisions.

        Created on demand: most attempts need none.
        """
        return result_of(
            self._job, self._backend.alias, task_of(self._job, self._backend.alias), self._earlier
        )

    def succeed(self, value: Any) -> AttemptResult:
        """Return the result of a successful attempt.

        Raises TypeError or ValueError for a return value that is not JSON: the attempt then fails.
        """
        if self._job.pipeline:
            return self._settle(Outcome.SUCCESSFUL, **after_stage(self._job, value, self._backend))
        result = serialization.to_json(value, of=f"What {self._job.task} returned")
        own = self._task.delete_on_success
        erase = self._options.delete_on_success if own is None else own
        return self._settle(Outcome.SUCCESSFUL, State.SUCCESSFUL, result=result, erase=erase)

    def settle_in_transaction(self, function: Callable[[], Any]) -> Settled:
        """Run the task and settle its job in one transaction.

        The task's changes to the queue's database and the job's success are committed together or
        not at all.
        """
        database, committed, success = self._backend.database, [], None
        try:
            with writing(database):
                # The first on_commit hook: distinguishes an error of the task's own hooks from an
                # error that rolled back the transaction.
                transaction.on_commit(lambda: committed.append(True), using=database)
                success = self.succeed(self._call.run(function))
                # Wait for a transaction that holds the row's lock: settle() would skip the locked
                # row.
                if not self._jobs.owned(self._job).select_for_update().exists():
                    raise JobLost
                settled = settle(database, [success])
        except BaseException as error:
            if not committed or success is None:
                self._is_unserialized = is_conflict(error)
                raise
            self._keep_error_of_hook(error)
        self.announce(success)
        return settled

    def _keep_error_of_hook(self, error: BaseException) -> None:
        """Record the error of an on_commit hook in the execution. The job itself has succeeded."""
        report = error_reports.report(error, _frames_of_the_task(error))
        self._warn("succeeded, but an on_commit hook failed after the commit: %s", report.headline)
        message = error_reports.clip(
            f"An on_commit hook raised after the commit: {report.message}",
            error_reports.LONGEST_MESSAGE,
        )
        try:
            attempt = self._executions.filter(job=self._job, attempt=self._job.attempt)
            attempt.update(
                error_type=report.type[:255], message=message, traceback=report.traceback
            )
        except (DatabaseError, InterfaceError) as another:
            self._warn(
                "succeeded; the error of an on_commit hook could not be stored: %s\n%s",
                another,
                report.traceback,
            )

    def fail(self, error: BaseException) -> AttemptResult:
        """Return the attempt result for an error.

        Called while ``error`` is being handled, as receivers of the signal expect.
        """
        try:
            return self._decide(error)
        except BaseException as another:
            # For example a receiver that raises SystemExit, or a MemoryError: the job must not stay
            # RUNNING.
            return self._settle(Outcome.FAILED, State.FAILED, error=error_reports.report(another))

    def _decide(self, error: BaseException) -> AttemptResult:
        report = error_reports.report(error, _frames_of_the_task(error))
        if isinstance(error, (Interrupted, JobLost)):
            return self._interrupt(report)
        if isinstance(error, Snoozed):
            return self._snooze(error)
        if (
            self._is_unserialized
            and self._conflicts(report.type) < self.MOST_CONFLICTS
            and self._job.on_lost == OnLost.RETRY
        ):
            self._warn("released, retrying: its transaction could not be serialized: %s", error)
            return self._settle(
                Outcome.INTERRUPTED, State.SCHEDULED, wait=random.uniform(0.5, 1.5), error=report
            )
        if self._task is None:
            return self._decide_not_started(error, report)
        if isinstance(error, Retried):
            report = report.caused_by(error.__cause__, error.reason)
        self._result.errors.append(
            TaskError(exception_class_path=report.type, traceback=report.traceback)
        )
        if isinstance(error, (Stopped, *self._task.discard_on)) and not isinstance(error, Retried):
            return self._give_up(Outcome.DISCARDED, State.DISCARDED, report)
        outcome = Outcome.TIMED_OUT if isinstance(error, TimedOut) else Outcome.FAILED
        wait = wait_before_retry(self._job, self._task, error, self._result, self._options)
        if wait is None:
            return self._give_up(outcome, State.FAILED, report)
        self._warn("retrying in %.3g s: %s", wait, report.headline)
        return self._settle(
            outcome, State.SCHEDULED if wait else State.READY, wait=wait, error=report
        )

    def _conflicts(self, error_type: str) -> int:
        """Number of attempts in a row, up to the previous one, that the same error interrupted."""
        alike = takewhile(
            lambda each: (each.outcome, each.error_type) == (Outcome.INTERRUPTED, error_type),
            reversed(self._earlier),
        )
        return sum(1 for _ in alike)

    def _interrupt(self, report: error_reports.ErrorReport) -> AttemptResult:
        """Release an interrupted job.

        A job with ``on_lost="fail"`` that was interrupted from outside fails as LOST instead: it
        must not run twice. One that raised Interrupted itself is released.
        """
        if self._task and self._job.on_lost == OnLost.FAIL and self._call.reason is Interrupted:
            return self._give_up(Outcome.LOST, State.FAILED, report)
        self._warn("interrupted and released")
        return self._settle(Outcome.INTERRUPTED, State.READY)

    def _snooze(self, asked: Snoozed) -> AttemptResult:
        logger.info(
            "executor: job %s of %s snoozed",
            self._job.pk,
            self._job.task,
            extra=self._job.log_fields,
        )
        return self._settle(
            Outcome.SNOOZED, State.SCHEDULED if asked.until else State.READY, wait=asked.until
        )

    def _decide_not_started(
        self, error: BaseException, report: error_reports.ErrorReport
    ) -> AttemptResult:
        """Return the result of an attempt that did not start.

        The job was discarded or has expired, its task could not be found, or its earlier attempts
        could not be read.
        """
        if isinstance(error, Discarded):
            self._warn("discarded: %s", error)
            return self._settle(
                Outcome.DISCARDED, State.DISCARDED, error=replace(report, traceback="")
            )
        if isinstance(error, (DatabaseError, InterfaceError)):
            self._warn("released: its earlier attempts could not be read: %s", error)
            return self._settle(Outcome.INTERRUPTED, State.SCHEDULED, wait=1.0)
        if isinstance(error, InvalidTaskPath):
            waited = self._unknown_for(report.type)
            if waited is None or waited < self._options.unknown_task_after:
                return self._wait_for_the_task(waited, report)
        self._warn("cannot run: %s", error)
        return self._settle(Outcome.FAILED, State.FAILED, error=report)

    def _unknown_for(self, error_type: str) -> float | None:
        """Seconds since the job was first released for this error, with no other outcome since.

        None if the last execution has another outcome. Later releases in a row are not recorded.
        """
        attempts = self._executions.filter(job=self._job, attempt__gt=self._job.attempts_before)
        last = (
            attempts.order_by("-attempt")
            .values_list("outcome", "error_type", "finished_at")
            .first()
        )
        if last and last[:2] == (Outcome.INTERRUPTED, error_type):
            return float((self._job.now() - last[2]).total_seconds())
        return None

    def _wait_for_the_task(
        self, waited: float | None, report: error_reports.ErrorReport
    ) -> AttemptResult:
        """Release the job: other workers may know its task, or a deployment may be in progress."""
        _unknown_tasks.report(self._job, report.message)
        wait = min(
            max((waited or 0.0) / 10, self.SHORTEST_WAIT), self.LONGEST_WAIT
        ) * random.uniform(0.8, 1.0)
        return self._settle(
            Outcome.INTERRUPTED, State.SCHEDULED, wait=wait, error=report, recorded=waited is None
        )

    def _give_up(
        self, outcome: Outcome, state: State, report: error_reports.ErrorReport
    ) -> AttemptResult:
        self._warn("%s: %s", outcome.value.replace("_", " "), report.headline)
        return self.announce(self._settle(outcome, state, error=report))

    def _warn(self, what: str, *args: Any) -> None:
        logger.warning(
            f"executor: job %s of %s {what}",
            self._job.pk,
            self._job.task,
            *args,
            extra=self._job.log_fields,
        )

    def _settle(self, outcome: Outcome, state: State, **rest: Any) -> AttemptResult:
        times = {"started_at": self._started_at, "finished_at": self._job.now()}
        log = self._call.log.text if self._call.log else ""
        return AttemptResult.of(
            self._job, outcome, state, progress=self._job.progress_value, log=log, **times, **rest
        )

    def announce(self, end: AttemptResult) -> AttemptResult:
        """Send ``task_finished`` unless a next pipeline stage follows. Return ``end``."""
        if not end.then:
            status = TaskResultStatus.FAILED if end.error else TaskResultStatus.SUCCESSFUL
            self._tell(
                signals.task_finished, status, finished_at=end.finished_at, _return_value=end.result
            )
        return end

    def _tell(self, signal: Any, status: TaskResultStatus, **changes: Any) -> None:
        if not is_heard(
            signal, logging.ERROR if status == TaskResultStatus.FAILED else logging.INFO
        ):
            return
        for name, value in {"status": status, **changes}.items():
            object.__setattr__(self._result, name, value)
        try:
            signal.send_robust(type(self._backend), task_result=self._result)
        except SystemExit:  # send_robust logs all subclasses of Exception.
            self._warn("continues: a signal receiver raised SystemExit")


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


def _frames_of_the_task(error: BaseException) -> TracebackType | None:
    frames = error.__traceback__
    while (
        frames
        and frames.tb_next
        and frames.tb_frame.f_code.co_filename in (__file__, task_call.__file__)
    ):
        frames = frames.tb_next
    return frames
