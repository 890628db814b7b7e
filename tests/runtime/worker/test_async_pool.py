"""Jobs of ``async def`` tasks: claimed in large groups and run on the event loop, never on a thread."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from django.db import transaction
from django.db.models import Max, Min

from django_dbqueue.compat import signals
from django_dbqueue.core.options import Options
from django_dbqueue.models import Execution, Job
from django_dbqueue.runtime.worker.async_pool import AsyncPool
from django_dbqueue.runtime.worker.claimer import Claimer

from ... import tasks
from ...conftest import LONG, most_at_a_time, until
from ...models import Interval

pytestmark = pytest.mark.django_db(transaction=True)


def jobs_of(*kinds) -> list[Job]:
    return [Job(task=kind.module_path, queue="default", attempt=1) for kind in kinds]


@pytest.fixture
def started():
    """The jobs that the loop has started; each ends at once."""
    return []


@pytest.fixture
def loop(started):
    async def run(call):
        started.append(call.job)

    loop = AsyncPool(Options(coroutines=100, prefetch=60), run)
    yield loop
    loop.close()


def test_pool_takes_async_jobs_and_returns_others(loop, started):
    jobs = jobs_of(tasks.echo, tasks.add, tasks.echo)

    assert loop.take(jobs, pytest.fail) == ([jobs[1]], [])
    assert until(lambda: len(started) == 2 and started) == [jobs[0], jobs[2]]


def test_job_finished_during_take_is_not_returned(loop, started, monkeypatch):
    call_soon = asyncio.BaseEventLoop.call_soon_threadsafe

    def at_once(self, callback, *args, **kwargs):
        handle = call_soon(self, callback, *args, **kwargs)
        if callback == loop._begin:
            until(lambda: not loop.running())
        return handle

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", at_once)

    assert loop.take(jobs_of(tasks.echo), pytest.fail) == ([], [])
    assert len(started) == 1


def test_loop_notes_whether_all_claimed_jobs_were_async(loop):
    assert not loop.took_all
    loop.take(jobs_of(tasks.echo, tasks.add), pytest.fail)
    assert not loop.took_all
    loop.take(jobs_of(tasks.echo), pytest.fail)
    assert loop.took_all
    loop.take([], pytest.fail)
    assert loop.took_all
    until(lambda: not loop.running())
    assert loop.room() == 60


def test_room_is_one_without_prefetch():
    async def run(call): ...

    loop = AsyncPool(Options(coroutines=3, prefetch=0), run)
    loop.take(jobs_of(tasks.echo), pytest.fail)
    until(lambda: not loop.running())

    assert loop.room() == 1
    loop.close()


def test_job_of_unknown_task_is_returned(loop):
    left = []
    jobs = jobs_of(tasks.add)
    jobs[0].task = "tests.tasks.gone"

    assert (loop.take(jobs, left.append), left) == ((jobs, []), ["tests.tasks.gone"])


def test_jobs_beyond_capacity_are_returned_unstarted(loop, started):
    jobs = jobs_of(*[tasks.echo] * 120)

    assert loop.take(jobs, pytest.fail) == ([], jobs[100:])
    assert until(lambda: len(started) == 100)


def test_running_coroutines_stay_within_limit(worker, monkeypatch):
    """Claims leave room for quick jobs on threads, before their tasks are known."""
    at_a_time, begin = [], AsyncPool._begin

    def begun(self, calls):
        at_a_time.append(len(self._running))
        return begin(self, calls)

    monkeypatch.setattr(AsyncPool, "_begin", begun)
    tasks.echo.enqueue_many([(1, 0.1)] * 20)
    worker(coroutines=3, threads=8)

    until(lambda: not Job.objects.exclude(state="successful").exists())

    assert max(at_a_time) == 3
    assert Execution.objects.filter(outcome="successful").count() == Execution.objects.count() == 20


def test_short_coroutines_of_one_limit_do_not_share_a_slot(worker):
    tasks.occupy_async.enqueue_many([(str(n % 2), 0.005) for n in range(120)])
    worker(threads=4)

    until(lambda: not Job.objects.exclude(state="successful").exists())

    for key in ("0", "1"):
        assert most_at_a_time(Interval.objects.filter(key=key)) <= 2
    assert Interval.objects.count() == 120


def test_coroutines_whose_task_was_unknown_at_first_do_not_share_a_slot(worker, monkeypatch):
    """A thread releases a job of an unknown task, and that took no time."""
    monkeypatch.setattr(Claimer, "LEFT", 0.1)
    occupy_async = tasks.occupy_async
    occupy_async.enqueue("0", 0.05)
    monkeypatch.delattr(tasks, "occupy_async")
    worker(threads=4)
    until(lambda: Execution.objects.filter(outcome="interrupted").exists())

    monkeypatch.setattr(tasks, "occupy_async", occupy_async, raising=False)
    occupy_async.enqueue_many([("0", 0.05)] * 60)

    until(lambda: Interval.objects.filter(ended_at__isnull=False).count() >= 60)
    assert most_at_a_time(Interval.objects.filter(ended_at__isnull=False)) <= 2


def test_five_hundred_coroutines_wait_concurrently(worker):
    worker(coroutines=500)
    tasks.echo.enqueue_many([(1, 2.0)] * 500)

    until(lambda: not Job.objects.exclude(state="successful").exists())

    ran = Execution.objects.aggregate(first=Min("started_at"), last=Max("finished_at"))
    # Nine at a time would take two minutes.
    assert (ran["last"] - ran["first"]).total_seconds() < 40


def test_coroutine_starts_while_all_threads_are_busy(worker):
    """Among many jobs that only a thread can run."""
    worker(threads=2, shutdown_timeout=1)
    tasks.nap_for_ever.enqueue_many([()] * 2)
    until(lambda: Job.objects.running().count() == 2)
    tasks.nap_for_ever.enqueue_many([()] * 300)

    results = tasks.echo.enqueue_many([(1,)] * 30)

    until(lambda: all(result.refresh() or result.is_finished for result in results))
    assert Job.objects.running().count() == 2


def test_plain_functions_start_while_the_loop_is_full(worker):
    worker(threads=2, coroutines=3, shutdown_timeout=1)
    tasks.echo.enqueue_many([(1, LONG)] * 3)
    until(lambda: Job.objects.running().count() == 3)
    tasks.echo.enqueue_many([(1, LONG)] * 300)

    results = tasks.add.enqueue_many([(1,)] * 30)

    until(lambda: all(result.refresh() or result.is_finished for result in results))
    assert Job.objects.running().count() == 3


def test_signal_receivers_can_use_the_database(worker):
    seen = []

    def receiver(task_result, **kwargs):
        seen.append((Job.objects.count(), task_result.status))

    signals.task_started.connect(receiver)
    signals.task_finished.connect(receiver)
    try:
        worker()
        assert tasks.echo.enqueue(3).wait(timeout=LONG).return_value == 3
    finally:
        signals.task_started.disconnect(receiver)
        signals.task_finished.disconnect(receiver)

    assert seen == [(1, "RUNNING"), (1, "SUCCESSFUL")]


@pytest.mark.parametrize(("after_end", "state"), [(False, "failed"), (True, "successful")])
def test_coroutine_cancelled_during_its_end_is_settled(worker, after_end, state):
    def receiver(**kwargs):
        """A receiver makes the loop record the end on another thread and wait for it."""

    signals.task_finished.connect(receiver)
    try:
        worker()
        result = tasks.cancel_for_ever.enqueue(3, after_end)
        until(lambda: Job.objects.get().state == state)
        assert Execution.objects.get().outcome == state
        assert tasks.echo.enqueue(4).wait(timeout=LONG).return_value == 4
    finally:
        signals.task_finished.disconnect(receiver)
    result.refresh()
    assert result.is_finished


def test_receiver_of_failed_coroutine_sees_the_exception(worker):
    seen = []

    def receiver(**kwargs):
        seen.append(sys.exc_info()[0])

    signals.task_finished.connect(receiver)
    try:
        worker()
        tasks.fail_async.enqueue()
        until(lambda: Job.objects.get().state == "failed")
    finally:
        signals.task_finished.disconnect(receiver)

    assert seen == [ValueError]
    assert Execution.objects.get().traceback.count("File ") == 1


def test_jobs_whose_asyncio_tasks_are_cancelled_before_their_first_step_run(worker):
    worker(threads=1)
    assert tasks.echo.enqueue(0).wait(timeout=LONG)
    with transaction.atomic():
        tasks.cancel_all_others.enqueue()
        tasks.echo.enqueue_many([(1,)] * 10)

    until(lambda: not Job.objects.exclude(state="successful").exists())

    assert Execution.objects.count() == 12


def test_claim_whose_start_is_cancelled_runs(loop, started):
    """The task of the first claim cancels all, before another claim has begun."""
    event_loop = loop._loop = asyncio.new_event_loop()
    loop.take(jobs_of(*[tasks.echo] * 3), pytest.fail)

    def cancel_all():
        for each in asyncio.all_tasks(event_loop):
            each.cancel()

    event_loop.call_soon(cancel_all)
    for _ in range(5):
        event_loop.call_soon(event_loop.stop)
        event_loop.run_forever()
        event_loop.call_soon(cancel_all)
    threading.Thread(target=loop._run_loop, args=(event_loop,), daemon=True).start()

    until(lambda: not loop.running())
    assert len(started) == 3
