"""One attempt to run a claimed job, step by step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from types import TracebackType
from typing import Any

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.dispatch import Signal

from ...backend import DatabaseBackend
from ...compat import TaskResultStatus, is_heard, signals
from ...context import JobContext
from ...core import call_options, error_reports, internal_errors, serialization
from ...core.options import Options
from ...core.safe_log import logger
from ...core.transactions import is_conflict, writing
from ...engine.attempt_result import AttemptResult, Settled
from ...engine.claim import is_too_late, mark_started, save_policy
from ...engine.settle import settle
from ...exceptions import Discarded, Expired, JobLost
from ...middleware import Ending, TaskMiddleware
from ...models import Execution, Job
from ...models.enums import OnLost, Outcome, State
from ...models.execution import ExecutionQuerySet
from ...registry import load, task_of
from ...results import JobResult, result_of
from ...tasks import AnyTask
from .log_capture import LogCapture
from .pipeline_step import after_stage
from .task_call import Call


class Attempt:
    """One attempt to run a job: it starts, then succeeds or fails.

    task: the job's task; None until it is found.
    is_atomic: whether the task and the settlement share a transaction.
    earlier: the earlier attempts of this run, at the current stage of a pipeline.
    error: the exception that ended the attempt; None until then.
    is_unserialized: True if the database rolled back the task's transaction because of a conflict
        with another transaction.
    """

    options: Options
    task: AnyTask | None = None
    is_atomic = False
    is_unserialized = False
    error: BaseException | None = None

    def __init__(self, call: Call, backend: DatabaseBackend) -> None:
        self.call, self.job, self.backend = call, call.job, backend
        self.earlier: list[Execution] = []
        self._ended: AttemptResult | None = None
        self._entered: list[tuple[TaskMiddleware, AbstractContextManager[object]]] = []
        self._started_at = call.job.claimed_at

    @property
    def uses_no_database(self) -> bool:
        """True if neither the start nor the success of the attempt needs the database.

        The event loop then need not wait for another thread, which takes longer than all other
        steps together.
        """
        job = self.job
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

    def start(self) -> None:
        """Find the task, record the start where that is necessary, and send ``task_started``.

        Raises Discarded, Expired, InvalidTaskPath or JobLost for a job that is not to run here.
        """
        job = self.job
        self._started_at, self.options = job.now(), self.backend.options_of(job.queue)
        if job.not_to_run:
            raise Discarded(job.not_to_run)
        self._refuse_expired()
        if job.refused:
            raise job.refused
        task = load(job.task)
        if job.options is not None:
            task = call_options.apply(task, job.options)
        if not job.max_attempts:
            self.backend.set_policy(job, task)
            save_policy(job)
        if job.on_lost == OnLost.FAIL and not mark_started(job):
            raise JobLost
        if job.attempt > job.attempts_before + 1:
            self.earlier = list(self.executions.of_this_stage(job))
        # Again: these statements may have waited for a lock or for the connection.
        self._refuse_expired()
        self.task, self.is_atomic = task, task.atomic
        if self.options.keep_log:
            self.call.log = LogCapture(job, self.options.keep_log)
        if logger.isEnabledFor(logging.DEBUG):
            about = job.pk, job.task, job.attempt
            logger.debug("executor: job %s of %s starts (attempt %d)", *about, extra=job.log_fields)
        self._send(signals.task_started, TaskResultStatus.RUNNING)

    def _refuse_expired(self) -> None:
        if is_too_late(self.job):
            raise Expired(f"It expired at {self.job.expires_at}, before it was started.")

    def enter_middleware(self) -> None:
        """Enter the project's middleware, the outermost first."""
        for each in self.backend.middleware:
            manager = each.run(self.context)
            manager.__enter__()
            self._entered.append((each, manager))

    def leave_middleware(self) -> None:
        """Tell the middleware how the attempt has ended, and leave it. Errors are logged."""
        cause, self.error = self.error, None  # Its frames refer to this object: a cycle.
        not_entered = self.backend.middleware[len(self._entered) :]
        while self._entered:
            middleware, manager = self._entered.pop()
            try:
                if end := self._ended:
                    ending = Ending(outcome=end.outcome, state=end.state, error=cause)
                    middleware.ended(self.context, ending)
            except BaseException as error:
                self._report_middleware(error, middleware)
            try:
                if cause is None:
                    manager.__exit__(None, None, None)
                else:
                    traceback = error_reports.traceback_of(cause)
                    manager.__exit__(type(cause), cause, traceback)
                    # Before Python 3.11, a generator adds a frame that refers to the error.
                    cause.__traceback__ = traceback
            except BaseException as error:
                if error is not cause:
                    self._report_middleware(error, middleware)
        if not_entered and (end := self._ended):
            ending = Ending(outcome=end.outcome, state=end.state, error=cause)
            for middleware in reversed(not_entered) if ending.is_last_failure else ():
                try:
                    middleware.failed_outside_run(self.job, ending)
                except BaseException as error:
                    self._report_middleware(error, middleware)

    def _report_middleware(self, error: BaseException, middleware: TaskMiddleware) -> None:
        internal_errors.report(
            error,
            "executor: job %s of %s: %s failed after the task: %s",
            self.job.pk,
            self.job.task,
            type(middleware).__qualname__,
            error,
            extra=self.job.log_fields,
        )

    def function(self) -> partial[Any]:
        """Return the task's function with the job's arguments, and the context if it takes one."""
        job, task = self.job, self.task
        assert task, "start() comes first"
        if not task.takes_context:
            return partial(task.func, *job.args, **job.kwargs)
        return partial(task.func, self.context, *job.args, **job.kwargs)

    @cached_property
    def context(self) -> JobContext:
        """The context of the task and of the middleware, created on demand."""
        return JobContext(task_result=self.result, job=self.job, call=self.call)

    @property
    def executions(self) -> ExecutionQuerySet:
        return Execution.objects.using(self.backend.database)

    @cached_property
    def result(self) -> JobResult:
        """Task result for signal receivers, the task's context and retry decisions.

        Created on demand: most attempts need none.
        """
        alias = self.backend.alias
        return result_of(self.job, alias, task_of(self.job, alias), self.earlier)

    def succeed(self, value: object) -> AttemptResult:
        """Return the result of a successful attempt.

        Raises TypeError or ValueError for a return value that is not JSON: the attempt then fails.
        """
        if self.job.pipeline:
            return self.end(Outcome.SUCCESSFUL, **after_stage(self.job, value, self.backend))
        result = serialization.to_json(value, of=f"The return value of {self.job.task}")
        own = self.task.delete_on_success if self.task else None
        erase = self.options.delete_on_success if own is None else own
        return self.end(Outcome.SUCCESSFUL, State.SUCCESSFUL, result=result, erase=erase)

    def settle_in_transaction(self, run: Callable[[], object]) -> Settled:
        """Run the task and settle its job in one transaction.

        The task's changes to the queue's database and the job's success are committed together or
        not at all.
        """
        database, committed, success = self.backend.database, [], None
        try:
            with writing(database):
                # The first on_commit hook: distinguishes an error of the task's own hooks from an
                # error that rolled back the transaction.
                transaction.on_commit(lambda: committed.append(True), using=database)
                with _leaving_open_blocks(database):
                    value = run()
                success = self.succeed(value)
                # Wait for a transaction that holds the row's lock: settle() would skip the locked
                # row.
                if not Job.objects.using(database).owned(self.job).select_for_update().exists():
                    raise JobLost
                settled = settle(database, [success])
        except BaseException as error:
            if not committed or success is None:
                self.is_unserialized = is_conflict(error)
                raise
            self._keep_error_of_hook(error)
        self.announce(success)
        return settled

    def _keep_error_of_hook(self, error: BaseException) -> None:
        """Record the error of an on_commit hook in the execution. The job itself has succeeded."""
        report = error_reports.report(error, frames_of_the_task(error))
        self.warn("succeeded, but an on_commit hook failed after the commit: %s", report.headline)
        message = error_reports.clip(
            f"An on_commit hook raised after the commit: {report.message}",
            error_reports.LONGEST_MESSAGE,
        )
        try:
            attempt = self.executions.filter(job=self.job, attempt=self.job.attempt)
            attempt.update(
                error_type=report.type[:255], message=message, traceback=report.traceback
            )
        except (DatabaseError, InterfaceError) as another:
            internal_errors.report(
                another,
                "executor: job %s of %s succeeded; the error of an on_commit hook could not be "
                "stored: %s\n%s",
                self.job.pk,
                self.job.task,
                another,
                report.traceback,
                level=logging.WARNING,
                extra=self.job.log_fields,
            )

    def warn(self, what: str, *args: object) -> None:
        logger.warning(
            f"executor: job %s of %s {what}",
            self.job.pk,
            self.job.task,
            *args,
            extra=self.job.log_fields,
        )

    def end(self, outcome: Outcome, state: State, **rest: Any) -> AttemptResult:
        """Return the result of an attempt that ends now."""
        times = {"started_at": self._started_at, "finished_at": self.job.now()}
        log = self.call.log.text if self.call.log else ""
        self._ended = AttemptResult.of(
            self.job, outcome, state, progress=self.job.progress_value, log=log, **times, **rest
        )
        return self._ended

    def announce(self, end: AttemptResult) -> AttemptResult:
        """Send ``task_finished`` unless a next pipeline stage follows. Return ``end``."""
        if not end.then:
            status = TaskResultStatus.FAILED if end.error else TaskResultStatus.SUCCESSFUL
            self._send(
                signals.task_finished, status, finished_at=end.finished_at, _return_value=end.result
            )
        return end

    def _send(self, signal: Signal, status: TaskResultStatus, **changes: object) -> None:
        if not is_heard(
            signal, logging.ERROR if status == TaskResultStatus.FAILED else logging.INFO
        ):
            return
        for name, value in {"status": status, **changes}.items():
            object.__setattr__(self.result, name, value)
        try:
            signal.send_robust(type(self.backend), task_result=self.result)
        except (Exception, SystemExit) as error:
            # send_robust() logs a subclass of Exception, and a logging handler may raise.
            self.warn("continues: a signal receiver raised %s", type(error).__qualname__)


@contextmanager
def _leaving_open_blocks(database: str) -> Iterator[None]:
    """Leave the ``atomic()`` blocks that a task has left open, and raise RuntimeError.

    The end of the task's transaction would only end the innermost of them.
    """
    depth = len(_blocks(database))
    error = RuntimeError(
        "The task has entered transaction.atomic() and not left it. Use it in a with statement."
    )
    try:
        yield
    finally:
        for block in (left_open := _blocks(database)[: depth - 1 : -1]):
            block.__exit__(RuntimeError, error, None)
    if left_open:
        raise error


def _blocks(database: str) -> list[transaction.Atomic]:
    connection: Any = connections[database]
    return list(connection.atomic_blocks)


def frames_of_the_task(error: BaseException) -> TracebackType | None:
    """Return the error's traceback without the leading frames of this package's worker."""
    frames = error_reports.traceback_of(error)
    while frames and frames.tb_next and _is_own(frames):
        frames = frames.tb_next
    return frames


def _is_own(frames: TracebackType) -> bool:
    return os.path.dirname(frames.tb_frame.f_code.co_filename) == os.path.dirname(__file__)
