"""Middleware: of requests, for ``OPTIONS["note_source"]``, and of tasks, for your own code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from .compat import AnyFrameworkTask
from .context import JobContext
from .core.serialization import Json
from .core.source import request_noted
from .models import Job
from .models.enums import FAILURES, Outcome, State


@sync_and_async_middleware
def source_middleware(
    get_response: Callable[[HttpRequest], Any],
) -> Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]:
    """Note each request with the jobs that it enqueues: its path, and its user.

    It serves WSGI and ASGI, and belongs at the top of ``MIDDLEWARE``. Without it, a job's source
    is the process alone.
    """
    if iscoroutinefunction(get_response):

        async def anote(request: HttpRequest) -> HttpResponseBase:
            with request_noted(request):
                return await get_response(request)  # type: ignore[no-any-return]

        return anote

    def note(request: HttpRequest) -> HttpResponseBase:
        with request_noted(request):
            return get_response(request)  # type: ignore[no-any-return]

    return note


@dataclass(frozen=True, kw_only=True)
class EnqueueCall:
    """A call that enqueues jobs of one task.

    task: the task, with the options of this call.
    metadata: the metadata of the jobs. Values that a middleware adds are stored with each job.
    many: whether the call may enqueue more than one job.
    in_batch: whether the jobs are members of a batch.
    recurring: the name of the recurring task whose time has come, or "".
    """

    task: AnyFrameworkTask
    metadata: dict[str, Json]
    many: bool
    in_batch: bool
    recurring: str


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt has ended, and what follows.

    outcome: the outcome of the attempt, as in the list of attempts.
    state: the next state of the job: FAILED, or SCHEDULED for a retry, for example.
    error: the exception that ended the attempt, or None.
    """

    outcome: Outcome
    state: State
    error: BaseException | None

    @property
    def is_failure(self) -> bool:
        """True if the attempt counts as failed. It is not if a deployment interrupts it."""
        return self.outcome in FAILURES

    @property
    def is_last_failure(self) -> bool:
        """True if the attempt has failed, and the job is not retried."""
        return self.is_failure and self.state == State.FAILED


class TaskMiddleware:
    """Base class of the classes that ``OPTIONS["middleware"]`` names. Its methods do nothing.

    There is one object for each backend and process. Its methods are called on many threads.
    """

    def enqueue(self, call: EnqueueCall) -> AbstractContextManager[object]:
        """Return the context in which jobs are enqueued.

        An exception in it or in this method reaches the caller, and no job is enqueued.
        """
        return nullcontext()

    def run(self, context: JobContext) -> AbstractContextManager[object]:
        """Return the context in which the task is called, and the result of its attempt decided.

        context: as tasks with ``takes_context`` get it; ``context.job`` is the row.

        It is entered and left on the thread of the task, or on the event loop of a coroutine, where
        it must not block. An exception on entering it fails the attempt, as an exception of
        the task does; it can be retried. The exception of a task is raised in it, and leaves
        the result as it is if it is suppressed. Exceptions on leaving it are logged.
        """
        return nullcontext()

    def ended(self, context: JobContext, ending: Ending) -> None:
        """Handle the end of an attempt whose context was entered, just before it is left.

        Exceptions are logged.
        """

    def failed_outside_run(self, job: Job, ending: Ending) -> None:
        """Handle the last failure of a job whose context was not left, or not entered.

        Its process died, or the attempt failed before the context was entered: the task is
        unknown, for example.

        job: the row, to be read only.

        It is called on a separate thread of a worker or dispatcher, after the job has been
        recovered; or where ``run`` would have been left. Exceptions are logged.
        """
