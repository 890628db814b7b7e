"""Batches: a callback job is enqueued when all jobs of a batch have ended."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from contextvars import copy_context
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


def members(filled):
    return [(job.args, job.state) for job in Job.objects.filter(batch=filled.id).order_by("pk")]


def test_concurrent_coroutines_end_their_own_blocks_of_one_batch():
    filled = batch(on_finish=sum_up)

    async def add_in_block(number, begun, leave, error=None):
        async with filled:
            begun.set()
            await leave.wait()
            await add.aenqueue(number)
            if error:
                raise error
        await add.aenqueue(-number)

    async def main():
        begun, leave = [asyncio.Event() for _ in range(3)], [asyncio.Event() for _ in range(3)]
        tasks = []
        for number, error in enumerate([None, LookupError(), None]):
            coroutine = add_in_block(number + 1, begun[number], leave[number], error)
            tasks.append(asyncio.create_task(coroutine))
            await begun[number].wait()
        results = []
        for number in (0, 1, 2):
            leave[number].set()
            results += await asyncio.gather(tasks[number], return_exceptions=True)
            assert (await Batch.objects.aget()).sealed_at is not None
        return results

    results = async_to_sync(main)()

    assert [type(each) for each in results] == [type(None), LookupError, type(None)]
    assert members(filled) == [([1], State.READY), ([3], State.READY)]
    drain()
    assert callbacks() == ["tests.tasks.sum_up"]


def test_opener_in_a_block_keeps_batch_open_while_coroutines_enter_it():
    filled = batch(on_finish=sum_up)

    async def add_in_block(begun, leave):
        async with filled:
            begun.set()
            await leave.wait()

    async def main():
        async with filled:
            leave = [asyncio.Event(), asyncio.Event()]
            tasks = []
            for each in leave:
                begun = asyncio.Event()
                tasks.append(asyncio.create_task(add_in_block(begun, each)))
                await begun.wait()
            for each, task in zip(leave, tasks, strict=True):
                each.set()
                await task
                assert (await Batch.objects.aget()).sealed_at is None
            await add.aenqueue(1)
        assert (await Batch.objects.aget()).sealed_at is not None

    async_to_sync(main)()

    assert members(filled) == [([1], State.READY)]


def test_concurrent_threads_end_their_own_blocks_of_one_batch():
    filled = batch(on_finish=sum_up)
    begun, leave = threading.Event(), threading.Event()
    errors = []

    def add_in_block():
        try:
            with filled:
                begun.set()
                assert leave.wait(LONG)
                add.enqueue(2)
                raise LookupError
        except Exception as error:
            errors.append(type(error))
        finally:
            connections.close_all()

    thread = threading.Thread(target=add_in_block)
    with filled:
        add.enqueue(1)
        thread.start()
        assert begun.wait(LONG)
    assert Batch.objects.get().sealed_at is not None
    leave.set()
    thread.join()

    assert errors == [LookupError]
    assert members(filled) == [([1], State.READY)]


def test_threads_that_enter_a_new_batch_wait_until_it_is_written(backend, monkeypatch):
    filled = batch()
    open_batch = type(backend).open_batch
    opening, entered = threading.Event(), threading.Event()
    too_early = []

    def open_slowly(*args):
        opening.set()
        too_early.append(entered.wait(0.2))
        open_batch(*args)

    def add_in_block():
        assert opening.wait(LONG)
        with filled:
            entered.set()
            add.enqueue(2)
        connections.close_all()

    monkeypatch.setattr(type(backend), "open_batch", open_slowly)
    thread = threading.Thread(target=add_in_block)
    thread.start()
    with filled:
        thread.join()

    assert too_early == [False]
    assert members(filled) == [([2], State.READY)]


def test_batch_whose_opening_failed_is_opened_by_the_next_block(backend, monkeypatch):
    filled = batch()
    with monkeypatch.context() as broken, pytest.raises(TypeError):
        broken.setattr(type(backend), "open_batch", None)
        filled.__enter__()

    with filled:
        add.enqueue(1)

    assert members(filled) == [([1], State.READY)]
    assert Batch.objects.get().sealed_at is not None


def test_block_of_an_async_generator_closed_by_another_task_ends_its_batch():
    filled = batch(on_finish=sum_up)

    async def generate():
        async with filled:
            await add.aenqueue(1)
            yield

    async def main():
        generator = generate()
        await asyncio.create_task(anext(generator))
        await asyncio.create_task(generator.aclose())

    async_to_sync(main)()

    assert Batch.objects.get().finished_at is not None
    assert members(filled) == [([1], State.DISCARDED)]


def test_block_that_ends_in_another_context_does_not_end_the_openers():
    filled = batch(on_finish=sum_up)
    with filled:
        copy_context().run(filled.__enter__)
        copy_context().run(filled.__exit__, None, None, None)
        assert Batch.objects.get().sealed_at is None
        add.enqueue(1)
    add.enqueue(2)

    assert Batch.objects.get().sealed_at is not None
    assert members(filled) == [([1], State.READY)]


def test_block_ends_in_the_context_to_which_its_entry_was_copied():
    filled = batch(on_finish=sum_up)

    async def main():
        await sync_to_async(filled.__enter__)()
        await add.aenqueue(1)
        await sync_to_async(filled.__exit__)(None, None, None)
        await add.aenqueue(2)

    async_to_sync(main)()

    assert Batch.objects.get().sealed_at is not None
    assert members(filled) == [([1], State.READY)]


def test_batches_left_in_the_order_of_their_entry_keep_their_jobs():
    first, second = batch(), batch()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    add.enqueue(1)
    second.__exit__(None, None, None)
    add.enqueue(2)

    assert members(first) == []
    assert members(second) == [([1], State.READY)]
    assert not Batch.objects.filter(sealed_at=None).exists()


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
