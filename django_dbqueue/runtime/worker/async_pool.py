"""The event loop of a worker: runs many ``async def`` tasks concurrently on one thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async

from ...core.internal_errors import report
from ...core.options import Options
from ...models import ClaimedJob
from ...registry import load
from ...tasks import is_coroutine
from ..connections import close_connections, watch_coroutines
from .services import DEFAULT, WorkerServices
from .task_call import CoroutineCall


class AsyncPool:
    """The counterpart of ThreadPool for coroutines. The loop's thread starts with the first job."""

    def __init__(
        self,
        options: Options,
        run: Callable[[CoroutineCall], Coroutine[Any, Any, None]],
        services: WorkerServices = DEFAULT,
    ) -> None:
        self._options, self._run, self._services = options, run, services
        self._running: dict[tuple[UUID, int], CoroutineCall] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        # The event loop holds only weak references to its tasks.
        self._begun: set[asyncio.Task[None]] = set()
        self._is_watched = self._closed = False
        # False once the event loop cannot go on.
        self.alive = True
        # Whether all jobs of the last claim were coroutines.
        self.took_all = False

    def take(
        self, jobs: Sequence[ClaimedJob], leave: Callable[[str], None]
    ) -> tuple[Sequence[ClaimedJob], Sequence[ClaimedJob]]:
        """Start the jobs of ``async def`` tasks. Return the other jobs, and those that do not fit.

        The other jobs include jobs of unknown tasks: a thread releases them, and ``leave`` is
        called with the task.
        """
        mine: list[ClaimedJob] = []
        others: list[ClaimedJob] = []
        for job in jobs:
            (mine if is_of_coroutine(job, leave) else others).append(job)
        if jobs:
            self.took_all = not others
        free = max(0, self._options.coroutines - len(self._running))
        mine, too_many = mine[:free], mine[free:]
        if not mine:
            return others, too_many
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._run_loop, args=(self._loop,), name="coroutines", daemon=True
            ).start()
        calls = [CoroutineCall(job) for job in mine]
        self._running.update({(call.job.pk, call.job.attempt): call for call in calls})
        self._loop.call_soon_threadsafe(self._begin, calls)
        return others, too_many

    def full(self) -> bool:
        return len(self._running) >= self._options.coroutines

    def room(self) -> int:
        """Number of further coroutines to claim at a time."""
        # Each job starts immediately: without a prefetch, jobs are claimed one by one.
        most = max(1, self._options.prefetch)
        return max(0, min(self._options.coroutines - len(self._running), most))

    def running(self) -> list[CoroutineCall]:
        return list(self._running.values())

    def close(self) -> None:
        self._closed = True
        if self._loop:
            asyncio.run_coroutine_threadsafe(self._end(self._loop), self._loop)

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        await sync_to_async(close_connections)()
        loop.stop()

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closed:
            try:
                loop.run_forever()
            except Exception as error:
                # Not a job's: of the loop itself, such as a file descriptor that a task has closed.
                report(
                    error,
                    "async pool: event loop failed; this process ends, and is replaced: %r",
                    error,
                )
                self.alive = False
                self._services.wake()
                return
            except BaseException as error:
                # A coroutine that a task started as a task of its own raised SystemExit. The
                # code that awaits it receives the exception too.
                report(
                    error,
                    "async pool: event loop restarted after %r",
                    error,
                    level=logging.WARNING,
                )
        if not asyncio.all_tasks(loop):
            loop.close()

    def _begin(self, calls: Sequence[CoroutineCall]) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._create_task(_watch(), lambda task: self._begin(calls))
            return
        for call in calls:
            self._start(call)

    def _start(self, call: CoroutineCall) -> None:
        self._create_task(self._work(call), partial(self._ended, call))

    def _create_task(
        self, coroutine: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], object]
    ) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        task.add_done_callback(ended)

    async def _work(self, call: CoroutineCall) -> None:
        call.has_begun = True
        await self._run(call)

    def _ended(self, call: CoroutineCall, task: asyncio.Task[None]) -> None:
        if not call.has_begun:
            # A task has cancelled all tasks of the loop. Nothing of this job has run.
            self._start(call)
            return
        was_full = self.full()
        del self._running[call.job.pk, call.job.attempt]
        if was_full:
            self._services.wake()


async def _watch() -> None:
    await sync_to_async(watch_coroutines)()


def is_of_coroutine(job: ClaimedJob, leave: Callable[[str], None] = lambda task: None) -> bool:
    """Return whether the task is a coroutine function. Call ``leave`` with an unknown task.

    Such jobs run at the same time, and form no slot groups.
    """
    try:
        return is_coroutine(load(job.task).func)
    except BaseException:
        leave(job.task)
        return False
