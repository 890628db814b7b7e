"""Oban for Python: an event loop, with blocking functions in threads; more workers are forks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from . import Rival, fork, in_event_loop


class Adapter(Rival):
    requires = ("oban",)
    ended = "SELECT count(*) FROM oban_jobs WHERE state IN ('completed', 'discarded')"

    def task(self, function: Callable[..., Any]) -> Any:
        from oban import job

        return job(queue="default")(in_event_loop(function))

    def prepare(self) -> None:
        from oban.schema import install

        super().prepare()
        self._client.run(install(self._pool))

    def enqueue(self, task: Any, *args: Any) -> None:
        self._client.run(self._oban.enqueue(task.new(*args)))

    def enqueue_many(self, task: Any, calls: Iterable[tuple[Any, ...]]) -> None:
        self._client.run(self._oban.enqueue_many(task.new(*call) for call in calls))

    def work(self, processes: int, threads: int) -> None:
        fork(processes)
        asyncio.run(_serve(int(os.environ.get("BENCH_COROUTINES", threads))))

    @cached_property
    def _client(self) -> asyncio.Runner:
        return asyncio.Runner()

    @cached_property
    def _pool(self) -> Any:
        return self._client.run(_config().create_pool())

    @cached_property
    def _oban(self) -> Any:
        return self._client.run(_config().create_oban(self._pool))


def _config(**given: Any) -> Any:
    from oban._config import Config

    return Config(dsn=os.environ["DATABASE_URL"], **given)


async def _serve(concurrency: int) -> None:
    async with await _config(queues={"default": concurrency}).create_oban():
        await asyncio.Event().wait()
