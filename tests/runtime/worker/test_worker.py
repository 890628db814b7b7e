"""A worker on a thread of the test, whose database fails at the worst moment."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from django.conf import settings
from django.db import DataError, InternalError, OperationalError, connection, connections

from django_dbqueue.compat import signals
from django_dbqueue.core.options import Options
from django_dbqueue.engine.attempt_result import AttemptResult, Settled
from django_dbqueue.models import Execution, Job
from django_dbqueue.models.job import JobQuerySet
from django_dbqueue.runtime.worker import claimer as claimer_module
from django_dbqueue.runtime.worker import settler as settler_module
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.settler import Settler

from ... import tasks
from ...conftest import LONG, until
from ...models import Run

pytestmark = pytest.mark.django_db(transaction=True)


def break_once(monkeypatch, module, verb, error, *, call=1, done=True):
    """Let one call of a verb raise: after it has done its work, as a connection does that is lost at COMMIT, or before.

    Returns the calls so far.
    """
    original = getattr(module, verb)
    calls = []

    def breaking(*args):
        calls.append(args)
        if len(calls) != call:
            return original(*args)
        if done:
            original(*args)
        raise error

    monkeypatch.setattr(module, verb, breaking)
    return calls


def finished():
    return Job.objects.filter(state__in=["successful", "failed"]).count()


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("done", [True, False])
def test_a_claim_that_breaks_leaves_no_job_behind(worker, monkeypatch, call, done):
    for priority in (1, 2, 3):
        tasks.record.using(priority=priority).enqueue()
    break_once(
        monkeypatch,
        claimer_module,
        "claim",
        OperationalError("server closed the connection"),
        call=call,
        done=done,
    )

    worker()

    until(lambda: finished() == 3)
    assert Execution.objects.filter(outcome="successful").count() == Execution.objects.count() == 3


@pytest.mark.parametrize("done", [True, False])
def test_an_outcome_is_written_after_an_outage(worker, monkeypatch, caplog, done):
    tasks.record.enqueue()
    calls = break_once(
        monkeypatch,
        settler_module,
        "settle",
        OperationalError("server closed the connection"),
        done=done,
    )

    worker()

    until(lambda: finished() == 1)
    assert Execution.objects.get().outcome == Job.objects.get().state == "successful"
    until(lambda: len(calls) == 3)  # The one that broke, a rehearsal, and once more.
    time.sleep(0.1)
    assert "was lost" not in caplog.text


def test_an_outcome_that_the_database_refuses_fails_its_job_alone(worker, monkeypatch):
    refused = tasks.add.enqueue_many([(n,) for n in range(5)])[0]
    settle = settler_module.settle

    def refuse(database, outcomes):
        if any(str(outcome.job.pk) == refused.id and outcome.result == 0 for outcome in outcomes):
            raise DataError("invalid value")
        return settle(database, outcomes)

    monkeypatch.setattr(settler_module, "settle", refuse)

    worker()

    until(lambda: finished() == 5)
    assert str(Job.objects.failed().get().pk) == refused.id
    assert (
        Execution.objects.get(outcome="failed").message
        == "The database refused what the task returned: invalid value"
    )
    assert Execution.objects.filter(outcome="successful").count() == 4


def test_a_message_that_the_database_refuses_is_stored_in_ascii(worker, monkeypatch):
    """As MySQL with a character set of three bytes does, by the class of error that it has for outages too."""
    settle = settler_module.settle

    def refuse(database, outcomes):
        if any("🙈" in (outcome.error.message if outcome.error else "") for outcome in outcomes):
            raise OperationalError(1366, "Incorrect string value")
        return settle(database, outcomes)

    monkeypatch.setattr(settler_module, "settle", refuse)
    tasks.fail.enqueue("no 🙈")
    tasks.record.enqueue()

    worker()

    until(lambda: finished() == 2)
    assert Execution.objects.get(outcome="failed").message == "no \\U0001f648"
    assert Execution.objects.get(outcome="successful").attempt == 1


def test_while_the_database_is_read_only_outcomes_wait(worker, monkeypatch):
    settle = settler_module.settle
    until_then = time.monotonic() + 1.0

    def refuse(database, outcomes):
        if time.monotonic() < until_then:
            raise InternalError("cannot execute UPDATE in a read-only transaction")
        return settle(database, outcomes)

    monkeypatch.setattr(settler_module, "settle", refuse)
    tasks.record.enqueue_many([()] * 20)
    tasks.fail.enqueue()

    worker()

    until(lambda: finished() == 21)
    assert set(Execution.objects.values_list("attempt", flat=True)) == {1}


def test_outcomes_that_are_too_large_together_are_written_apart(claim):
    tasks.nothing.enqueue_many([()] * 40)
    settler = Settler("default", Options(), lambda: True)
    for job in claim():
        settler.put(
            AttemptResult.of(
                job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="x" * 1_000_000
            )
        )

    settler.start()

    until(lambda: Job.objects.filter(state="successful").count() == 40)
    settler.close()
    settler.join(LONG)
    connections.close_all()


def test_outcomes_that_come_one_after_the_other_are_written_in_few_groups(claim, monkeypatch):
    tasks.nothing.enqueue_many([()] * 100)
    settle, groups = settler_module.settle, []

    def slow(database, outcomes):
        groups.append(len(outcomes))
        time.sleep(0.005)
        return settle(database, outcomes)

    monkeypatch.setattr(settler_module, "settle", slow)
    settler = Settler("default", Options(), lambda: True)
    settler.start()
    began = time.monotonic()
    for job in claim():
        settler.put(AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL))
        time.sleep(0.002)
    until(lambda: finished() == 100)

    # None waits for others at first, and then each group for as long as it may.
    assert len(groups) <= (time.monotonic() - began) / Settler.LONGEST_REST + 4
    assert sum(groups) == 100
    settler.close()
    settler.join(LONG)
    connections.close_all()


def test_no_more_is_begun_than_can_be_written(worker, monkeypatch):
    """What has ended and is not written would run again, if its process died."""
    settle, may_write = settler_module.settle, threading.Event()
    monkeypatch.setattr(
        settler_module, "settle", lambda *args: may_write.wait(LONG) and settle(*args)
    )
    monkeypatch.setattr(Settler, "LARGEST_GROUP", 5)
    tasks.nothing.enqueue_many([()] * 200)
    worker(prefetch=5)
    until(lambda: Job.objects.running().count() > 10)
    time.sleep(1)

    begun = Job.objects.running().count()
    may_write.set()
    until(lambda: finished() == 200)
    assert begun < 40


@pytest.mark.parametrize(
    ("last", "limited_queues"),
    [(tasks.one_at_a_time, ()), (tasks.nothing.using(queue_name="mail"), ("mail",))],
)
def test_what_others_wait_for_ends_its_rest(claim, monkeypatch, last, limited_queues):
    tasks.nothing.enqueue_many([()] * 3)
    last_one = last.enqueue()
    plain, another, third, limited = (
        AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)
        for job in sorted(claim(), key=lambda job: str(job.pk) == last_one.id)
    )
    monkeypatch.setattr(Settler, "LONGEST_REST", 600.0)
    monkeypatch.setattr(Settler, "REST", 1e9)
    settler = Settler("default", Options(), lambda: True, limited=lambda: limited_queues)
    settler.put(plain)
    settler.put(another)
    settler.start()
    until(lambda: finished() == 2)

    settler.put(third)
    time.sleep(0.2)
    assert finished() == 2
    settler.put(limited)

    until(lambda: finished() == 4)
    settler.close()
    settler.join(LONG)
    connections.close_all()


def kill_connections():
    """Have the server close all connections of the test's database but this one."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        else:
            cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
            )
            for (number,) in cursor.fetchall():
                cursor.execute(f"KILL {number}")


