"""The event loop of a worker, for ``async def`` tasks: many run at a time, on one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from uuid import UUID

from ..models import Job, Settlement

Run = Callable[[Job], Awaitable[Settlement]]


class Coroutines:
    """As Pool, for coroutines. The loop's thread starts with the first job."""

    def __init__(self, limit: int, run: Run, settle: Callable[[Settlement], None], wake: Callable[[], None]) -> None:
        self._limit, self._run, self._settle, self._wake = limit, run, settle, wake
        self._running: dict[tuple[UUID, int], Job] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, job: Job) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
        self._running[job.pk, job.attempt] = job
        asyncio.run_coroutine_threadsafe(self._work(job), self._loop)

    def full(self) -> bool:
        return len(self._running) >= self._limit

    def running(self) -> list[Job]:
        return list(self._running.values())

    def close(self) -> None:
        if self._loop:
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _work(self, job: Job) -> None:
        self._settle(await self._run(job))
        was_full = self.full()
        del self._running[job.pk, job.attempt]
        if was_full:
            self._wake()
