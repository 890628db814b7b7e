"""PgQueuer: an event loop, with blocking functions in threads; more workers are forks.

Its batches are of its default size. It has no smaller limit of jobs at a time than two batches, so
only its threads are limited.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from . import Rival, fork, in_event_loop


class Adapter(Rival):
    requires = ("pgqueuer[asyncpg]",)

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def count_ended(self, query: Callable[[str], Any], jobs: int) -> int:
        """Subtract the rows of jobs that have not ended: those of the others are deleted."""
        return jobs - int(query("SELECT count(*) FROM pgqueuer"))

    def task(self, function: Callable[..., Any]) -> Any:
        self._functions[function.__name__] = in_event_loop(function)
        return function.__name__

    def prepare(self) -> None:
        super().prepare()
        self._client.run(self._queries.install())

    def enqueue(self, task: Any, *args: Any) -> None:
        self._client.run(self._queries.enqueue(task, json.dumps(args).encode()))

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        payloads = [json.dumps(call).encode() for call in calls]
        several = [task] * len(payloads), payloads, [0] * len(payloads)
        self._client.run(self._queries.enqueue(*several))

    def work(self, processes: int, threads: int) -> None:
        from ..project import tasks  # noqa: F401

        fork(processes)
        asyncio.run(self._serve(threads))

    async def _serve(self, threads: int) -> None:
        from pgqueuer import PgQueuer

        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
        queue = PgQueuer.from_asyncpg_connection(await _connection())
        for name, function in self._functions.items():
            queue.entrypoint(name)(_entrypoint(function))
        await queue.run()

    @cached_property
    def _client(self) -> asyncio.Runner:
        return asyncio.Runner()

    @cached_property
    def _queries(self) -> Any:
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        return Queries(AsyncpgDriver(self._client.run(_connection())))


async def _connection() -> Any:
    import asyncpg

    return await asyncpg.connect(os.environ["DATABASE_URL"])


def _entrypoint(function: Callable[..., Any]) -> Callable[[Any], Any]:
    async def run(job: Any) -> None:
        await function(*json.loads(job.payload))

    return run
