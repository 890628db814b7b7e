"""The helpers for a project's own tests: which jobs were enqueued."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import transaction
from django.test import TestCase
from django.utils import timezone

from django_dbqueue import task
from django_dbqueue.models import Job
from django_dbqueue.testing import (
    aadvance,
    aassert_enqueued,
    aassert_not_enqueued,
    adrain,
    aenqueued,
    arun_job,
    assert_enqueued,
    assert_not_enqueued,
    drain,
    enqueued,
)

from .. import tasks

pytestmark = pytest.mark.django_db


@task(key=lambda invoice, **_: str(invoice), takes_context=False)
def send(invoice, copies=1, *, colour="black"):
    pass


@task(takes_context=True)
def told(context, *words, **options):
    pass


class TestArguments:
    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ([7], {}),
            ([], {"invoice": 7}),
            ([7, 1], {}),
            ([], {"copies": 1}),
            ([7], {"colour": "black"}),
            ([], {}),
        ],
    )
    @pytest.mark.parametrize("call", [((7,), {}), ((), {"invoice": 7, "copies": 1})])
    def test_calls_are_compared_by_name_and_with_defaults(self, call, args, kwargs):
        send.enqueue(*call[0], **call[1])

        (job,) = assert_enqueued(send, args=args, kwargs=kwargs, times=1)
        assert job == Job.objects.get()

    @pytest.mark.parametrize(
        ("args", "kwargs"), [([8], {}), ([7, 2], {}), ([], {"colour": "red"}), (["7"], {})]
    )
    def test_other_calls_are_not_found(self, args, kwargs):
        send.enqueue(7)

        assert_not_enqueued(send, args=args, kwargs=kwargs)

    def test_context_is_no_argument(self):
        told.enqueue("a", "b", loud=True)

        assert_enqueued(told, args=["a", "b"], kwargs={"loud": True})
        assert_not_enqueued(told, args=["a"])
        assert_not_enqueued(told, kwargs={"loud": False})

    def test_values_are_compared_as_json(self):
        told.enqueue((1, 2))

        assert_enqueued(told, args=[[1, 2]])

    def test_unknown_argument_is_an_error_and_no_mismatch(self):
        with pytest.raises(TypeError, match="invoce"):
            assert_not_enqueued(send, kwargs={"invoce": 7})

    def test_job_that_does_not_fit_the_signature_is_no_match(self):
        send.enqueue(7)
        Job.objects.update(args=[1, 2, 3, 4])

        assert_not_enqueued(send, args=[7])


class TestOptions:
    def test_queue_key_and_time_are_compared(self):
        send.using(queue_name="mail", run_after=timedelta(hours=1)).enqueue(7)
        at = timezone.now() + timedelta(hours=1)

        assert_enqueued(send, queue="mail", key="7", run_after=timedelta(hours=1))
        assert_enqueued(send, run_after=at)
        for other in (
            {"queue": "default"},
            {"key": "8"},
            {"run_after": timedelta(hours=2)},
            {"run_after": at - timedelta(minutes=1)},
        ):
            assert_not_enqueued(send, **other)

    def test_finished_jobs_count_too(self):
        tasks.nothing.enqueue()
        drain()

        assert_enqueued(tasks.nothing, times=1)

    def test_jobs_of_other_tasks_do_not_count(self):
        tasks.nothing.enqueue()

        assert enqueued(tasks.add) == []

    @pytest.mark.parametrize("times", [0, 1, 3])
    def test_number_of_jobs_is_exact(self, times):
        for _ in range(2):
            tasks.nothing.enqueue()

        assert len(assert_enqueued(tasks.nothing)) == 2
        with pytest.raises(AssertionError, match=rf"Expected {times} job.* and found 2\."):
            assert_enqueued(tasks.nothing, times=times)


class TestMessage:
    def test_it_lists_the_jobs_that_there_are(self):
        send.using(queue_name="mail").enqueue(8, colour="red")

        with pytest.raises(AssertionError) as error:
            assert_enqueued(send, args=[7], queue="mail")

        first, job = str(error.value).splitlines()
        assert first == (
            "Expected a job of tests.testing.test_assertions.send with args=[7], queue='mail', and found 0. "
            "The jobs of the task are:"
        )
        assert job.startswith(
            "  tests.testing.test_assertions.send(8, colour='red'): ready, queue 'mail', key '8', run_after "
        )

    def test_jobs_of_other_tasks_are_listed_if_the_task_has_none(self):
        send.enqueue(8)

        with pytest.raises(AssertionError) as error:
            assert_enqueued(tasks.add, args=[1])

        first, job = str(error.value).splitlines()
        assert first.endswith("The task has no jobs; the backend 'default' has:")
        assert job.startswith("  tests.testing.test_assertions.send(8)")

    def test_it_says_that_there_are_none_or_more(self):
        with pytest.raises(AssertionError, match="  none"):
            assert_enqueued(tasks.nothing)
        for _ in range(22):
            tasks.nothing.enqueue()
        with pytest.raises(AssertionError, match="  and 2 more"):
            assert_not_enqueued(tasks.nothing)


class TestMisuse:
    def test_function_is_no_task(self):
        with pytest.raises(TypeError, match=r"is no task of django_dbqueue\. Give a function with"):
            assert_enqueued(send.func)

    def test_backend_without_jobs_is_refused(self, settings):
        base = type(tasks.nothing.get_backend()).__mro__[1].__module__.removesuffix(".base")
        dummy = {"BACKEND": f"{base}.dummy.DummyBackend"}
        settings.TASKS = {**settings.TASKS, "dummy": dummy}
        with pytest.raises(TypeError, match="is of DummyBackend; "):
            assert_enqueued(tasks.nothing.using(backend="dummy"))


class InTestCase(TestCase):
    def test_hooks_that_have_not_run_are_named(self):
        transaction.on_commit(lambda: tasks.add.enqueue(1))
        with self.assertRaisesMessage(AssertionError, "Hooks of on_commit() that have not run: 1."):
            assert_enqueued(tasks.add)

    async def test_helpers_in_coroutines(self):
        result = await tasks.add.aenqueue(1, b=2)
        await aassert_enqueued(tasks.add, args=[1, 2], times=1)
        await aassert_not_enqueued(tasks.add, args=[3])
        assert (await arun_job(result)).return_value == 3
        await tasks.add.using(run_after=timedelta(hours=1)).aenqueue(5)
        await aadvance(hours=2)
        assert await adrain() == 1
        assert [job.result for job in await aenqueued(tasks.add)] == [3, 5]

    def test_in_a_test_case(self):
        tasks.add.enqueue(1)
        assert_enqueued(tasks.add, args=[1])
