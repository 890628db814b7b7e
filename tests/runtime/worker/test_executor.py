"""Run and settle attempts: every end of an attempt is an outcome of its own job only."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test import override_settings
from django.utils import timezone

from django_dbqueue import testing
from django_dbqueue.compat import TaskResultStatus, signals
from django_dbqueue.exceptions import NotYetVisible
from django_dbqueue.models import Execution, Failure, Job
from django_dbqueue.models.execution import ExecutionQuerySet
from django_dbqueue.results import result_of
from django_dbqueue.runtime.worker import attempt as attempt_module
from django_dbqueue.runtime.worker import executor
from django_dbqueue.runtime.worker.task_call import ThreadCall

from ... import direct, tasks

pytestmark = pytest.mark.django_db


def run(task, *args, times=1, **kwargs):
    result = task.enqueue(*args, **kwargs)
    assert testing.drain() == times
    result.refresh()
    return result


def test_result_describes_one_attempt():
    result = run(tasks.add, 1, b=2)

    assert result.status == TaskResultStatus.SUCCESSFUL
    assert result.return_value == 3
    assert result.attempts == len(result.worker_ids) == 1
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    assert result.errors == []
    assert tasks.add.get_result(result.id) == result


def test_result_describes_several_attempts():
    result = run(tasks.succeed_at_third, times=3)

    assert result.return_value == 3
    assert result.attempts == 3
    assert [error.exception_class for error in result.errors] == [ValueError, ValueError]
    assert all("not yet" in error.traceback for error in result.errors)
    assert result.started_at < result.last_attempted_at <= result.finished_at


def test_job_fails_after_max_attempts():
    result = run(tasks.fail_thrice, times=3)

    assert result.status == TaskResultStatus.FAILED
    assert len(result.errors) == 3
    assert list(Execution.objects.order_by("attempt").values_list("attempt", "outcome")) == [
        (n, "failed") for n in (1, 2, 3)
    ]
    assert Job.objects.get().failures == 3


def test_backoff_uses_database_time():
    run(tasks.fail_and_wait)

    job = Job.objects.get()
    assert job.state == Job.State.SCHEDULED
    assert 59 < (job.run_after - Execution.objects.get().finished_at).total_seconds() < 62


def test_operator_retry_resets_attempts():
    result = run(tasks.fail_thrice, times=3)
    assert Job.objects.all().retry() == 1

    assert testing.drain() == 3
    assert len(tasks.fail_thrice.get_result(result.id).errors) == 6


def test_broken_backoff_does_not_fail_job():
    run(tasks.fail_with_broken_backoff)

    assert Job.objects.get().state == Job.State.SCHEDULED
    assert Execution.objects.get().error_type == "builtins.ValueError"


def test_refusing_backoff_fails_job():
    assert run(tasks.fail_with_refusing_backoff).status == TaskResultStatus.FAILED


def test_retry_on_limits_retries_to_its_exceptions():
    assert run(tasks.retry_only_connections, "value").attempts == 1
    assert run(tasks.retry_only_connections, "connection", times=5).attempts == 5


def test_discard_on_exception_discards_job():
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
        ("unreadable", "Unreadable"),
        ("nul in type", "a\ufffdb.Odd"),
        ("surrogate in file name", "ValueError"),
        ("nul", "ValueError"),
        ("long", "ValueError"),
        ("stop iteration", "StopIteration"),
        ("not json", "TypeError"),
        ("nan", "ValueError"),
        ("nul result", "ValueError"),
        ("circular", "ValueError"),
    ],
)
def test_misbehaving_task_fails_its_job(how, error):
    result = run(tasks.misbehave, how)

    assert result.status == TaskResultStatus.FAILED
    execution = Execution.objects.get()
    assert execution.error_type.endswith(error)
    assert len(execution.traceback) <= 20_000
    assert len(execution.message) <= 1_000
    assert Failure.objects.get().count == 1


def test_ctrl_c_ends_drain_and_releases_job():
    tasks.misbehave.enqueue("interrupt")

    with pytest.raises(KeyboardInterrupt):
        testing.drain()

    assert Job.objects.get().state == Job.State.READY
    assert not Execution.objects.exists()


def test_result_is_found_by_primary_key(backend):
    result = tasks.add.enqueue(1)

    assert backend.get_result(Job.objects.get().pk) == backend.get_result(result.id)


def test_job_of_unknown_task_is_rescheduled_for_a_week():
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


def test_job_of_removed_task_fails_and_stays_readable(backend):
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
def test_path_of_non_task_is_never_called(path, backend):
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
def test_job_of_removed_queue_stays_readable(path, backend):
    result = tasks.add.enqueue(1)
    Job.objects.update(queue="former", task=path)

    found = backend.get_result(result.id)

    assert (found.task.queue_name, found.task.module_path) == ("former", path)


def test_unreadable_history_interrupts_attempt_without_failure(backend, claim, monkeypatch):
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


def test_error_names_task_with_unserializable_result():
    result = run(tasks.misbehave, "not json")

    assert (
        "The return value of tests.tasks.misbehave: Unsupported type: <class 'object'>"
        in result.errors[0].traceback
    )


def test_excessive_backoff_is_capped():
    run(tasks.fail_and_wait_for_ever)

    assert Job.objects.get().run_after.year > 2100


def test_similar_failures_share_a_group():
    for number in range(3):
        tasks.fail.enqueue(f"order {number} of 'customer {number}' is gone")
    tasks.fail.enqueue("something else")
    testing.drain()

    assert sorted(Failure.objects.values_list("count", flat=True)) == [1, 3]
    group = Failure.objects.get(count=3)
    assert group.location == "tests/tasks.py:fail"
    assert group.executions.count() == 3


def test_resolved_failure_reopens_on_recurrence():
    run(tasks.fail)
    Failure.objects.update(state=Failure.State.RESOLVED)
    run(tasks.fail)

    assert Failure.objects.get().state == Failure.State.OPEN


@pytest.mark.parametrize("task", [tasks.spin_for_a_second, tasks.sleep_for_a_minute_async])
def test_drained_job_times_out(task):
    began = time.monotonic()

    result = run(task)

    assert time.monotonic() - began < 30
    assert (result.status, result.errors[0].exception_class.__name__) == ("FAILED", "TimedOut")


def test_repr_of_result_is_short():
    result = tasks.add.enqueue(1)

    assert repr(result) == f"<JobResult {result.id} READY tests.tasks.add>"


class TestSignals:
    @pytest.fixture
    def received(self):
        received = []

        def started(sender, task_result, **kwargs):
            received.append(("started", sender, task_result.status, task_result.attempts))

        def finished(sender, task_result, **kwargs):
            import sys

            received.append(("finished", sender, task_result.status, sys.exc_info()[0]))

        signals.task_started.connect(started)
        signals.task_finished.connect(finished)
        yield received
        signals.task_started.disconnect(started)
        signals.task_finished.disconnect(finished)

    @pytest.mark.parametrize("task", [tasks.fail, tasks.fail_async])
    def test_sender_is_backend_class_and_exception_is_current(self, received, backend, task):
        run(task)

        assert received == [
            ("started", type(backend), TaskResultStatus.RUNNING, 1),
            ("finished", type(backend), TaskResultStatus.FAILED, ValueError),
        ]

    @pytest.mark.parametrize(("level", "made"), [(logging.INFO, 1), (logging.WARNING, 0)])
    def test_no_result_is_built_without_receivers_or_logging(
        self, caplog, monkeypatch, level, made
    ):
        results = []
        monkeypatch.setattr(
            attempt_module, "result_of", lambda *args: results.append(args) or result_of(*args)
        )
        caplog.set_level(level, signals.logger.name)

        assert run(tasks.add, 1).return_value == 1

        assert len(results) == made

    def test_failure_is_logged_with_info_disabled(self, caplog):
        caplog.set_level(logging.WARNING, signals.logger.name)

        run(tasks.fail)

        assert [line.levelname for line in caplog.records if line.name == signals.logger.name] == [
            "ERROR"
        ]

    def test_retried_attempt_sends_no_task_finished(self, received):
        run(tasks.fail_thrice, times=3)

        assert [name for name, *_ in received] == ["started", "started", "started", "finished"]

    def test_failing_receiver_does_not_fail_job(self):
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
    def test_wait_inside_enqueuing_transaction_is_refused(self):
        with pytest.raises(NotYetVisible, match="before this transaction commits"):
            tasks.add.enqueue(1).wait(timeout=1)

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_wait_inside_transaction_of_other_database_is_refused(self):
        with (
            transaction.atomic(),
            pytest.raises(NotYetVisible, match="before this transaction commits"),
        ):
            tasks.add.using(backend="other").enqueue(1).wait(timeout=1)

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.skipif(connection.vendor == "sqlite", reason="No worker could end the job.")
    @pytest.mark.parametrize("is_older", [False, True])
    def test_wait_inside_later_transaction_sees_what_others_commit(self, is_older):
        results = [] if is_older else [tasks.add.enqueue(1)]
        enqueued = threading.Event()

        def work():
            if is_older:
                results.append(tasks.add.enqueue(1))
            enqueued.set()
            time.sleep(0.2)
            testing.drain()
            connections.close_all()

        worker = threading.Thread(target=work)
        if connection.vendor == "mysql":
            connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with transaction.atomic():
            if connection.vendor == "postgresql":
                connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            assert Job.objects.count() == len(results)
            worker.start()
            assert enqueued.wait(30)
            assert results[0].wait(timeout=30).return_value == 1
        worker.join()

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.skipif(connection.vendor != "sqlite", reason="Others can write.")
    def test_wait_inside_any_transaction_of_sqlite_is_refused(self):
        result = tasks.add.enqueue(1)
        with transaction.atomic(), pytest.raises(NotYetVisible, match="before this transaction"):
            result.wait()

    def test_wait_with_zero_timeout_checks_once(self):
        assert run(tasks.add, 1).wait(timeout=0).return_value == 1

    @pytest.mark.django_db(transaction=True)
    def test_wait_times_out(self):
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.1 s: it is READY"):
            tasks.add.enqueue(1).wait(timeout=0.1)

    @pytest.mark.django_db(transaction=True)
    def test_wait_returns_finished_result(self):
        from asgiref.sync import async_to_sync

        result, other = tasks.add.enqueue(1), tasks.add.enqueue(2)
        testing.drain()
        assert result.wait(timeout=5).return_value == 1
        assert async_to_sync(other.await_)(5).return_value == 2


def test_drained_job_leaves_the_context_of_the_test_unchanged():
    run(tasks.handle_for_tenant, "north")

    assert tasks.tenant.get() == ""
    assert run(tasks.handle_for_tenant, "south").return_value[0] == ""
