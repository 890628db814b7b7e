"""Runs claimed jobs.

The outcome of a task is always a return value: no exception of a task leaves this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import async_to_sync
from django.db import DatabaseError, InterfaceError

from ...backend import DatabaseBackend
from ...core.cancellation import run_to_completion
from ...core.error_reports import is_a
from ...engine.attempt_result import AttemptResult, Settled
from ...exceptions import Interruption
from ..connections import (
    close_interrupted,
    look_after_connections,
    of_coroutines,
    ready_connections,
)
from .attempt import Attempt
from .failed_attempt import fail
from .task_call import CoroutineCall, ThreadCall

P = ParamSpec("P")
R = TypeVar("R")


def run(call: ThreadCall | CoroutineCall, backend: DatabaseBackend) -> AttemptResult | Settled:
    """Run a job on this thread; a CoroutineCall on an event loop that lasts as long as the call.

    Return the attempt result to settle, or the settlement if the attempt has settled itself. The
    middleware and the task run in a copy of the thread's context: context variables that they set,
    and the time zone and the language that they activate, do not reach the thread's next job.
    """
    return copy_context().run(_run, call, backend)


def _run(call: ThreadCall | CoroutineCall, backend: DatabaseBackend) -> AttemptResult | Settled:
    attempt = Attempt(call, backend)
    try:
        attempt.start()
        attempt.enter_middleware()
        function: Any = attempt.function()
        if attempt.is_atomic:
            return attempt.settle_in_transaction(partial(call.run, function))
        if isinstance(call, CoroutineCall):
            value = async_to_sync(call.run)(function)
        else:
            value = call.run(function)
        return attempt.announce(attempt.succeed(value))
    except BaseException as error:
        if is_a(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Workers run tasks on other threads: on the main thread this is Ctrl-C.
        if call.reason:
            close_interrupted()
            error = _behind_the_driver(error)
        return fail(attempt, error)
    finally:
        attempt.leave_middleware()


def _behind_the_driver(error: BaseException) -> BaseException:
    """Return the interruption that a database driver has replaced with an error of its own.

    Return ``error`` itself if no interruption is behind it.
    """
    behind: BaseException | None = error
    while is_a(error, (DatabaseError, InterfaceError)) and behind is not None:
        if is_a(behind, Interruption):
            return behind.with_traceback(error.__traceback__)
        behind = behind.__cause__ or behind.__context__
    return error


async def run_async(call: CoroutineCall, backend: DatabaseBackend) -> AttemptResult:
    """Run the job of an ``async def`` task on this event loop."""
    attempt = Attempt(call, backend)
    try:
        if attempt.uses_no_database and not of_coroutines.is_set():
            attempt.start()
            attempt.enter_middleware()
            value = await call.run(attempt.function())
            return attempt.announce(attempt.succeed(value))
        await _uncancelled(attempt.start)
        attempt.enter_middleware()
        value = await call.run(attempt.function())
        return await _uncancelled(lambda: attempt.announce(attempt.succeed(value)))
    except BaseException as error:
        return await _uncancelled(partial(_handle, error, partial(fail, attempt)))
    finally:
        attempt.leave_middleware()


async def _uncancelled(step: Callable[[], R]) -> R:
    """Run a step to completion on the database thread, despite cancellations of the asyncio task.

    The task's own code or a late interruption may cancel the asyncio task. Without an outcome, the
    job would stay RUNNING.
    """
    result, _ = await run_to_completion(partial(_with_ready_connections, step))
    return result


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
