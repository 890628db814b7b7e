"""Steps on the database thread are completed although their asyncio task is cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_dbqueue.core.cancellation import run_to_completion


def outcome_if_cancelled(step, *, all_tasks=False):
    """Cancel the task of a step, or all, while the step waits for the thread and while it runs."""
    free, running, cancelled = threading.Event(), threading.Event(), threading.Event()

    def slow_step():
        running.set()
        assert cancelled.wait(10)
        return step()

    async def main():
        waiting = asyncio.create_task(sync_to_async(free.wait)(10))
        await turns()
        kept = asyncio.all_tasks()
        task = asyncio.create_task(run_to_completion(slow_step))
        await turns()
        await cancel(kept, task)
        free.set()
        while not running.is_set():
            await asyncio.sleep(0.001)
        await cancel(kept, task)
        cancelled.set()
        await waiting
        return await task

    async def cancel(kept, task):
        for each in asyncio.all_tasks() - kept if all_tasks else [task]:
            each.cancel()
        await turns()

    async def turns():
        for _ in range(10):
            await asyncio.sleep(0)

    return async_to_sync(main)()


@pytest.mark.parametrize("all_tasks", [False, True])
def test_step_of_a_cancelled_task_runs_once(all_tasks):
    calls = []

    result, cancellation = outcome_if_cancelled(
        lambda: calls.append(1) or "done", all_tasks=all_tasks
    )

    assert (calls, result) == ([1], "done")
    assert isinstance(cancellation, asyncio.CancelledError)


def test_step_without_a_cancellation_returns_its_result():
    assert async_to_sync(run_to_completion)(lambda: 1) == (1, None)


def test_error_of_a_cancelled_step_is_raised():
    with pytest.raises(ZeroDivisionError):
        outcome_if_cancelled(lambda: 1 / 0)
