"""The call of a task, as other threads see it: its run time, its stack, and its interruption."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import nullcontext, suppress
from types import FrameType, MappingProxyType
from typing import Any, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper

from ...exceptions import Interruption
from ...log import running_job
from ...models import ClaimedJob
from ..connections import cancel_statements
from .log_capture import LogCapture

R = TypeVar("R")

NO_LOG = nullcontext()
# Number of forks between the first process and this one: os.getpid() costs ten times as much.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Call:
    """One attempt's call of a task.

    ``began`` is when the task has begun; before that, when its job was taken. ``reason`` is the
    requested interruption, or None. ``is_retried`` tells whether a stopped job runs again. ``log``
    captures its log lines. ``connections`` are those of its thread.
    """

    connections: Mapping[str, BaseDatabaseWrapper] = MappingProxyType({})

    def __init__(self, job: ClaimedJob) -> None:
        self.job, self.began = job, time.monotonic()
        self.should_stop = False
        # Seconds since the start in which no thread of the process could run.
        self.held_up = 0.0
        self.reason: type[Interruption] | None = None
        self.is_retried = False
        self.interrupted_at = float("inf")
        self.log: LogCapture | None = None
        self._lock = threading.Lock()

    @property
    def runs_task(self) -> bool:
        """Whether the task may run: not while its start or its end waits for another call."""
        return True

    def interrupt(self, reason: type[Interruption]) -> None:
        """Raise ``reason`` in the task if its own code still runs. Only the first reason counts."""
        with self._lock:
            if self.reason is None:
                self.should_stop, self.reason, self.interrupted_at = True, reason, time.monotonic()
                self._interrupt(reason)

    def stack(self) -> str:
        """Return the current stack; empty after the call has ended."""
        raise NotImplementedError

    def _interrupt(self, reason: type[Interruption]) -> None:
        raise NotImplementedError


class ThreadCall(Call):
    """A call on a thread.

    An interruption is raised between two bytecode instructions of the task, and not while the task
    waits in C code; a statement that it waits for is cancelled on the server.
    """

    _thread: int | None = None

    def run(self, function: Callable[[], R]) -> R:
        try:
            with self._lock:
                self._thread = threading.get_ident()
                if self.reason:
                    raise self.reason
            running_job.set(self.job)
            with self.log or NO_LOG:
                forks = _forks
                try:
                    value = function()
                except BaseException as error:
                    _end_forked_child(forks, error)
                    raise
                _end_forked_child(forks)
                return value
        finally:
            self._end()
            running_job.set(None)

    def stack(self) -> str:
        frame = sys._current_frames().get(self._thread or 0)
        return _formatted(frame) if frame else ""

    def _interrupt(self, reason: type[Interruption]) -> None:
        if self._thread is not None:
            _raise_in(self._thread, reason)
            cancel_statements(self.connections)

    def _end(self) -> None:
        """Stop accepting interruptions, and cancel a pending one."""
        while self._thread is not None:
            try:
                with self._lock:
                    if self.reason:
                        _raise_in(threading.get_ident(), None)
                    self._thread = None
            except Interruption:
                continue


class CoroutineCall(Call):
    """A call on an event loop. An interruption cancels it, which takes effect at an ``await``."""

    # Whether its asyncio task has run its first step.
    has_begun = False
    _task: asyncio.Task[object] | None = None
    _coroutine: Any = None

    @property
    def runs_task(self) -> bool:
        return self._task is not None

    async def run(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        with self._lock:
            if self.reason:
                raise self.reason
            self._coroutine, self._task = function(), asyncio.current_task()
            self.began, self.held_up = time.monotonic(), 0.0
        try:
            running_job.set(self.job)
            with self.log or NO_LOG:
                forks = _forks
                try:
                    value = await self._coroutine
                except BaseException as error:
                    _end_forked_child(forks, error)
                    raise
                _end_forked_child(forks)
                return value
        except asyncio.CancelledError as error:
            if self.reason is None:
                raise
            raise self.reason().with_traceback(error.__traceback__) from None
        finally:
            with self._lock:  # The loop may be closed next.
                self._task = None
            running_job.set(None)

    def stack(self) -> str:
        coroutine, frames = self._coroutine, []
        while frame := getattr(coroutine, "cr_frame", None):
            if coroutine.cr_running:
                return _formatted(sys._current_frames()[self._thread])
            frames.append(
                traceback.FrameSummary(
                    frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
                )
            )
            coroutine = coroutine.cr_await
        return "".join(traceback.format_list(frames))

    def _interrupt(self, reason: type[Interruption]) -> None:
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def interrupt_each(calls: Iterable[Call], reason: type[Interruption]) -> None:
    for call in calls:
        call.interrupt(reason)


def _end_forked_child(forks: int, error: BaseException | None = None) -> None:
    """End this process if the task has forked it, with the exit code that Python would give.

    forks: the number of forks before the task began.

    The child shares the connections of its parent, so none of the worker's code may run in it.
    """
    if _forks == forks:
        return
    code = 1
    try:
        code = _exit_code(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)


def _exit_code(error: BaseException | None) -> int:
    """Return the exit code of a process that ends with ``error``. Print what Python prints."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _formatted(frame: FrameType) -> str:
    """Format the stack, starting at the task's function."""
    frames = list(traceback.extract_stack(frame))
    ours = max(
        (place for place, each in enumerate(frames) if each.filename == __file__), default=-1
    )
    return "".join(traceback.format_list(frames[ours + 1 :]))


def _raise_in(thread: int, reason: type[Interruption] | None) -> None:
    """Raise an exception in another thread; None cancels an exception that is still pending."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(reason) if reason else None
    )
