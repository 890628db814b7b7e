"""``enqueue="on_commit"``: a job is written after the caller's commit, and never after a rollback."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, connections, transaction
from django.test import TestCase, override_settings

from django_dbqueue import batch, enqueue_many, limit, pipeline, task
from django_dbqueue.compat import InvalidTask, TaskResultDoesNotExist, task_backends
from django_dbqueue.core.options import Options
from django_dbqueue.exceptions import InvalidOption, NotYetVisible
from django_dbqueue.models import Batch, Job, RecurringExecution, RecurringTask
from django_dbqueue.recurrence.target import enqueue
from django_dbqueue.testing import drain

from .. import tasks
from ..conftest import BOTH

pytestmark = pytest.mark.django_db(transaction=True, databases=BOTH)

later = tasks.add.using(enqueue="on_commit")


@pytest.fixture
def by_options(settings):
    """The backend has the option; returns a way to change its OPTIONS further."""

    def change(**options):
        settings.TASKS = {
            **settings.TASKS,
            "default": {**settings.TASKS["default"], "OPTIONS": {"database": "default", **options}},
        }

    change(enqueue="on_commit")
    return change


@task
def sum_up(batch_id):
    return batch_id


class TestTransactions:
    def test_job_is_written_after_commit_with_its_known_id(self):
        with transaction.atomic():
            result = later.enqueue(1)
            assert (Job.objects.count(), result.enqueued_at) == (0, None)

        job = Job.objects.get()
        assert (result.id, result.enqueued_at) == (str(job.pk), job.enqueued_at)

    def test_rollback_drops_the_job(self):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            result = later.enqueue(1)
            raise ZeroDivisionError

        assert not Job.objects.exists()
        with pytest.raises(TaskResultDoesNotExist):
            result.refresh()

    def test_without_transaction_job_is_written_at_once(self):
        assert later.enqueue(1).enqueued_at == Job.objects.get().enqueued_at

    def test_nested_block_waits_for_the_outermost(self):
        with transaction.atomic():
            with transaction.atomic():
                later.enqueue(1)
            assert not Job.objects.exists()

        assert Job.objects.count() == 1

    def test_savepoint_rollback_drops_only_its_job(self):
        with transaction.atomic():
            later.enqueue(1)
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                later.enqueue(2)
                raise ZeroDivisionError

        assert [job.args for job in Job.objects.all()] == [[1]]

    def test_job_waits_for_transactions_of_all_databases(self):
        with transaction.atomic(using="other"):
            with transaction.atomic():
                later.enqueue(1)
            assert not Job.objects.exists()

        assert Job.objects.count() == 1

    @pytest.mark.parametrize("outer", BOTH)
    @pytest.mark.parametrize(
        "call",
        [
            lambda: later.enqueue(1),
            lambda: enqueue_many([later.prepare(1)]),
            lambda: tasks.add.enqueue_on_commit(1),
        ],
    )
    def test_rollback_in_any_database_drops_the_job(self, outer, call):
        (inner,) = set(BOTH) - {outer}
        with (
            transaction.atomic(using=outer),
            suppress(ZeroDivisionError),
            transaction.atomic(using=inner),
        ):
            call()
            raise ZeroDivisionError

        assert not Job.objects.exists()

    @pytest.mark.parametrize("database", BOTH)
    def test_savepoint_rollback_in_any_database_drops_the_job(self, database):
        (opposite,) = set(BOTH) - {database}
        with transaction.atomic(using=opposite), transaction.atomic(using=database):
            later.enqueue(1)
            with suppress(ZeroDivisionError), transaction.atomic(using=database):
                later.enqueue(2)
                raise ZeroDivisionError

        assert [job.args for job in Job.objects.all()] == [[1]]

    def test_invalid_call_is_refused_at_once(self):
        with transaction.atomic(), pytest.raises(TypeError, match="missing a required argument"):
            later.enqueue()

    def test_wait_inside_the_transaction_is_refused(self):
        with transaction.atomic(), pytest.raises(NotYetVisible):
            later.enqueue(1).wait(timeout=5)

    def test_run_after_counts_from_the_insert(self):
        with transaction.atomic():
            result = later.using(run_after=timedelta(hours=1)).enqueue(1)

        job = Job.objects.get()
        assert job.run_after - job.enqueued_at == timedelta(hours=1)
        assert result.enqueued_at == job.enqueued_at

    def test_async_enqueue_writes_the_job(self):
        assert async_to_sync(later.aenqueue)(1).id == str(Job.objects.get().pk)

    def test_many_are_written_after_commit(self):
        with transaction.atomic():
            results = later.enqueue_many([(1,), (2,)])
            assert not Job.objects.exists()

        assert {result.id for result in results} == {str(job.pk) for job in Job.objects.all()}

    def test_enqueue_on_commit_enqueues_once(self):
        with transaction.atomic():
            later.enqueue_on_commit(1)

        assert Job.objects.count() == 1

    @pytest.mark.parametrize("called", [tasks.add, pipeline(tasks.add)], ids=["task", "pipeline"])
    def test_enqueue_on_commit_has_the_arguments_of_the_call(self, called):
        argument = [1]
        with transaction.atomic():
            called.enqueue_on_commit(argument)
            argument.append(2)

        assert Job.objects.get().args == [[1]]

    def test_enqueue_on_commit_waits_with_another_backend(self):
        path = task_backends["default"].__class__.__mro__[1].__module__.rpartition(".")[0]
        with override_settings(TASKS={"default": {"BACKEND": f"{path}.dummy.DummyBackend"}}):
            results = task_backends["default"].results
            with transaction.atomic():
                tasks.add.enqueue_on_commit(1)
                assert results == []

            assert [result.args for result in results] == [[1]]


class TestCaptured(TestCase):
    """In TestCase, as with any on_commit callback."""

    def test_captured_callbacks_write_the_job(self):
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            later.enqueue(1)
            assert not Job.objects.exists()

        assert (Job.objects.count(), len(callbacks) > 0) == (1, True)
        assert drain() == 1


class TestWhereItIsSaid:
    def test_decorator_has_the_option(self):
        decorated = task(enqueue="on_commit")(tasks.add.func)

        with transaction.atomic():
            decorated.enqueue(1)
            assert not Job.objects.exists()

        assert Job.objects.count() == 1

    def test_backend_option_is_the_default(self, by_options):
        with transaction.atomic():
            tasks.add.enqueue(1)
            assert not Job.objects.exists()

        assert Job.objects.count() == 1

    def test_task_precedes_backend_option(self, by_options):
        with transaction.atomic():
            tasks.add.using(enqueue="in_transaction").enqueue(1)
            assert Job.objects.count() == 1

    def test_queue_precedes_backend_option(self, by_options):
        by_options(per_queue={"mail": {"enqueue": "on_commit"}})

        with transaction.atomic():
            tasks.add.using(queue_name="mail").enqueue(1)
            tasks.add.enqueue(2)
            assert [job.args for job in Job.objects.all()] == [[2]]

        assert Job.objects.count() == 2

    @pytest.mark.parametrize("value", ["commit", True, "", ["on_commit"]])
    def test_invalid_value_is_refused(self, value):
        with pytest.raises(InvalidTask, match=r"enqueue must be 'in_transaction' or 'on_commit'"):
            tasks.add.using(enqueue=value)
        with pytest.raises(InvalidTask, match=r"enqueue must be 'in_transaction' or 'on_commit'"):
            task(enqueue=value)(tasks.add.func)
        with pytest.raises(InvalidOption, match=r"enqueue=.* is not 'in_transaction' or"):
            Options.from_settings({"enqueue": value})
        with pytest.raises(InvalidOption, match=r"per_queue\['a'\]: enqueue=.* is not"):
            Options.from_settings({"per_queue": {"a": {"enqueue": value}}})

    def test_field_name_is_not_an_option(self):
        with pytest.raises(TypeError, match="enqueue_when is not an option"):
            task(enqueue_when="on_commit")(tasks.add.func)


class TestWithKeys:
    def test_result_learns_the_outcome_after_commit(self):
        first = tasks.add.using(key="a").enqueue(1)
        with transaction.atomic():
            second = later.using(key="a").enqueue(2)

        assert (second.id, second.enqueued) == (first.id, "merged")
        assert Job.objects.get().args == [2]

    def test_row_of_the_key_is_not_locked_before_commit(self):
        with transaction.atomic():
            later.using(key="a").enqueue(1)
            other = connections.create_connection("default")
            try:
                with other.cursor() as cursor:
                    cursor.execute("SELECT count(*) FROM dbqueue_job")
                    assert cursor.fetchone()[0] == 0
            finally:
                other.close()


class TestWithBatches:
    def test_dispatcher_between_commit_and_insert_leaves_the_batch_open(self, backend):
        seen: list[bool] = []
        with transaction.atomic():
            transaction.on_commit(lambda: seen.append(backend.finish_batches()))
            with batch(on_finish=sum_up):
                later.enqueue(1)
                later.enqueue_many([(2,), (3,)])
            assert not Job.objects.exists()

        assert seen == [False]
        assert drain() == 4
        assert Batch.objects.get().finished_at

    @pytest.mark.parametrize(
        "called", [tasks.add, pipeline(tasks.add, tasks.add)], ids=["task", "pipeline"]
    )
    def test_enqueue_on_commit_adds_the_job_to_the_batch(self, called):
        with transaction.atomic(), batch(on_finish=sum_up) as members:
            called.enqueue_on_commit(1)

        assert Job.objects.get().batch_id == members.id
        assert Batch.objects.get().finished_at is None

    def test_failed_block_writes_no_jobs(self):
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), batch(on_finish=sum_up):
                tasks.add.enqueue(1)
                later.enqueue(2)
                raise ZeroDivisionError
            assert [(job.args, job.state) for job in Job.objects.all()] == [([1], "discarded")]

        assert [(job.args, job.state) for job in Job.objects.all()] == [([1], "discarded")]
        assert drain() == 0

    def test_failed_later_block_writes_no_jobs(self):
        with batch(on_finish=sum_up) as members:
            tasks.add.enqueue(1)
            with transaction.atomic(), pytest.raises(ZeroDivisionError), batch.of(members.id):
                later.enqueue(2)
                raise ZeroDivisionError

        assert [job.args for job in Job.objects.all()] == [[1]]
        assert drain() == 2

    def test_rolled_back_transaction_leaves_no_batch(self):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            with batch(on_finish=sum_up):
                later.enqueue(1)
            raise ZeroDivisionError

        assert (Batch.objects.count(), Job.objects.count()) == (0, 0)


def test_pipeline_is_written_after_commit():
    with transaction.atomic():
        pipeline(tasks.add, tasks.add).using(enqueue="on_commit").enqueue(1)
        pipeline(later, tasks.add).enqueue(2)
        assert not Job.objects.exists()

    assert Job.objects.count() == 2


def test_limited_jobs_are_written_after_commit():
    with transaction.atomic():
        later.using(concurrency=limit(1)).enqueue_many([(1,), (2,)])
        assert not Job.objects.exists()

    assert sorted(Job.objects.values_list("state", flat=True)) == ["blocked", "ready"]


def test_recurring_task_is_written_with_its_time(by_options):
    row = RecurringTask.objects.create(
        name="hourly", task="tests.tasks.nothing", every=timedelta(hours=1)
    )

    with transaction.atomic():
        pk = enqueue(row, timedelta())
        assert Job.objects.get().pk == pk
    assert not RecurringExecution.objects.exists()


def test_failed_insert_after_commit_reaches_the_caller(monkeypatch):
    def fail(*args):
        raise DatabaseError("down")

    monkeypatch.setattr("django_dbqueue.engine.enqueue.write", fail)
    with pytest.raises(DatabaseError, match="down"), transaction.atomic():
        later.enqueue(1)
        assert not Job.objects.exists()


def test_jobs_of_a_bulk_are_written_as_each_task_says():
    with transaction.atomic():
        results = enqueue_many([later.prepare(1), tasks.add.prepare(2), later.prepare(3)])
        assert [job.args for job in Job.objects.all()] == [[2]]

    assert [result.args for result in results] == [[1], [2], [3]]
    assert [str(job.pk) for job in Job.objects.order_by("args__0")] == [r.id for r in results]