@pytest.mark.skipif(
    "sqlite" in settings.DATABASES["default"]["ENGINE"], reason="SQLite has no server to lose."
)
@pytest.mark.parametrize("kind", [tasks.row, tasks.row_async])
def test_after_the_server_has_closed_all_connections_jobs_go_on(worker, kind):
    worker()
    for result in kind.enqueue_many([(f"before {n}",) for n in range(4)]):
        result.wait(timeout=LONG)
    time.sleep(1.1)
    kill_connections()

    for result in kind.enqueue_many([(f"after {n}",) for n in range(4)]):
        assert result.wait(timeout=LONG).errors == []


def test_a_transaction_that_a_task_left_open_takes_no_other_job_along(worker):
    if connection.vendor == "mysql":
        pytest.skip("The driver does not say whether a transaction is open.")
    worker()
    tasks.begin.enqueue().wait(timeout=LONG)
    tasks.begin.enqueue().wait(timeout=LONG)

    for result in tasks.row.enqueue_many([(n,) for n in range(4)]):
        assert result.wait(timeout=LONG).errors == []

    assert Run.objects.count() == 4


def test_a_job_sees_its_own_queries_alone(worker, monkeypatch):
    monkeypatch.setattr(settings, "DEBUG", True)
    worker()

    counted = [tasks.count_queries.enqueue().wait(timeout=LONG).return_value for _ in range(5)]

    assert max(counted) <= 3  # With those that set up a new connection.


