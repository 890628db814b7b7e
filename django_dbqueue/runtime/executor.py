"""Runs claimed jobs. Whatever a task does, how it ended is a value, never an exception that leaves here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import async_to_sync, sync_to_async
from django.db import DatabaseError, InterfaceError

from .. import arguments, errors
from ..backend import DatabaseBackend
from ..compat import TaskContext, TaskError, TaskResultStatus, signals
from ..models import Execution, Job, Settlement
from ..models.job import State
from ..results import JobResult, result_of, task_of
from ..retry import wait_before_retry
from .connection import look_after_connections, ready_connections

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("django_dbqueue")


def run(job: Job, backend: DatabaseBackend) -> Settlement:
    """Run a job on this thread."""
    attempt = Attempt(job, backend)
    try:
        call = attempt.begin()
        return attempt.succeed(async_to_sync(call)() if iscoroutinefunction(call) else call())
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Workers run tasks on other threads: here it is a person's Ctrl-C.
        return attempt.fail(error)


async def run_async(job: Job, backend: DatabaseBackend) -> Settlement:
    """Run the job of an ``async def`` task on this event loop."""
    attempt = Attempt(job, backend)
    try:
        call = await sync_to_async(_with_ready_connections)(attempt.begin)
        value = await call()
        return await sync_to_async(_with_ready_connections)(attempt.succeed, value)
    except BaseException as error:
        return await sync_to_async(_with_ready_connections)(attempt.fail, error)


def _with_ready_connections(step: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """For the one thread on which all coroutines of a loop use the database."""
    ready_connections()
    look_after_connections()
    return step(*args, **kwargs)


class Attempt:
    """One attempt at one job: it begins, and then succeeds or fails."""

    def __init__(self, job: Job, backend: DatabaseBackend) -> None:
        self._job, self._backend = job, backend
        self._result: JobResult | None = None
        self._started_at = job.now()

    def begin(self) -> Callable[[], Any]:
        """Announce the attempt, and return the call that it consists of."""
        job, alias = self._job, self._backend.alias
        task = task_of(job, alias)
        earlier = Execution.objects.using(self._backend.database).filter(job=job).order_by("attempt") if job.attempt > 1 else ()
        self._result = result_of(job, alias, task, earlier)
        self._announce(signals.task_started)
        leading: tuple[Any, ...] = (TaskContext(task_result=self._result),) if task.takes_context else ()
        return partial(task.func, *leading, *job.args, **job.kwargs)

    def succeed(self, value: Any) -> Settlement:
        """Raises TypeError or ValueError for a return value that is not JSON: then the attempt has failed."""
        result = arguments.to_json(value, of=f"What {self._job.task} returned")
        self._announce(
            signals.task_finished, status=TaskResultStatus.SUCCESSFUL, finished_at=self._job.now(), _return_value=result
        )
        return self._settle(Execution.Outcome.SUCCESSFUL, State.SUCCESSFUL, result=result)

    def fail(self, error: BaseException) -> Settlement:
        """Decide what becomes of the job. Called while ``error`` is handled, as receivers of the signal expect."""
        try:
            return self._decide(error)
        except BaseException as another:
            # A receiver that raises SystemExit, memory that has run out: the job must not stay RUNNING for that.
            return self._settle(Execution.Outcome.FAILED, State.FAILED, error=errors.report(another))

    def _decide(self, error: BaseException) -> Settlement:
        # The first frame is this module's call.
        report = errors.report(error, error.__traceback__ and error.__traceback__.tb_next)
        if self._result is None and isinstance(error, (DatabaseError, InterfaceError)):
            self._warn("is given back: its earlier attempts could not be read: %s", error)
            return self._settle(Execution.Outcome.INTERRUPTED, State.SCHEDULED, wait=1.0)
        if self._result is None:
            self._warn("cannot run: %s", error)
            return self._settle(Execution.Outcome.FAILED, State.FAILED, error=report)
        task: Any = self._result.task
        self._result.errors.append(TaskError(exception_class_path=report.type, traceback=report.traceback))
        if isinstance(error, task.discard_on):
            return self._give_up(Execution.Outcome.DISCARDED, State.DISCARDED, report)
        wait = wait_before_retry(self._job, task, error, self._result, self._backend.config)
        if wait is None:
            return self._give_up(Execution.Outcome.FAILED, State.FAILED, report)
        self._warn("is tried again in %.3g s: %s", wait, report.headline)
        return self._settle(Execution.Outcome.FAILED, State.SCHEDULED if wait else State.READY, wait=wait, error=report)

    def _give_up(self, outcome: Execution.Outcome, state: State, report: errors.ErrorReport) -> Settlement:
        self._warn("%s: %s", outcome.value, report.headline)
        self._announce(signals.task_finished, status=TaskResultStatus.FAILED, finished_at=self._job.now())
        return self._settle(outcome, state, error=report)

    def _warn(self, what: str, *args: Any) -> None:
        logger.warning(f"Job %s of %s {what}", self._job.pk, self._job.task, *args, extra=self._job.log_fields)

    def _settle(self, outcome: Execution.Outcome, state: State, **rest: Any) -> Settlement:
        return Settlement.of(self._job, outcome, state, started_at=self._started_at, **rest)

    def _announce(self, signal: Any, **changes: Any) -> None:
        for name, value in changes.items():
            object.__setattr__(self._result, name, value)
        try:
            signal.send_robust(type(self._backend), task_result=self._result)
        except SystemExit:  # All others that are errors, send_robust logs itself.
            self._warn("goes on: a receiver of a signal raised SystemExit")
