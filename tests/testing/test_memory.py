"""``InMemoryBackend``: the queue of a test that may use no database."""

from __future__ import annotations

import asyncio
import gc
import threading
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import SimpleTestCase, TestCase, TransactionTestCase, override_settings

from django_dbqueue import Rate, batch, limit, pipeline, task
from django_dbqueue.backoff import Constant
from django_dbqueue.compat import task_backends
from django_dbqueue.models import Job
from django_dbqueue.testing import (
    aassert_enqueued,
    adrain,
    advance,
    assert_enqueued,
    assert_not_enqueued,
    drain,
    enqueued,
    run_job,
)

from .. import tasks

MEMORY = {"default": {"BACKEND": "django_dbqueue.testing.InMemoryBackend", "QUEUES": []}}


@task(max_attempts=3, backoff=Constant(delay=60, jitter=0), takes_context=True)
def second_time(context):
    if context.attempt == 1:
        raise ValueError("not yet")
    return context.attempt


@task(key=lambda order: order)
def confirm(order, text=""):
    return text


@task(concurrency=limit(1, group="door"), rate=Rate(1, per=60))
def one_a_minute(number):
    return number


@task
def add_another(number):
    return tasks.add.enqueue(number).id


@task
async def add_another_async(number):
    return (await tasks.add.aenqueue(number)).id


@task
def finish(batch_id):
    return "done"


@override_settings(TASKS=MEMORY)
class WithoutDatabases(SimpleTestCase):
    def tearDown(self) -> None:
        from django_dbqueue.testing import memory

        memory.clear()

    def test_failed_job_is_retried_after_its_delay(self) -> None:
        result = second_time.enqueue()

        self.assertEqual(drain(), 1)
        result.refresh()
        self.assertEqual((result.status, result.attempts), ("READY", 1))
        advance(minutes=2)
        self.assertEqual(drain(), 1)
        self.assertEqual(second_time.get_result(result.id).return_value, 2)

    def test_delayed_jobs_become_due_or_expire(self) -> None:
        later = tasks.add.using(run_after=timedelta(hours=1)).enqueue(1)
        late = tasks.add.using(run_after=timedelta(hours=1), expires=timedelta(minutes=1))
        expired = late.enqueue(2)
        self.assertEqual(drain(), 0)
        advance(hours=2)
        drain()
        later.refresh()
        self.assertEqual(later.return_value, 1)
        (job,) = enqueued(tasks.add, args=[2])
        self.assertEqual((str(job.pk), job.state), (expired.id, "discarded"))

    def test_calls_with_one_key_share_a_job(self) -> None:
        confirm.enqueue("a", "first")
        confirm.enqueue("a", "second")
        self.assertEqual([job.args for job in enqueued(confirm)], [["a", "second"]])
        self.assertEqual(drain(), 1)

    def test_limit_and_rate_hold_a_job_back(self) -> None:
        one_a_minute.enqueue_many([(1,), (2,)])
        self.assertEqual(drain(), 1)
        advance(minutes=2)
        self.assertEqual(drain(), 1)

    def test_batch_with_a_pipeline_finishes(self) -> None:
        with batch(on_finish=finish):
            pipeline(tasks.add, tasks.add).enqueue(1)
        drain()
        assert_enqueued(finish, times=1)

    def test_job_that_a_job_enqueues_runs(self) -> None:
        add_another.enqueue(1)
        self.assertEqual(drain(), 2)
        assert_enqueued(tasks.add, args=[1], times=1)

    def test_coroutines_enqueue_and_run(self) -> None:
        add_another_async.enqueue(5)
        async_to_sync(tasks.add.aenqueue)(6)
        self.assertEqual(drain(), 3)
        assert_enqueued(tasks.add, args=[5], times=1)

    def test_job_of_another_thread_is_found(self) -> None:
        thread = threading.Thread(target=lambda: tasks.add.enqueue(7))
        thread.start()
        thread.join()
        assert_enqueued(tasks.add, args=[7], times=1)

    def test_job_of_a_thread_that_was_collected_is_found(self) -> None:
        thread = threading.Thread(target=lambda: tasks.add.enqueue(7))
        thread.start()
        thread.join()
        del thread
        gc.collect()
        assert_enqueued(tasks.add, args=[7], times=1)

    def test_run_job_leaves_other_jobs_waiting(self) -> None:
        tasks.add.enqueue(1)
        self.assertEqual(run_job(tasks.add.enqueue(2)).return_value, 2)
        self.assertEqual(drain(), 1)

    def test_nothing_is_left_of_another_test(self) -> None:
        assert_not_enqueued(tasks.add)

    def test_databases_are_still_refused(self) -> None:
        with self.assertRaisesMessage(Exception, "not allowed"):
            Job.objects.using("default").count()

    def test_it_is_not_listed(self) -> None:
        tasks.add.enqueue(1)
        self.assertEqual(sorted(connections), ["default", "other"])


@override_settings(TASKS=MEMORY)
class WithDatabase(TestCase):
    def test_jobs_are_not_in_the_database(self) -> None:
        tasks.add.enqueue(1)
        assert_enqueued(tasks.add, times=1)
        self.assertFalse(Job.objects.using("default").exists())

    def test_change_of_the_setting_forgets_them(self) -> None:
        tasks.add.enqueue(1)
        assert_enqueued(tasks.add, times=1)
        with override_settings(TASKS=MEMORY):
            assert_not_enqueued(tasks.add)


class WithCoroutines(SimpleTestCase):
    async def enqueue_and_run_one_job(self) -> None:
        await tasks.add.aenqueue(1)
        await aassert_enqueued(tasks.add, times=1)
        self.assertEqual(await adrain(), 1)

    test_jobs_run = override_settings(TASKS=MEMORY)(enqueue_and_run_one_job)
    test_no_job_is_left_of_another_test = override_settings(TASKS=MEMORY)(enqueue_and_run_one_job)


@override_settings(TASKS=MEMORY)
class WithAllDatabases(TransactionTestCase):
    databases = "__all__"

    def test_flush_leaves_it_alone(self) -> None:
        tasks.add.enqueue(1)
        self.assertEqual(drain(), 1)


def test_plain_function_of_pytest(settings: Any) -> None:
    """pytest-django refuses databases without its mark."""
    settings.TASKS = MEMORY
    tasks.add.enqueue(1)
    assert drain() == 1


def test_tables_outlive_the_thread_that_first_used_them(settings: Any) -> None:
    settings.TASKS = {**MEMORY, "of_a_thread": MEMORY["default"]}
    thread = threading.Thread(target=tasks.add.using(backend="of_a_thread").enqueue, args=[1])
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert drain("of_a_thread") == 1


def test_event_loop_may_be_the_first_to_use_it(settings: Any) -> None:
    async def use() -> int:
        settings.TASKS = {**MEMORY, "of_a_loop": MEMORY["default"]}
        await tasks.add.using(backend="of_a_loop").aenqueue(1)
        return await adrain("of_a_loop")

    assert asyncio.run(use()) == 1


@override_settings(TASKS=MEMORY)
def test_runqueue_refuses_it() -> None:
    with pytest.raises(CommandError, match="in the memory of this process"):
        call_command("runqueue", "--drain")


def test_two_backends_are_apart(settings: Any) -> None:
    settings.TASKS = {**MEMORY, "other": MEMORY["default"]}
    tasks.add.using(backend="other").enqueue(1)
    assert drain() == 0
    assert drain("other") == 1
    assert task_backends["default"].database != task_backends["other"].database
