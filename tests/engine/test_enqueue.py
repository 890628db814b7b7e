"""Enqueue: rows, validation, transactions and results."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from uuid import UUID

import pytest
from django.db import IntegrityError, connections, transaction
from django.test import override_settings

from django_dbqueue import task
from django_dbqueue.compat import InvalidTask, signals, task_backends
from django_dbqueue.core.uuid7 import uuid7
from django_dbqueue.models import Job

from .. import tasks
from ..conftest import is_mysql_itself

pytestmark = pytest.mark.django_db


def test_job_stores_call_and_options():
    result = tasks.add.using(priority=7, queue_name="sums", metadata={"by": "me"}).enqueue(1, b=2)

    job = Job.objects.get(pk=result.id)
    assert (job.task, job.queue, job.priority, job.state) == (
        "tests.tasks.add",
        "sums",
        7,
        Job.State.READY,
    )
    assert (job.args, job.kwargs, job.metadata) == ([1], {"b": 2}, {"by": "me"})
    assert result.enqueued_at == job.enqueued_at == job.run_after


def test_enqueue_is_one_statement_on_postgresql(django_assert_num_queries):
    """Then NOTIFY. Elsewhere, a transaction of two INSERTs: the counts, and the job.

    MySQL then reads the defaults of the job's row: its INSERT returns nothing.
    """
    is_open = connections["default"].in_atomic_block
    if connections["default"].vendor == "postgresql":
        statements = 1 if is_open else 2
    else:
        statements = (2 if is_open else 4) + is_mysql_itself()
    with django_assert_num_queries(statements):
        tasks.add.enqueue(1)


def test_enqueue_many_takes_few_statements(django_assert_max_num_queries):
    most = 3 + is_mysql_itself() + 2 * (connections["default"].vendor == "sqlite") * 60
    with django_assert_max_num_queries(most):
        results = tasks.add.enqueue_many([(1, 2), {"a": 3}, *[(n,) for n in range(998)]])

    assert Job.objects.count() == len(results) == 1000
    assert tasks.add.get_result(results[1].id).kwargs == {"a": 3}


def test_invalid_call_in_enqueue_many_enqueues_nothing():
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        tasks.add.enqueue_many([(1,), ()])

    assert not Job.objects.exists()


@pytest.mark.parametrize("call", [1, "ab", [1]])
def test_enqueue_many_refuses_malformed_calls(call):
    with pytest.raises(TypeError, match="is not a call"):
        tasks.add.enqueue_many([call])


def test_enqueue_many_of_empty_list_creates_no_jobs():
    assert list(tasks.add.enqueue_many([])) == []
    assert not Job.objects.exists()


def test_run_after_datetime_schedules_job():
    due = datetime.now(timezone.utc) + timedelta(hours=1)

    job = Job.objects.get(pk=tasks.add.using(run_after=due).enqueue(1).id)

    assert job.state == Job.State.SCHEDULED
    assert job.run_after == due


def test_run_after_timedelta_counts_from_database_time():
    job = Job.objects.get(pk=tasks.add.using(run_after=timedelta(minutes=5)).enqueue(1).id)

    assert abs(job.run_after - job.enqueued_at - timedelta(minutes=5)) < timedelta(milliseconds=2)
    assert job.state == Job.State.SCHEDULED


def test_database_time_is_utc_in_any_time_zone():
    job = Job.objects.get(pk=tasks.add.enqueue(1).id)

    assert abs(job.enqueued_at - datetime.now(timezone.utc)) < timedelta(seconds=30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 32767, not 0"),
        ({"backoff": 5}, "backoff must be callable"),
        ({"retry_on": ValueError}, "retry_on must be a tuple of exception classes"),
        ({"discard_on": ("ValueError",)}, "discard_on must be a tuple of exception classes"),
        ({"timeout": timedelta(minutes=5)}, "timeout must be in seconds: 300, not"),
        ({"timeout": 4e-7}, "not 4e-07. The shortest is a microsecond."),
        ({"timeout": 10**10}, "a number of seconds above 0 and below 315,360,000, not 10000000000"),
    ],
)
def test_invalid_task_option_is_refused_at_declaration(options, message):
    with pytest.raises(InvalidTask, match=message):
        task(**options)(tasks.nothing.func)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"run_after": timedelta(days=10**8)},
            "run_after must be within 36,500 days from now, not 100,000,000",
        ),
        ({"run_after": 5}, "run_after must be an aware datetime, or a timedelta from now, not 5"),
        ({"priority": "1"}, "priority must be a whole number between -100 and 100. It is '1'"),
        ({"priority": True}, "It is True"),
        ({"priority": 1000}, "a whole number between -100 and 100. It is 1000"),
        ({"run_after": datetime(2026, 1, 1)}, "must be an aware datetime. It is datetime.dateti"),
        ({"metadata": [1]}, r"metadata must be a dict, not \[1\]"),
    ],
)
def test_invalid_call_option_is_refused_before_insert(options, message):
    with pytest.raises(InvalidTask, match=message):
        tasks.nothing.using(**options).enqueue()
    assert not Job.objects.exists()


@pytest.mark.parametrize("alias", ["mail", 3])
def test_unknown_backend_error_names_those_in_the_settings(alias):
    said = f"The connection {alias!r} doesn't exist. TASKS has 'default', 'other'."
    with pytest.raises(task_backends.exception_class, match=re.escape(said)):
        task(backend=alias)
    with pytest.raises(task_backends.exception_class, match=re.escape(said)):
        tasks.nothing.using(backend=alias)


def test_non_json_metadata_error_names_the_task():
    with pytest.raises(
        TypeError, match=r"metadata of tests.tasks.nothing: Unsupported type: <class 'object'>"
    ):
        tasks.nothing.using(metadata={"a": object()}).enqueue()


def test_unknown_task_option_is_refused():
    with pytest.raises(TypeError, match="max_attemps"):
        task(max_attemps=3)(tasks.nothing.func)


def test_task_decorator_works_with_another_backend():
    immediate = (
        tasks.add.get_backend().__class__.__mro__[1].__module__.rpartition(".")[0]
        + ".immediate.ImmediateBackend"
    )
    with override_settings(TASKS={"default": {"BACKEND": immediate, "QUEUES": []}}):
        declared = task(max_attempts=3)(tasks.add.func)
        assert declared.enqueue(1, 2).return_value == 3
        assert tasks.add.enqueue(2, 2).return_value == 4


def test_captured_on_commit_callbacks_enqueue_jobs(django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True):
        tasks.add.enqueue_on_commit(1)
        tasks.add.enqueue(2)

    assert Job.objects.count() == 2


class TestTransactions:
    """A job exists if and only if the caller's transaction commits."""

    pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

    def test_rollback_removes_the_job(self):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            tasks.add.enqueue(1)
            raise ZeroDivisionError

        assert not Job.objects.exists()

    def test_job_is_visible_inside_its_transaction(self):
        with transaction.atomic():
            result = tasks.add.enqueue(1)
            assert Job.objects.filter(pk=result.id).exists()

    def test_savepoint_rollback_removes_only_its_job(self):
        with transaction.atomic():
            kept = tasks.add.enqueue(1)
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                tasks.add.enqueue(2)
                raise ZeroDivisionError

        assert [str(pk) for pk in Job.objects.values_list("pk", flat=True)] == [kept.id]

    def test_job_for_other_database_is_written_on_commit(self):
        with transaction.atomic():
            result = tasks.add.using(backend="other").enqueue(1)
            assert not Job.objects.using("other").exists()
            assert result.enqueued_at is None

        assert str(Job.objects.using("other").get().pk) == result.id
        assert result.enqueued_at is not None
        assert not Job.objects.using("default").exists()

    def test_deferred_results_get_enqueued_at_on_commit(self):
        with transaction.atomic():
            results = tasks.add.using(backend="other").enqueue_many([(1,), (2,)])
            assert [result.enqueued_at for result in results] == [None, None]

        rows = dict(Job.objects.using("other").values_list("pk", "enqueued_at"))
        assert {UUID(result.id): result.enqueued_at for result in results} == rows

    def test_rollback_drops_jobs_for_other_database(self):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            tasks.add.using(backend="other").enqueue_many([(1,), (2,)])
            raise ZeroDivisionError

        assert not Job.objects.using("other").exists()

    def test_savepoint_rollback_drops_job_for_other_database(self):
        with transaction.atomic():
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                tasks.add.using(backend="other").enqueue(1)
                raise ZeroDivisionError
            kept = tasks.add.using(backend="other").enqueue(2)

        assert str(Job.objects.using("other").get().pk) == kept.id

    @pytest.mark.parametrize(("outer", "inner"), [("default", "other"), ("other", "default")])
    def test_job_follows_transaction_of_its_own_database(self, outer, inner):
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=outer):
            with transaction.atomic(using=inner):
                tasks.add.using(backend=inner).enqueue(1)
            raise ZeroDivisionError
        assert Job.objects.using(inner).count() == 1

        with pytest.raises(ZeroDivisionError), transaction.atomic(using=outer):
            with transaction.atomic(using=inner):
                tasks.add.using(backend=outer).enqueue(1)
            raise ZeroDivisionError
        assert Job.objects.using(outer).count() == 0

    def test_enqueue_on_commit_defers_in_same_database(self):
        with transaction.atomic():
            tasks.add.enqueue_on_commit(1)
            assert not Job.objects.exists()
        assert Job.objects.count() == 1

        tasks.add.enqueue_on_commit(2)
        assert Job.objects.count() == 2

    def test_enqueue_on_commit_validates_call_at_once(self):
        with transaction.atomic(), pytest.raises(TypeError, match="missing a required argument"):
            tasks.add.enqueue_on_commit()

    def test_signal_is_sent_after_job_exists(self):
        seen = []

        def record(sender, task_result, **kwargs):
            seen.append(Job.objects.using("other").filter(pk=task_result.id).exists())

        signals.task_enqueued.connect(record)
        try:
            with transaction.atomic():
                tasks.add.using(backend="other").enqueue(1)
                assert seen == []
        finally:
            signals.task_enqueued.disconnect(record)
        assert seen == [True]

    @pytest.mark.parametrize("fails", [False, True])
    def test_failed_atomic_request_enqueues_nothing(self, client, fails):
        with override_settings(ROOT_URLCONF="tests.urls"):
            connections["default"].settings_dict["ATOMIC_REQUESTS"] = True
            client.raise_request_exception = False
            try:
                client.get(f"/enqueue/?fails={int(fails)}")
            finally:
                connections["default"].settings_dict["ATOMIC_REQUESTS"] = False

        assert Job.objects.count() == Job.objects.using("other").count() == (0 if fails else 1)


