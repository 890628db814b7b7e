"""Run and settle: every way that an attempt can end is a value, and its job's alone."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from django.db import OperationalError, transaction
from django.test import override_settings
from django.utils import timezone

from django_dbqueue import testing
from django_dbqueue.compat import TaskResultStatus, signals
from django_dbqueue.models import Execution, Failure, Job
from django_dbqueue.models.execution import ExecutionQuerySet
from django_dbqueue.results import result_of
from django_dbqueue.runtime.worker import executor
from django_dbqueue.runtime.worker.task_call import ThreadCall

from ... import direct, tasks

pytestmark = pytest.mark.django_db


def run(task, *args, times=1, **kwargs):
    result = task.enqueue(*args, **kwargs)
    assert testing.drain() == times
    result.refresh()
    return result


def test_a_result_says_everything_about_one_attempt():
    result = run(tasks.add, 1, b=2)

    assert result.status == TaskResultStatus.SUCCESSFUL
    assert result.return_value == 3
    assert result.attempts == len(result.worker_ids) == 1
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    assert result.errors == []
    assert tasks.add.get_result(result.id) == result


def test_a_result_says_everything_about_several_attempts():
    result = run(tasks.succeed_at_third, times=3)

    assert result.return_value == 3
    assert result.attempts == 3
    assert [error.exception_class for error in result.errors] == [ValueError, ValueError]
    assert all("not yet" in error.traceback for error in result.errors)
    assert result.started_at < result.last_attempted_at <= result.finished_at


def test_after_max_attempts_a_job_has_failed():
    result = run(tasks.fail_thrice, times=3)

    assert result.status == TaskResultStatus.FAILED
    assert len(result.errors) == 3
    assert list(Execution.objects.order_by("attempt").values_list("attempt", "outcome")) == [
        (n, "failed") for n in (1, 2, 3)
    ]
    assert Job.objects.get().failures == 3


def test_a_backoff_waits_in_the_databases_time():
    run(tasks.fail_and_wait)

    job = Job.objects.get()
    assert job.state == Job.State.SCHEDULED
    assert 59 < (job.run_after - Execution.objects.get().finished_at).total_seconds() < 62


def test_a_job_retried_by_an_operator_has_all_its_attempts_before_it():
    result = run(tasks.fail_thrice, times=3)
    assert Job.objects.all().retry() == 1

    assert testing.drain() == 3
    assert len(tasks.fail_thrice.get_result(result.id).errors) == 6


def test_a_broken_backoff_costs_no_job():
    run(tasks.fail_with_broken_backoff)

    assert Job.objects.get().state == Job.State.SCHEDULED
    assert Execution.objects.get().error_type == "builtins.ValueError"


def test_a_backoff_may_refuse():
    assert run(tasks.fail_with_refusing_backoff).status == TaskResultStatus.FAILED


def test_only_some_exceptions_are_tried_again():
    assert run(tasks.retry_only_connections, "value").attempts == 1
    assert run(tasks.retry_only_connections, "connection", times=5).attempts == 5


def test_some_exceptions_call_the_job_off():
    result = run(tasks.discard_when_gone)

    assert Job.objects.get().state == Job.State.DISCARDED
    assert result.status == TaskResultStatus.FAILED
    assert Execution.objects.get().outcome == Execution.Outcome.DISCARDED
    assert not Failure.objects.exists()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("exit", "SystemExit"),
        ("memory", "MemoryError"),
        ("generator exit", "GeneratorExit"),
        ("recursion", "RecursionError"),
        ("unspeakable", "Unspeakable"),
        ("unrepresentable", "Unrepresentable"),
        ("nul", "ValueError"),
        ("long", "ValueError"),
        ("stop iteration", "StopIteration"),
        ("not json", "TypeError"),
        ("nan", "ValueError"),
        ("nul result", "ValueError"),
        ("circular", "ValueError"),
    ],
)
def test_whatever_a_task_does_is_an_outcome_of_its_job(how, error):
    result = run(tasks.misbehave, how)

    assert result.status == TaskResultStatus.FAILED
    execution = Execution.objects.get()
    assert execution.error_type.endswith(error)
    assert len(execution.traceback) <= 20_000
    assert len(execution.message) <= 1_000
    assert Failure.objects.get().count == 1


def test_a_persons_ctrl_c_ends_a_drain_and_gives_the_job_back():
    tasks.misbehave.enqueue("interrupt")

    with pytest.raises(KeyboardInterrupt):
        testing.drain()

    assert Job.objects.get().state == Job.State.READY
    assert not Execution.objects.exists()


def test_a_result_is_found_by_the_jobs_own_key(backend):
    result = tasks.add.enqueue(1)

    assert backend.get_result(Job.objects.get().pk) == backend.get_result(result.id)


def test_a_job_whose_task_is_not_known_is_given_back_for_others_for_a_week():
    job = Job.objects.create(task="tests.tasks.renamed", queue="default")
    for attempt in range(1, 21):
        Job.objects.filter(state="scheduled").update(state="ready")
        testing.drain()
        job.refresh_from_db()
        assert (job.state, job.attempt, job.failures) == ("scheduled", attempt, 0)

    job.executions.filter(attempt=1).update(finished_at=timezone.now() - timedelta(days=7))
    Job.objects.update(state="ready")
    testing.drain()

    job.refresh_from_db()
    assert (job.state, job.failures, job.executions.get(attempt=21).outcome) == (
        "failed",
        1,
        "failed",
    )


def test_a_task_that_is_gone_fails_and_can_still_be_read(backend):
    job = Job.objects.create(task="tests.tasks.renamed", queue="default", args=[1])
    testing.drain()
    job.executions.update(finished_at=timezone.now() - timedelta(days=8))
    Job.objects.update(state="ready")
    testing.drain()

    result = backend.get_result(str(job.pk))
    assert result.status == TaskResultStatus.FAILED
    assert result.args == [1]
    assert result.task.module_path == "tests.tasks.renamed"
    assert "is not known here" in result.errors[0].traceback
    with pytest.raises(Exception, match="is not known here"):
        result.task.call(1)


@pytest.mark.parametrize(
    "path", ["os.system", "tests.tasks.Unspeakable", "tests.tasks", "nonsense", ""]
)
def test_only_a_task_is_ever_called(path, backend):
    job = Job.objects.create(task=path, queue="default", args=["echo harm"])
    testing.drain()

    assert (
        backend.get_result(str(job.pk)).errors[0].exception_class_path
        == "django_dbqueue.exceptions.InvalidTaskPath"
    )


@override_settings(
    TASKS={"default": {"BACKEND": "django_dbqueue.backend.DatabaseBackend", "QUEUES": ["default"]}}
)
@pytest.mark.parametrize("path", ["tests.tasks.add", "tests.tasks.renamed"])
def test_a_job_whose_queue_is_gone_can_still_be_read(path, backend):
    result = tasks.add.enqueue(1)
    Job.objects.update(queue="former", task=path)

    found = backend.get_result(result.id)

    assert (found.task.queue_name, found.task.module_path) == ("former", path)


def test_a_job_whose_history_cannot_be_read_for_a_moment_is_given_back(backend, claim, monkeypatch):
    result = tasks.succeed_at_third.enqueue()
    Job.objects.filter(pk=result.id).update(attempt=1, failures=1)
    (job,) = claim()
    monkeypatch.setattr(
        ExecutionQuerySet,
        "of_this_stage",
        raise_error(OperationalError("server closed the connection")),
    )

    direct.settle([executor.run(ThreadCall(job), backend)])

    job.refresh_from_db()
    assert (job.state, job.failures, Execution.objects.get().outcome) == (
        "scheduled",
        1,
        "interrupted",
    )


def raise_error(error):
    def raising(*args):
        raise error

    return raising


def test_what_cannot_be_returned_is_said_to_be_what_was_returned():
    result = run(tasks.misbehave, "not json")

    assert (
        "What tests.tasks.misbehave returned: Unsupported type: <class 'object'>"
        in result.errors[0].traceback
    )


def test_a_wait_beyond_all_times_is_cut():
    run(tasks.fail_and_wait_for_ever)

    assert Job.objects.get().run_after.year > 2100


def test_alike_failures_make_one_group_and_different_ones_two():
    for number in range(3):
        tasks.fail.enqueue(f"order {number} of 'customer {number}' is gone")
    tasks.fail.enqueue("something else")
    testing.drain()

    assert sorted(Failure.objects.values_list("count", flat=True)) == [1, 3]
    group = Failure.objects.get(count=3)
    assert group.location == "tests/tasks.py:fail"
    assert group.executions.count() == 3


def test_a_resolved_group_that_fails_again_is_open_again():
    run(tasks.fail)
    Failure.objects.update(state=Failure.State.RESOLVED)
    run(tasks.fail)

    assert Failure.objects.get().state == Failure.State.OPEN


@pytest.mark.parametrize("task", [tasks.spin_for_a_second, tasks.sleep_for_a_minute_async])
def test_a_drained_job_that_runs_longer_than_its_timeout_has_timed_out(task):
    result = run(task)

    assert (result.status, result.errors[0].exception_class.__name__) == ("FAILED", "TimedOut")


def test_the_repr_of_a_result_is_short():
    result = tasks.add.enqueue(1)

    assert repr(result) == f"<JobResult {result.id} READY tests.tasks.add>"


class TestSignals:
    @pytest.fixture
    def heard(self):
        heard = []

        def started(sender, task_result, **kwargs):
            heard.append(("started", sender, task_result.status, task_result.attempts))

        def finished(sender, task_result, **kwargs):
            import sys

            heard.append(("finished", sender, task_result.status, sys.exc_info()[0]))

        signals.task_started.connect(started)
        signals.task_finished.connect(finished)
        yield heard
        signals.task_started.disconnect(started)
        signals.task_finished.disconnect(finished)

    @pytest.mark.parametrize("task", [tasks.fail, tasks.fail_async])
    def test_they_are_sent_by_the_class_and_inside_the_except(self, heard, backend, task):
        run(task)

        assert heard == [
            ("started", type(backend), TaskResultStatus.RUNNING, 1),
            ("finished", type(backend), TaskResultStatus.FAILED, ValueError),
        ]

    @pytest.mark.parametrize(("level", "made"), [(logging.INFO, 1), (logging.WARNING, 0)])
    def test_nothing_is_made_for_them_if_nobody_would_know(self, caplog, monkeypatch, level, made):
        results = []
        monkeypatch.setattr(
            executor, "result_of", lambda *args: results.append(args) or result_of(*args)
        )
        caplog.set_level(level, signals.logger.name)

        assert run(tasks.add, 1).return_value == 1

        assert len(results) == made

    def test_what_fails_is_said_even_if_nobody_hears_the_rest(self, caplog):
        caplog.set_level(logging.WARNING, signals.logger.name)

        run(tasks.fail)

        assert [line.levelname for line in caplog.records if line.name == signals.logger.name] == [
            "ERROR"
        ]

    def test_an_attempt_that_is_tried_again_has_not_finished(self, heard):
        run(tasks.fail_thrice, times=3)

        assert [name for name, *_ in heard] == ["started", "started", "started", "finished"]

    def test_a_receiver_that_fails_costs_no_job(self):
        def broken(**kwargs):
            raise RuntimeError("a broken receiver")

        signals.task_started.connect(broken)
        signals.task_finished.connect(broken)
        try:
            assert run(tasks.add, 1).return_value == 1
        finally:
            signals.task_started.disconnect(broken)
            signals.task_finished.disconnect(broken)


class TestWait:
    def test_inside_the_transaction_that_enqueued_it_nobody_can_have_run_it(self):
        from django_dbqueue.exceptions import NotYetVisible

        with pytest.raises(NotYetVisible, match="before this transaction commits"):
            tasks.add.enqueue(1).wait(timeout=1)

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_inside_a_transaction_of_another_database_than_the_queue_has(self):
        from django_dbqueue.exceptions import NotYetVisible

        with (
            transaction.atomic(),
            pytest.raises(NotYetVisible, match="before this transaction commits"),
        ):
            tasks.add.using(backend="other").enqueue(1).wait(timeout=1)

    @pytest.mark.django_db(transaction=True)
    def test_another_transaction_may_be_open(self):
        result = tasks.add.enqueue(1)
        with transaction.atomic(), pytest.raises(TimeoutError):
            result.wait(timeout=0.05)

    def test_it_looks_once_whatever_its_timeout(self):
        assert run(tasks.add, 1).wait(timeout=0).return_value == 1

    @pytest.mark.django_db(transaction=True)
    def test_it_ends_after_its_timeout(self):
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.1 s: it is READY"):
            tasks.add.enqueue(1).wait(timeout=0.1)

    @pytest.mark.django_db(transaction=True)
    def test_it_returns_the_result_of_what_has_ended(self):
        from asgiref.sync import async_to_sync

        result, other = tasks.add.enqueue(1), tasks.add.enqueue(2)
        testing.drain()
        assert result.wait(timeout=5).return_value == 1
        assert async_to_sync(other.await_)(5).return_value == 2
