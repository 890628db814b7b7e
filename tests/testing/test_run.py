"""The helpers for a project's own tests: jobs are run, time passes, and hooks of commits run."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import TestCase
from django.utils import timezone

from django_dbqueue import Rate, batch, recurring, task
from django_dbqueue.models import Job, Queue, RecurringTask, TaskState
from django_dbqueue.testing import (
    advance,
    assert_enqueued,
    assert_not_enqueued,
    drain,
    enqueued,
    run_job,
)

from .. import tasks
from ..models import Run

pytestmark = pytest.mark.django_db(databases=["default", "other"])


@task(max_attempts=3, backoff=lambda error, result: 600.0)
def fails() -> None:
    raise ValueError("wrong")


@task
def enqueues_another() -> None:
    tasks.add.enqueue(1)


@task(rate=Rate(1, per=60))
def rated(number: int) -> None:
    pass


@task(key=lambda name: name)
def debounced(name: str) -> None:
    pass


class TestRunJob:
    def test_only_this_job_runs(self) -> None:
        other, wanted = tasks.add.enqueue(1), tasks.add.enqueue(2, b=3)

        result = run_job(wanted)

        assert (result.status, result.return_value) == ("SUCCESSFUL", 5)
        other.refresh()
        assert other.status == "READY"

    def test_job_runs_before_its_time_and_behind_others(self) -> None:
        tasks.add.using(priority=50).enqueue(1)
        result = tasks.add.using(run_after=timedelta(days=1)).enqueue(2)

        assert run_job(result).return_value == 2

    def test_each_call_is_the_next_attempt(self) -> None:
        result = fails.enqueue()

        assert [run_job(result).attempts for _ in range(3)] == [1, 2, 3]
        result.refresh()
        assert result.status == "FAILED"
        with pytest.raises(ValueError, match=r"is failed\. Give one that is ready or scheduled"):
            run_job(result)

    def test_jobs_that_it_enqueues_wait(self) -> None:
        run_job(enqueues_another.enqueue())

        assert Job.objects.ready().get().task == "tests.tasks.add"

    def test_row_of_another_backend(self) -> None:
        tasks.add.using(backend="other").enqueue(4)

        assert run_job(Job.objects.using("other").get()).return_value == 4

    def test_job_that_its_rate_refuses_is_named(self) -> None:
        first, second = rated.enqueue(1), rated.enqueue(2)
        Job.objects.update(state="ready", blocked_by=None)
        run_job(first)

        with pytest.raises(ValueError, match=f"a limit of the job {second.id} refuses it now"):
            run_job(second)

        advance(minutes=1)
        assert run_job(second).status == "SUCCESSFUL"

    def test_deleted_job_is_named(self) -> None:
        result = tasks.add.enqueue(1)
        Job.objects.all().delete()

        with pytest.raises(ValueError, match=f"the job {result.id} is deleted"):
            run_job(result)

    def test_batch_finishes(self) -> None:
        with batch(on_success=tasks.row) as opened:
            member = tasks.nothing.enqueue()

        run_job(member)

        assert_enqueued(tasks.row, args=[str(opened.id)])


class TestAdvance:
    def test_retries_become_due(self) -> None:
        result = fails.enqueue()
        assert drain() == 1

        advance(minutes=9)
        assert drain() == 0
        advance(minutes=2)
        assert drain() == 1
        advance(hours=1)
        drain()

        result.refresh()
        assert (result.status, result.attempts) == ("FAILED", 3)

    def test_delayed_jobs_become_due_and_others_expire(self) -> None:
        tomorrow = tasks.row.using(run_after=timedelta(days=1)).enqueue("tomorrow")
        expires = tasks.row.using(expires=timedelta(hours=1)).enqueue("late")

        advance(days=1, seconds=1)
        drain()

        for result in (tomorrow, expires):
            result.refresh()
        assert (tomorrow.status, expires.status) == ("SUCCESSFUL", "FAILED")
        assert list(Run.objects.values_list("job", flat=True)) == ["tomorrow"]

    def test_rates_and_pauses_end(self) -> None:
        rated.enqueue_many([(1,), (2,)])
        assert drain() == 1
        advance(seconds=61)
        assert drain() == 1
        Queue.objects.ensure_rows(["mail"])
        Queue.objects.named("mail").pause(timedelta(minutes=5))
        advance(minutes=6)
        assert not Queue.objects.paused().exists()

    def test_jobs_of_paused_queues_and_tasks_wait(self) -> None:
        tasks.add.using(queue_name="mail").enqueue(1)
        tasks.add.enqueue(1)
        tasks.nothing.enqueue()
        Queue.objects.named("mail").pause(timedelta(minutes=5))
        TaskState.objects.named("tests.tasks.nothing").pause()

        assert drain() == 1
        advance(minutes=6)
        assert drain() == 1
        TaskState.objects.all().resume()
        assert drain() == 1

    def test_debounce_runs_once(self) -> None:
        for _ in range(3):
            debounced.using(on_conflict="replace", run_after=timedelta(seconds=30)).enqueue("a")
            advance(seconds=20)
        assert drain() == 0
        advance(seconds=20)
        assert drain() == 1

    @pytest.mark.parametrize("time", [{}, {"minutes": -1}])
    def test_time_that_is_none_is_refused(self, time: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=r"is no positive time\. Give such as minutes=5"):
            advance(**time)

    def test_other_databases_stay(self) -> None:
        tasks.add.using(backend="other", run_after=timedelta(hours=1)).enqueue(1)

        advance(hours=2)
        assert drain("other") == 0
        advance(hours=2, backend="other")
        assert drain("other") == 1


class TestCommitHooks(TestCase):
    def test_jobs_on_commit_are_found_and_run(self) -> None:
        with transaction.atomic():
            tasks.row.using(enqueue="on_commit").enqueue("a")
            self.assertEqual(enqueued(tasks.row), [], "The code's own transaction is open.")
        assert_enqueued(tasks.row, args=["a"], times=1)

        self.assertEqual(drain(), 1)
        self.assertEqual(Run.objects.get().job, "a")

    def test_hooks_of_tasks_run(self) -> None:
        on_commit_then_add.enqueue()

        self.assertEqual(drain(), 2)

    def test_transaction_that_is_rolled_back_enqueues_nothing(self) -> None:
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            tasks.row.using(enqueue="on_commit").enqueue("a")
            raise ZeroDivisionError

        self.assertEqual(drain(), 0)

    def test_captured_hooks_run_once(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            tasks.row.using(enqueue="on_commit").enqueue("a")

        self.assertEqual(drain(), 1)

    def test_hooks_of_the_project_are_left_to_the_test(self) -> None:
        called: list[int] = []
        transaction.on_commit(lambda: called.append(1))
        drain()
        self.assertEqual(called, [])


def write_twice() -> None:
    """Violate a unique constraint."""
    Run.objects.create(job="a")
    Run.objects.create(job="a")


@task(max_attempts=2, backoff=lambda error, result: 600.0)
def breaks_by_the_orm() -> None:
    write_twice()


@task
def breaks_by_sql() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT no_such_column FROM dbqueue_job")


@task(atomic=True)
def breaks_its_own_transaction() -> None:
    write_twice()


@task(atomic=True)
def goes_on_in_its_broken_transaction() -> int:
    with suppress(IntegrityError):
        write_twice()
    return 1


@task
async def breaks_in_a_coroutine() -> None:
    await Run.objects.acreate(job="a")
    await Run.objects.acreate(job="a")


class TestErrorsOfTheDatabase(TestCase):
    def test_error_is_the_outcome_of_the_job(self) -> None:
        Run.objects.create(job="of the test")
        for each, error in (
            (breaks_by_the_orm, "django.db.utils.IntegrityError"),
            (breaks_by_sql, "django.db.utils."),
            (breaks_its_own_transaction, "django.db.utils.IntegrityError"),
            (goes_on_in_its_broken_transaction, "TransactionManagementError"),
            (breaks_in_a_coroutine, "django.db.utils.IntegrityError"),
        ):
            with self.subTest(each.name):
                result = each.enqueue()
                tasks.add.enqueue(1)

                self.assertEqual(drain(), 2)
                result.refresh()
                self.assertIn(error, result.errors[0].exception_class_path)
                self.assertEqual(Run.objects.get().job, "of the test")

        self.assertEqual(enqueued(breaks_by_the_orm)[0].state, "scheduled")
        self.assertEqual(Job.objects.filter(state=Job.State.SUCCESSFUL).count(), 5)

    def test_what_a_successful_task_has_written_stays(self) -> None:
        tasks.row.enqueue("a")
        run_job(breaks_by_the_orm.enqueue())

        self.assertEqual(drain(), 1)
        self.assertEqual(Run.objects.get().job, "a")


@task
def on_commit_then_add() -> None:
    tasks.add.using(enqueue="on_commit").enqueue(1)


def test_plugin_gives_the_helpers(dbqueue: Any) -> None:
    tasks.add.enqueue(1)

    assert dbqueue.drain() == 1
    dbqueue.assert_enqueued(tasks.add, args=[1], times=1)


def test_time_of_python_stays() -> None:
    before = timezone.now()
    advance(days=1)
    assert timezone.now() - before < timedelta(minutes=1)


@pytest.fixture
def nightly():
    return recurring("30 3 * * *", timezone="Europe/Berlin", name="nightly")(tasks.nothing)


@pytest.mark.usefixtures("nightly")
class TestAdvanceRecurring:
    def test_each_time_that_passes_has_a_job(self) -> None:
        advance(days=3, recurring=["nightly"])
        assert_enqueued(tasks.nothing, times=3)
        assert drain() == 3

    def test_short_times_add_up(self) -> None:
        for _ in range(48):
            advance(hours=1, recurring=["nightly"])
        assert_enqueued(tasks.nothing, times=2)

    def test_time_that_passed_without_it_is_not_made_up_for(self) -> None:
        advance(days=5)
        advance(days=1, recurring=["nightly"])
        assert_enqueued(tasks.nothing, times=1)

    def test_others_are_not_enqueued(self) -> None:
        recurring(every=timedelta(hours=1), name="hourly")(tasks.fail)
        advance(days=1, recurring=["nightly"])
        assert_not_enqueued(tasks.fail)

    def test_several_are_enqueued_in_the_order_of_their_times(self) -> None:
        recurring(every=timedelta(hours=8), name="thrice")(tasks.fail)
        advance(days=2, recurring=["nightly", "thrice"])
        names = [job.task.rpartition(".")[2] for job in Job.objects.order_by("pk")]
        assert (names.count("nothing"), names.count("fail")) == (2, 6)
        assert names != sorted(names)

    def test_unknown_or_disabled_names_are_errors(self) -> None:
        with pytest.raises(ValueError, match=r"'daily' is no enabled recurring task\. There are: "):
            advance(days=1, recurring=["daily"])
        advance(minutes=1, recurring=["nightly"])
        RecurringTask.objects.filter(name="nightly").disable()
        with pytest.raises(ValueError, match="'nightly' is no enabled recurring task"):
            advance(days=1, recurring=["nightly"])

    def test_too_many_times_are_an_error(self) -> None:
        recurring(every=timedelta(seconds=1), name="often")(tasks.fail)
        with pytest.raises(ValueError, match="more than 1,000 times of often pass"):
            advance(days=1, recurring=["often"])
        assert not Job.objects.all()