class TestEnqueueManyResults:
    def test_results_are_created_lazily_and_once(self):
        results = tasks.add.enqueue_many([(number,) for number in range(5)])

        assert len(results) == 5
        assert results[3] is results[-2]
        assert [result.args for result in results[1:3]] == [[1], [2]]
        assert {result.id for result in results} == {
            str(pk) for pk in Job.objects.values_list("pk", flat=True)
        }
        with pytest.raises(IndexError):
            results[5]

    def test_results_concatenate_with_lists(self):
        results = [tasks.add.enqueue(0)]
        results += tasks.add.enqueue_many([(1,), (2,)])
        results = tasks.add.enqueue_many([(3,)]) + results

        assert [result.args for result in results] == [[3], [0], [1], [2]]
        assert len(results + tasks.add.enqueue_many([(4,)])) == 5

    def test_refreshed_result_keeps_its_state(self, claim):
        results = tasks.add.enqueue_many([(1,), (2,)])
        claim()
        results[0].refresh()

        assert (results[0].status, results[1].status) == ("RUNNING", "READY")

    def test_results_have_enqueued_at_of_their_rows(self):
        results = tasks.add.enqueue_many([(1,), (2,), (3,)])

        assert {result.id: result.enqueued_at for result in results} == {
            str(pk): at for pk, at in Job.objects.values_list("pk", "enqueued_at")
        }

    def test_jobs_do_not_share_metadata(self):
        one, other = tasks.add.using(metadata={"who": "me"}).enqueue_many([(1,), (2,)])
        one.metadata["who"] = "you"

        assert other.metadata == {"who": "me"}

    def test_failed_insert_writes_no_jobs(self, monkeypatch):
        same = uuid7()
        monkeypatch.setattr("django_dbqueue.backend.uuid7", lambda: same)

        with pytest.raises(IntegrityError), transaction.atomic():
            tasks.add.enqueue_many([(1,), (2,)])

        assert not Job.objects.exists()

    def test_enqueue_many_row_equals_enqueue_row(self):
        task = tasks.add.using(
            priority=7,
            metadata={"who": "me"},
            run_after=timedelta(hours=1),
            expires=timedelta(hours=1),
        )
        task.enqueue(a='ä\\\n\t"{}', b=None)
        task.enqueue_many([{"a": 1}, {"a": 'ä\\\n\t"{}', "b": None}])
        one, _first, rest = Job.objects.order_by("id").values()

        differing = ("id", "run_after", "expires_at", "enqueued_at")
        assert {k: v for k, v in one.items() if k not in differing} == {
            k: v for k, v in rest.items() if k not in differing
        }
        assert timedelta(hours=0.9) < rest["run_after"] - rest["enqueued_at"] < timedelta(hours=1.1)
        assert rest["expires_at"] - rest["run_after"] == timedelta(hours=1)


