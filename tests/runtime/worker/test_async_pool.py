"""The jobs of ``async def`` tasks: claimed in large groups, started on their loop, and never on a thread as well."""

from __future__ import annotations

import asyncio
import sys

import pytest
from django.db.models import Max, Min

from django_dbqueue.compat import signals
from django_dbqueue.core.options import Options
from django_dbqueue.models import Execution, Job
from django_dbqueue.runtime.worker import async_pool
from django_dbqueue.runtime.worker.async_pool import AsyncPool

from ... import tasks
from ...conftest import LONG, until

pytestmark = pytest.mark.django_db(transaction=True)


def jobs_of(*kinds) -> list[Job]:
    return [Job(task=kind.module_path, queue="default", attempt=1) for kind in kinds]


@pytest.fixture
def started():
    """The jobs that a loop has started; each ends at once."""
    return []


@pytest.fixture
def loop(started):
    async def run(call):
        started.append(call.job)

    loop = AsyncPool(Options(coroutines=100, prefetch=60), run, lambda outcome: None, lambda: None)
    yield loop
    loop.close()


def test_it_takes_its_own_and_leaves_the_others(loop, started):
    jobs = jobs_of(tasks.echo, tasks.add, tasks.echo)

    assert loop.take(jobs, pytest.fail) == ([jobs[1]], [])
    assert until(lambda: len(started) == 2 and started) == [jobs[0], jobs[2]]


def test_one_that_has_ended_before_the_others_are_given_out_is_not_among_them(
    loop, started, monkeypatch
):
    def at_once(coroutine, of_loop):
        asyncio.run(coroutine)

    monkeypatch.setattr(async_pool.asyncio, "run_coroutine_threadsafe", at_once)
    monkeypatch.setattr(loop, "_is_watched", True)
    real = loop._begin

    async def begin(calls):
        await real(calls)
        while loop.running():
            await asyncio.sleep(0)

    monkeypatch.setattr(loop, "_begin", begin)

    assert loop.take(jobs_of(tasks.echo), pytest.fail) == ([], [])
    assert len(started) == 1
    monkeypatch.undo()


def test_there_is_room_for_many_once_all_that_come_are_its_own(loop):
    assert loop.room() == 0
    loop.take(jobs_of(tasks.echo, tasks.add), pytest.fail)
    assert loop.room() == 0
    loop.take(jobs_of(tasks.echo), pytest.fail)
    until(lambda: not loop.running())
    assert loop.room() == 60
    loop.take([], pytest.fail)
    assert loop.room() == 60


def test_without_a_prefetch_there_is_room_for_one():
    async def run(call): ...

    loop = AsyncPool(Options(coroutines=3, prefetch=0), run, lambda outcome: None, lambda: None)
    loop.take(jobs_of(tasks.echo), pytest.fail)
    until(lambda: not loop.running())

    assert loop.room() == 1
    loop.close()


def test_a_task_that_is_not_known_is_left_to_others(loop):
    left = []
    jobs = jobs_of(tasks.add)
    jobs[0].task = "tests.tasks.gone"

    assert (loop.take(jobs, left.append), left) == ((jobs, []), ["tests.tasks.gone"])


def test_those_for_which_there_is_no_room_are_not_started(loop, started):
    jobs = jobs_of(*[tasks.echo] * 120)

    assert loop.take(jobs, pytest.fail) == ([], jobs[100:])
    assert until(lambda: len(started) == 100)


def test_no_more_run_than_may(worker, monkeypatch):
    """They are claimed with room for quick jobs on threads, before it is known what they are."""
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


def test_very_many_wait_at_a_time(worker):
    worker(coroutines=500)
    tasks.echo.enqueue_many([(1, 2.0)] * 500)

    until(lambda: not Job.objects.exclude(state="successful").exists())

    ran = Execution.objects.aggregate(first=Min("started_at"), last=Max("finished_at"))
    # Nine at a time, they take two minutes.
    assert (ran["last"] - ran["first"]).total_seconds() < 40


def test_receivers_of_signals_run_where_they_may_use_the_database(worker):
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
def test_coroutine_cancelled_again_while_its_end_is_noted_is_settled(worker, after_end, state):
    def receiver(**kwargs):
        """With one, the end is noted on another thread, for which the loop waits."""

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


def test_receiver_of_a_failed_coroutine_sees_the_exception_being_handled(worker):
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