def test_the_event_loop_survives_what_a_tasks_own_coroutines_raise(worker):
    worker()

    failed = tasks.exit_beside.enqueue().wait(timeout=LONG)

    assert failed.errors[0].exception_class is SystemExit
    assert tasks.echo.enqueue("still here").wait(timeout=LONG).return_value == "still here"


def test_a_receiver_that_exits_ends_no_thread_and_no_job(worker):
    def leave(**kwargs):
        raise SystemExit(1)

    signals.task_finished.connect(leave)
    try:
        worker()
        for task in (tasks.record, tasks.fail, tasks.record, tasks.fail):
            task.enqueue().wait(timeout=LONG)
    finally:
        signals.task_finished.disconnect(leave)

    assert Execution.objects.filter(outcome="successful").count() == 2


def test_a_claim_that_breaks_while_lanes_are_read_ends_no_worker(worker, monkeypatch):
    worker()
    tasks.nothing.enqueue().wait(timeout=LONG)
    calls = break_once(
        monkeypatch, JobQuerySet, "lanes", OperationalError("server closed the connection")
    )

    for priority in range(5):
        tasks.nothing.using(priority=priority).enqueue().wait(timeout=LONG)
    assert calls


def test_lines_of_the_log_have_fields_for_machines(worker, caplog):
    caplog.set_level(logging.INFO, "django_dbqueue")
    result = tasks.fail.using(queue_name="low").enqueue()

    worker()

    until(lambda: finished() == 1)
    line = next(record for record in caplog.records if getattr(record, "job_id", None) == result.id)
    assert (line.task, line.queue, line.attempt) == ("tests.tasks.fail", "low", 1)
    assert line.process_name.startswith("worker@")
    assert any(
        "serves" in record.message and record.process_name == line.process_name
        for record in caplog.records
    )


class TestAfterAFailover:
    """The database that answers after an outage does not know the last commits."""

    @pytest.fixture
    def fail_over(self, monkeypatch):
        """Have the worker's next look for jobs fail, and the row of the only job be as given when the next one comes."""

        def fail_over(**row):
            claim = Claimer.claim

            def forget(self, *args):
                monkeypatch.setattr(Claimer, "claim", claim)
                Execution.objects.all().delete()
                Job.objects.update(**row)
                raise OperationalError("server closed the connection")

            monkeypatch.setattr(Claimer, "claim", forget)

        return fail_over

    def begin(self, worker, tmp_path):
        """A job that has begun. Returns the files of its beginnings, and for its end."""
        path, go = tmp_path / "lines", tmp_path / "go"
        tasks.leave_line.enqueue(str(path), str(go))
        worker()
        until(lambda: path.exists() and path.read_text())
        return path, go

    READY = {
        "state": "ready",
        "process": None,
        "attempt": 0,
        "started_at": None,
        "finished_at": None,
    }

    def test_a_lost_claim_that_is_made_again_while_the_job_runs_starts_nothing(
        self, worker, tmp_path, caplog, fail_over
    ):
        path, go = self.begin(worker, tmp_path)

        fail_over(**self.READY)
        until(lambda: "goes on: its claim was lost" in caplog.text)
        go.touch()

        until(lambda: finished() == 1)
        assert len(path.read_text().splitlines()) == Execution.objects.count() == 1
        assert "runs twice" not in caplog.text

    def test_a_run_that_goes_on_and_is_refused_is_followed_by_another(
        self, worker, tmp_path, caplog, fail_over, monkeypatch
    ):
        path, go = self.begin(worker, tmp_path)
        fail_over(**self.READY)
        until(lambda: "goes on: its claim was lost" in caplog.text)

        settle = settler_module.settle

        def refuse(database, outcomes):
            monkeypatch.setattr(settler_module, "settle", settle)
            return Settled([], [], list(outcomes), [], [])

        monkeypatch.setattr(settler_module, "settle", refuse)
        go.touch()

        until(lambda: finished() == 1)
        assert len(path.read_text().splitlines()) == 2
        assert Execution.objects.get().attempt == 2

    @pytest.mark.parametrize("lost", ["its claim", "its end"])
    def test_what_has_ended_and_runs_again_is_announced(
        self, worker, tmp_path, caplog, fail_over, lost
    ):
        path, go = self.begin(worker, tmp_path)
        process = Job.objects.get().process_id
        go.touch()
        until(lambda: finished() == 1)

        running = {"state": "running", "process": process, "attempt": 1, "finished_at": None}
        fail_over(**(self.READY if lost == "its claim" else running))

        until(lambda: len(path.read_text().splitlines()) == 2)
        until(lambda: finished() == 1)
        assert f"runs twice: {lost} was lost" in caplog.text