def test_signal_reaches_the_only_receiver():
    heard = []

    def receiver(task_result, **kwargs):
        heard.append(task_result.id)

    signals.task_enqueued.disconnect(signals.log_task_enqueued)
    signals.task_enqueued.connect(receiver)
    try:
        result = tasks.add.enqueue(1)
    finally:
        signals.task_enqueued.disconnect(receiver)
        signals.task_enqueued.connect(signals.log_task_enqueued)

    assert heard == [result.id]


class Shop:
    @staticmethod
    def report():
        pass


def test_function_not_at_module_level_is_refused():
    def nested():
        pass

    for function in (Shop.report, nested, lambda: None):
        with pytest.raises(InvalidTask, match="module"):
            task(function)
    with pytest.raises(InvalidTask, match=r"Shop\.report is not at the top level of its module"):
        task(Shop.report)


def test_unknown_queue_error_names_the_remedy():
    ours = {"BACKEND": "django_dbqueue.backend.DatabaseBackend"}
    said = r"Queue 'mail' .* has 'default'. Add it there, or give \[\] there"
    with override_settings(TASKS={"default": ours}), pytest.raises(InvalidTask, match=said):
        tasks.add.using(queue_name="mail")


@pytest.mark.django_db
def test_parameters_whose_defaults_cannot_be_hashed_are_no_obstacle():
    assert tasks.with_mutable_defaults.enqueue(1).args == [1]
    tasks.with_mutable_defaults.enqueue_many([(1,), (2, {"a": 1})])

    assert Job.objects.count() == 3
