"""The event loop of a worker, for ``async def`` tasks: many run at a time, on one thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from uuid import UUID

from asgiref.sync import sync_to_async

from ..models import Job, Settlement
from .calls import CoroutineCall
from .connection import close_connections

logger = logging.getLogger("django_dbqueue")

Run = Callable[[CoroutineCall], Awaitable[Settlement]]


class Coroutines:
    """As Pool, for coroutines. The loop's thread starts with the first job."""

    def __init__(self, limit: int, run: Run, settle: Callable[[Settlement], None], wake: Callable[[], None]) -> None:
        self._limit, self._run, self._settle, self._wake = limit, run, settle, wake
        self._running: dict[tuple[UUID, int], CoroutineCall] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def put(self, job: Job) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run_loop, args=(self._loop,), name="coroutines", daemon=True).start()
        self._running[job.pk, job.attempt] = call = CoroutineCall(job)
        asyncio.run_coroutine_threadsafe(self._work(call), self._loop)

    def full(self) -> bool:
        return len(self._running) >= self._limit

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
            except BaseException as error:
                # A coroutine that a task started beside itself raised SystemExit: whoever awaits it is told too.
                logger.warning("The event loop goes on after %r.", error)
        if not asyncio.all_tasks(loop):
            loop.close()

    async def _work(self, call: CoroutineCall) -> None:
        try:
            self._settle(await self._run(call))
        finally:
            was_full = self.full()
            del self._running[call.job.pk, call.job.attempt]
            if was_full:
                self._wake()
