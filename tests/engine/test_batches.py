"""Batches: a callback job is enqueued when all jobs of a batch have ended."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, connections, transaction

from django_dbqueue import batch, pipeline
from django_dbqueue.compat import InvalidTask
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.exceptions import BatchFinished
from django_dbqueue.models import Batch, Execution, Job
from django_dbqueue.testing import drain

from .. import direct
from ..conftest import LONG, until
from ..models import Run
from ..tasks import add, brew, fail, nothing, rejoice, sort_out, spread, sum_up

pytestmark = pytest.mark.django_db(transaction=True)
State = Job.State


def callbacks() -> list[str]:
    return sorted(
        Job.objects.filter(task__in=[sum_up.module_path, rejoice.module_path]).values_list(
            "task", flat=True
        )
    )


def settle(*jobs, state=State.SUCCESSFUL):
    outcome = (
        Execution.Outcome.SUCCESSFUL if state == State.SUCCESSFUL else Execution.Outcome.FAILED
    )
    return direct.settle([AttemptResult.of(job, outcome, state) for job in jobs])


def test_callbacks_run_after_all_jobs_end():
    with batch(on_finish=sum_up, on_success=rejoice, description="nightly import") as import_:
        add.enqueue_many([(1,), (2,)])
        add.enqueue(3)
    assert callbacks() == []
    assert import_.progress() == {"ready": 3}

    drain()

    assert sorted(Run.objects.values_list("job", flat=True)) == sorted(
        [str(import_.id), f"{import_.id} well"]
    )
    assert import_.progress() == {"successful": 3}
    assert Batch.objects.get().finished_at is not None


def test_async_batch_collects_enqueued_jobs():
    async def fill():
        async with batch(on_finish=sum_up) as filled:
            await add.aenqueue_many([(1,), (2,)])
            await add.aenqueue(3)
        await add.aenqueue(4)
        return filled

    filled = async_to_sync(fill)()

    assert filled.progress() == {"ready": 3}
    drain()
    assert callbacks() == ["tests.tasks.sum_up"]


def test_error_in_async_batch_discards_its_jobs():
    async def fail_halfway():
        async with batch(on_finish=sum_up):
            await add.aenqueue_many([(1,), (2,)])
            raise LookupError

    with pytest.raises(LookupError):
        async_to_sync(fail_halfway)()

    assert {job.state for job in Job.objects.all()} == {State.DISCARDED}
    assert callbacks() == []


async def cancel(task):
    """Cancel an asyncio task, and continue when it waits again or has ended."""
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def busy_database_thread():
    free = threading.Event()
    waiting = asyncio.create_task(sync_to_async(free.wait)(LONG))
    await asyncio.sleep(0)
    yield
    free.set()
    await waiting


def assert_ended_without_callbacks(filled):
    assert Batch.objects.get(pk=filled.id).sealed_at is not None
    assert Batch.objects.get(pk=filled.id).finished_at is not None
    assert not Job.objects.exclude(state=State.DISCARDED).exists()


def test_batch_cancelled_while_it_opens_ends_without_callbacks(backend, monkeypatch):
    filled = batch(on_finish=sum_up, on_success=rejoice)
    open_batch = type(backend).open_batch

    async def fill():
        async with filled:
            pytest.fail("The block has begun.")

    async def main():
        def open_and_cancel(*args):
            open_batch(*args)
            asyncio.run_coroutine_threadsafe(cancel(task), loop).result()

        monkeypatch.setattr(type(backend), "open_batch", open_and_cancel)
        loop, task = asyncio.get_running_loop(), asyncio.create_task(fill())
        with pytest.raises(asyncio.CancelledError):
            await task

    async_to_sync(main)()

    assert_ended_without_callbacks(filled)


def test_batch_cancelled_in_its_block_discards_its_jobs():
    filled = batch(on_finish=sum_up, on_success=rejoice)

    async def fill():
        async with filled:
            await add.aenqueue_many([(1,), (2,)])
            await asyncio.sleep(LONG)

    async def main():
        task = asyncio.create_task(fill())
        while not await Job.objects.acount():
            await asyncio.sleep(0.01)
        async with busy_database_thread():
            await cancel(task)
            await cancel(task)  # While the end of the batch waits for the thread.
        with pytest.raises(asyncio.CancelledError):
            await task

    async_to_sync(main)()

    assert_ended_without_callbacks(filled)
    assert Job.objects.count() == 2


def test_batch_cancelled_after_its_block_keeps_its_jobs():
    filled = batch(on_finish=sum_up)
    leave = asyncio.Event()

    async def fill():
        async with filled:
            await add.aenqueue(1)
            await leave.wait()

    async def main():
        task = asyncio.create_task(fill())
        while not await Job.objects.acount():
            await asyncio.sleep(0.01)
        async with busy_database_thread():
            leave.set()
            await asyncio.sleep(0.01)
            await cancel(task)
        with pytest.raises(asyncio.CancelledError):
            await task

    async_to_sync(main)()

    assert filled.progress() == {"ready": 1}
    drain()
    assert callbacks() == ["tests.tasks.sum_up"]


def test_on_success_is_skipped_after_a_failure():
    with batch(on_finish=sum_up, on_success=rejoice):
        add.enqueue(1)
        fail.enqueue()

    drain()

    assert callbacks() == ["tests.tasks.sum_up"]


def test_empty_batch_finishes_at_once():
    with batch(on_finish=sum_up, on_success=rejoice):
        pass

    assert callbacks() == ["tests.tasks.rejoice", "tests.tasks.sum_up"]


def test_open_batch_does_not_finish(claim):
    with batch(on_finish=sum_up):
        add.enqueue(1)
        settle(*claim())
        assert direct.finish_batches() == []
        add.enqueue(2)

    assert callbacks() == []


def test_members_add_jobs_to_their_batch():
    with batch(on_finish=sum_up):
        spread.enqueue(4)

    drain()

    assert Job.objects.filter(batch__isnull=False).count() == 2**5 - 1
    assert Run.objects.count() == 1


def test_batch_accepts_jobs_until_it_finishes():
    with batch(on_finish=sum_up) as import_:
        add.enqueue(1)
    with batch.of(import_.id):
        add.enqueue(2)
    drain()

    said = f"Batch {import_.id} has finished: no job can be added to it. Open another."
    with pytest.raises(BatchFinished, match=said), batch.of(str(import_.id)):
        add.enqueue(3)
    assert Run.objects.count() == 1


def test_uncommitted_addition_keeps_batch_open(claim):
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")
    with batch(on_finish=sum_up) as import_:
        add.enqueue(1)
    (job,) = claim()
    added, go_on = threading.Event(), threading.Event()

    def adder():
        with transaction.atomic(), batch.of(import_.id):
            add.enqueue(2)
            added.set()
            go_on.wait(LONG)
        connections.close_all()

    thread = threading.Thread(target=adder)
    thread.start()
    assert added.wait(LONG)
    settle(job)

    assert direct.finish_batches() == []

    go_on.set()
    thread.join()
    assert direct.finish_batches() == []
    drain()
    assert Run.objects.count() == 1


def test_concurrent_finishers_enqueue_callback_once(claim):
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")
    with batch(on_finish=sum_up):
        add.enqueue_many([(n,) for n in range(8)])
    settle(*claim())
    barrier = threading.Barrier(6)

    def finisher():
        barrier.wait(LONG)
        direct.finish_batches()
        connections.close_all()

    threads = [threading.Thread(target=finisher) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert callbacks() == ["tests.tasks.sum_up"]


def test_batch_discard_keeps_running_jobs(claim):
    with batch(on_finish=sum_up, on_success=rejoice) as import_:
        add.enqueue_many([(n,) for n in range(5)])
    jobs = claim(limit=2)

    assert import_.discard() == 3
    settle(*jobs)
    direct.finish_batches()

    assert import_.progress() == {"discarded": 3, "successful": 2}
    assert callbacks() == ["tests.tasks.sum_up"]


def test_error_inside_batch_discards_its_jobs():
    with pytest.raises(ZeroDivisionError), batch(on_finish=sum_up) as import_:
        add.enqueue(1)
        raise ZeroDivisionError

    assert import_.progress() == {"discarded": 1}
    assert callbacks() == []


def test_rollback_removes_batch_and_jobs():
    with transaction.atomic():
        with batch(on_finish=sum_up):
            add.enqueue(1)
        transaction.set_rollback(True)

    assert (Batch.objects.count(), Job.objects.count()) == (0, 0)


def test_scheduled_retry_keeps_batch_open(claim):
    with batch(on_finish=sum_up):
        add.enqueue(1)
    (job,) = claim()
    settle(job, state=State.SCHEDULED)

    assert direct.finish_batches() == []


def test_fanned_out_jobs_belong_to_the_batch():
    with batch(on_finish=sum_up) as import_:
        pipeline(sort_out, brew).enqueue("fan out")
    drain()

    assert import_.progress() == {"successful": 3}
    assert Run.objects.count() == 1


def test_drain_runs_batch_callback_before_exit(runqueue):
    with batch(on_finish=sum_up):
        add.enqueue(1)

    assert runqueue("--drain", "--embedded").wait(LONG) == 0

    assert Run.objects.count() == 1


def test_jobs_enqueued_after_block_are_not_members():
    with batch():
        add.enqueue(1)
    add.enqueue(2)

    assert Job.objects.filter(batch=None).count() == 1


def test_workers_finish_the_batch(runqueue):
    with batch(on_finish=sum_up):
        add.enqueue_many([(n,) for n in range(200)])
        spread.enqueue(3)
    runqueue("--processes", "1" if connection.vendor == "sqlite" else "2")

    until(lambda: Run.objects.exists())

    assert Job.objects.filter(batch__isnull=False).exclude(state=State.SUCCESSFUL).count() == 0
    assert Batch.objects.get().finished_at is not None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"on_finish": sum_up.using(key="a")},
            "on_finish is enqueued when the batch has finished. Leave its run_after, key and expires "
            "out.",
        ),
        ({"on_finish": sum_up.using(expires=timedelta(hours=1))}, "key and expires out."),
        (
            {"on_finish": len},
            "on_finish must be a task that takes the batch's id, not <built-in function len>.",
        ),
        (
            {"on_success": nothing},
            "on_success gets one argument, the batch's id: tests.tasks.nothing(): too many positional",
        ),
    ],
)
def test_invalid_callback_is_refused(given, said):
    with pytest.raises(InvalidTask) as caught:
        batch(**given)
    assert said in str(caught.value)
    assert not Batch.objects.exists()
