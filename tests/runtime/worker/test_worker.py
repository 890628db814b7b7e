"""A worker on a thread of the test, with a database that fails at critical moments."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from django.conf import settings
from django.db import DataError, InternalError, OperationalError, connection, connections

from django_dbqueue import pipeline
from django_dbqueue.compat import signals, task_backends
from django_dbqueue.core.options import Options
from django_dbqueue.engine.attempt_result import AttemptResult, Settled
from django_dbqueue.models import Execution, Failure, Job, Process
from django_dbqueue.models.job import JobQuerySet
from django_dbqueue.runtime.worker import claimer as claimer_module
from django_dbqueue.runtime.worker import executor
from django_dbqueue.runtime.worker import settler as settler_module
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.services import WorkerServices
from django_dbqueue.runtime.worker.settler import Settler
from django_dbqueue.runtime.worker.task_call import ThreadCall
from django_dbqueue.runtime.worker.thread_pool import ThreadPool
from django_dbqueue.runtime.worker.worker import Worker

from ... import tasks
from ...conftest import LONG, most_at_a_time, until
from ...models import Interval, Run

pytestmark = pytest.mark.django_db(transaction=True)


def break_once(monkeypatch, module, verb, error, *, call=1, done=True):
    """Make one call of a function raise, before its work or after it, as a connection lost at COMMIT does.

    Return the list of its calls.
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


@pytest.mark.skipif(connection.vendor != "postgresql", reason="Only there it is warmed up.")
def test_worker_starts_while_the_database_fails_over(worker, monkeypatch):
    calls = break_once(monkeypatch, Claimer, "warm_up", OperationalError("postmaster exit"))
    tasks.record.enqueue()

    worker()
    until(lambda: finished() == 1)

    assert len(calls) == 1


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("done", [True, False])
def test_failed_claim_loses_no_job(worker, monkeypatch, call, done):
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


def test_worker_runs_no_more_than_max_jobs_after_a_claim_whose_answer_is_lost(worker, monkeypatch):
    lost = OperationalError("server closed the connection")
    calls = break_once(monkeypatch, claimer_module, "claim", lost)
    tasks.nothing.enqueue_many([()] * 12)

    worker(max_jobs=4)

    until(lambda: finished() >= 4 and not Process.objects.exists())
    assert (finished(), Job.objects.ready().count()) == (4, 8)
    assert len(calls) > 1


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
    until(lambda: len(calls) == 3)  # The failed call, a rehearsal and the repeat.
    time.sleep(0.1)
    assert "was lost" not in caplog.text


def test_refused_outcome_fails_only_its_own_job(worker, monkeypatch):
    refused = tasks.add.enqueue_many([(n,) for n in range(5)])[0]
    settle = settler_module.settle

    def refuse(database, outcomes, *args):
        if any(str(outcome.job.pk) == refused.id and outcome.result == 0 for outcome in outcomes):
            raise DataError("invalid value")
        return settle(database, outcomes, *args)

    monkeypatch.setattr(settler_module, "settle", refuse)

    worker()

    until(lambda: finished() == 5)
    assert str(Job.objects.failed().get().pk) == refused.id
    assert (
        Execution.objects.get(outcome="failed").message
        == "The database refused the return value of the task: invalid value"
    )
    assert Execution.objects.filter(outcome="successful").count() == 4


def test_refused_message_is_stored_in_ascii(worker, monkeypatch):
    """MySQL with utf8mb3 refuses such text with an error class that it also uses for outages."""
    settle = settler_module.settle

    def refuse(database, outcomes, *args):
        if any("🙈" in (outcome.error.message if outcome.error else "") for outcome in outcomes):
            raise OperationalError(1366, "Incorrect string value")
        return settle(database, outcomes, *args)

    monkeypatch.setattr(settler_module, "settle", refuse)
    tasks.fail.enqueue("no 🙈")
    tasks.record.enqueue()

    worker()

    until(lambda: finished() == 2)
    assert Execution.objects.get(outcome="failed").message == "no \\U0001f648"
    assert Execution.objects.get(outcome="successful").attempt == 1


@pytest.mark.parametrize("how", ["nul in type", "surrogate in file name", "unreadable"])
def test_error_of_odd_text_is_written_and_delays_no_other_outcome(worker, how):
    tasks.misbehave.enqueue(how)
    tasks.record.enqueue_many([()] * 5)

    worker()

    until(lambda: finished() == 6)
    assert Execution.objects.filter(outcome="failed").count() == Failure.objects.count() == 1


def test_error_that_is_refused_in_any_form_is_no_outage(worker, monkeypatch):
    settle, refusing = settler_module.settle, threading.Event()
    refusing.set()

    def refuse(database, outcomes, *args):
        if refusing.is_set() and any(outcome.error for outcome in outcomes):
            raise ValueError("invalid text")
        return settle(database, outcomes, *args)

    monkeypatch.setattr(settler_module, "settle", refuse)
    tasks.fail.enqueue("odd")
    worker()
    until(lambda: Job.objects.running().exists())
    tasks.record.enqueue_many([()] * 20)

    until(lambda: finished() == 20)
    assert not Job.objects.failed().exists()
    refusing.clear()
    until(lambda: finished() == 21)
    assert Execution.objects.get(outcome="failed").message == "odd"


def test_outcomes_wait_while_database_is_read_only(worker, monkeypatch):
    settle = settler_module.settle
    until_then = time.monotonic() + 1.0

    def refuse(database, outcomes, *args):
        if time.monotonic() < until_then:
            raise InternalError("cannot execute UPDATE in a read-only transaction")
        return settle(database, outcomes, *args)

    monkeypatch.setattr(settler_module, "settle", refuse)
    tasks.record.enqueue_many([()] * 20)
    tasks.fail.enqueue()

    worker()

    until(lambda: finished() == 21)
    assert set(Execution.objects.values_list("attempt", flat=True)) == {1}


def test_oversized_group_of_outcomes_is_split(claim):
    tasks.nothing.enqueue_many([()] * 40)
    settler = Settler("default", Options())
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


def test_consecutive_outcomes_are_written_in_few_groups(claim, monkeypatch):
    tasks.nothing.enqueue_many([()] * 100)
    settle, groups = settler_module.settle, []

    def slow(database, outcomes, *args):
        groups.append(len(outcomes))
        time.sleep(0.005)
        return settle(database, outcomes, *args)

    monkeypatch.setattr(settler_module, "settle", slow)
    settler = Settler("default", Options())
    settler.start()
    began = time.monotonic()
    for job in claim():
        settler.put(AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL))
        time.sleep(0.002)
    until(lambda: finished() == 100)

    # The first group does not wait for more outcomes; each later group waits as long as it may.
    assert len(groups) <= (time.monotonic() - began) / Settler.LONGEST_REST + 4
    assert sum(groups) == 100
    settler.close()
    settler.join(LONG)
    connections.close_all()


def test_worker_starts_no_more_than_settler_can_write(worker, monkeypatch):
    """Jobs whose outcomes are unwritten run again if the process dies."""
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
def test_outcome_with_dependents_is_written_at_once(claim, monkeypatch, last, limited_queues):
    tasks.nothing.enqueue_many([()] * 3)
    last_one = last.enqueue()
    plain, another, third, limited = (
        AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)
        for job in sorted(claim(), key=lambda job: str(job.pk) == last_one.id)
    )
    monkeypatch.setattr(Settler, "LONGEST_REST", 600.0)
    monkeypatch.setattr(Settler, "REST", 1e9)
    settler = Settler("default", Options(), WorkerServices(limited_queues=lambda: limited_queues))
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


@pytest.mark.parametrize(
    ("services", "wanted"),
    [
        ({"keeps_slot": lambda job: True}, [False, True]),
        ({"has_room": lambda: False}, [True, False]),
        ({}, [True, True]),
    ],
)
def test_outcome_that_no_thread_could_follow_up_waits_for_its_group(claim, services, wanted):
    """A thread runs the next job of the slot group, or has other jobs than the next stage."""
    tasks.one_at_a_time.enqueue()
    pipeline(tasks.grind, tasks.pour).enqueue("arabica")
    limited, stage = sorted(claim(), key=lambda job: not job.limits)
    ends = [
        AttemptResult.of(limited, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL),
        executor.run(ThreadCall(stage), task_backends["default"]),
    ]

    settler = Settler("default", Options(), WorkerServices(**services))

    assert [settler._is_awaited(end) for end in ends] == wanted


def kill_connections():
    """Make the server close all other connections to the test's database."""
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
def test_jobs_run_after_server_closes_connections(worker, kind):
    worker()
    for result in kind.enqueue_many([(f"before {n}",) for n in range(4)]):
        result.wait(timeout=LONG)
    time.sleep(1.1)
    kill_connections()

    for result in kind.enqueue_many([(f"after {n}",) for n in range(4)]):
        assert result.wait(timeout=LONG).errors == []


def test_transaction_left_open_does_not_affect_other_jobs(worker):
    if connection.vendor == "mysql":
        pytest.skip("The driver does not say whether a transaction is open.")
    worker()
    tasks.begin.enqueue().wait(timeout=LONG)
    tasks.begin.enqueue().wait(timeout=LONG)

    for result in tasks.row.enqueue_many([(n,) for n in range(4)]):
        assert result.wait(timeout=LONG).errors == []

    assert Run.objects.count() == 4


def test_query_log_holds_only_queries_of_own_job(worker, monkeypatch):
    monkeypatch.setattr(settings, "DEBUG", True)
    worker()

    counted = [tasks.count_queries.enqueue().wait(timeout=LONG).return_value for _ in range(5)]

    assert max(counted) <= 3  # Including those that set up a new connection.


def test_event_loop_survives_system_exit_of_coroutine(worker):
    worker()

    failed = tasks.exit_beside.enqueue().wait(timeout=LONG)

    assert failed.errors[0].exception_class is SystemExit
    assert tasks.echo.enqueue("still here").wait(timeout=LONG).return_value == "still here"


def test_exiting_receiver_ends_neither_thread_nor_job(worker):
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


def test_worker_survives_failed_lane_scan(worker, monkeypatch):
    worker()
    tasks.nothing.enqueue().wait(timeout=LONG)
    calls = break_once(
        monkeypatch, JobQuerySet, "lanes", OperationalError("server closed the connection")
    )

    for priority in range(5):
        tasks.nothing.using(priority=priority).enqueue().wait(timeout=LONG)
    assert calls


def test_log_records_have_structured_fields(worker, caplog):
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


def test_claimed_job_that_the_worker_forgot_is_released(worker, monkeypatch, caplog):
    put = ThreadPool.put

    def forget(pool, jobs):
        monkeypatch.setattr(ThreadPool, "put", put)

    monkeypatch.setattr(ThreadPool, "put", forget)
    monkeypatch.setattr(Worker, "AUDIT", 0.3)
    result = tasks.add.enqueue(1, 2)

    worker()

    assert result.wait(LONG).return_value == 3
    assert f"job {result.id} (attempt 1) was claimed and never started" in caplog.text
    assert Job.objects.get().failures == 0


def test_audit_finds_no_job_that_runs_or_has_just_ended(worker, monkeypatch, caplog):
    monkeypatch.setattr(Worker, "AUDIT", 0.0)
    tasks.add.enqueue_many([(n, 0) for n in range(500)])
    tasks.one_at_a_time.enqueue_many([()] * 50)

    worker(threads=4)

    until(lambda: finished() == 550)
    assert "never started" not in caplog.text
    assert Execution.objects.count() == 550


class TestRates:
    """Jobs with a rate that a busy worker has claimed ahead."""

    @pytest.fixture
    def busy(self, worker):
        """Make the worker claim ahead, then keep its only thread busy."""

        def busy(seconds):
            tasks.sleep.enqueue_many([(0.001,)] * 60)
            worker(threads=1)
            until(lambda: finished() == 60)
            long = tasks.sleep.enqueue(seconds)
            until(lambda: Job.objects.get(pk=long.id).state == "running")

        return busy

    def test_released_job_has_not_used_its_rate(self, busy):
        busy(3.0)
        result = tasks.call_once_an_hour.enqueue()

        assert result.wait(30).status == "SUCCESSFUL"
        assert Job.objects.get(pk=result.id).attempt > 1


class TestAfterAFailover:
    """The database that answers after an outage lacks the last commits."""

    @pytest.fixture
    def fail_over(self, monkeypatch):
        """Make the worker's next claim fail, and set the jobs' rows to the given values."""

        def fail_over(jobs=Job.objects, **row):
            claim = Claimer.claim

            def forget(self, *args):
                monkeypatch.setattr(Claimer, "claim", claim)
                Execution.objects.all().delete()
                jobs.update(**row)
                raise OperationalError("server closed the connection")

            monkeypatch.setattr(Claimer, "claim", forget)

        return fail_over

    def begin(self, worker, tmp_path):
        """Start a job; return the file of its starts and the file that lets it end."""
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

    def test_reclaimed_job_that_still_runs_is_not_started_again(
        self, worker, tmp_path, caplog, fail_over
    ):
        path, go = self.begin(worker, tmp_path)

        fail_over(**self.READY)
        until(lambda: "goes on: its claim was lost" in caplog.text)
        go.touch()

        until(lambda: finished() == 1)
        assert len(path.read_text().splitlines()) == Execution.objects.count() == 1
        assert "runs twice" not in caplog.text

    def test_no_job_of_its_slot_group_runs_beside_a_job_that_goes_on(
        self, worker, caplog, fail_over
    ):
        tasks.occupy_alone.enqueue_many([("a", 0.001)] * 20)
        worker()
        until(lambda: finished() == 20)
        tasks.occupy_alone.enqueue("a", 4.0)
        until(lambda: Interval.objects.count() == 21)
        tasks.occupy_alone.enqueue_many([("a", 0.001)] * 5)

        fail_over(Job.objects.running(), **self.READY, priority=1)

        until(lambda: finished() == 26)
        assert "goes on: its claim was lost" in caplog.text
        assert most_at_a_time(Interval.objects.all()) == 1

    def test_refused_outcome_of_reclaimed_job_runs_it_again(
        self, worker, tmp_path, caplog, fail_over, monkeypatch
    ):
        path, go = self.begin(worker, tmp_path)
        fail_over(**self.READY)
        until(lambda: "goes on: its claim was lost" in caplog.text)

        settle = settler_module.settle

        def refuse(database, outcomes, *args):
            monkeypatch.setattr(settler_module, "settle", settle)
            return Settled([], [], list(outcomes), [], [])

        monkeypatch.setattr(settler_module, "settle", refuse)
        go.touch()

        until(lambda: finished() == 1)
        assert len(path.read_text().splitlines()) == 2
        assert Execution.objects.get().attempt == 2

    @pytest.mark.parametrize("lost", ["its claim", "its end"])
    def test_second_run_of_finished_job_is_logged(self, worker, tmp_path, caplog, fail_over, lost):
        path, go = self.begin(worker, tmp_path)
        process = Job.objects.get().process_id
        go.touch()
        until(lambda: finished() == 1)

        running = {"state": "running", "process": process, "attempt": 1, "finished_at": None}
        fail_over(**(self.READY if lost == "its claim" else running))

        until(lambda: len(path.read_text().splitlines()) == 2)
        until(lambda: finished() == 1)
        assert f"runs twice: {lost} was lost" in caplog.text


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_forked_by_a_task_leaves_jobs_and_transaction_to_its_parent(worker):
    tasks.add.enqueue_many([(n,) for n in range(20)])
    result = tasks.fork_in_transaction.enqueue()
    tasks.add.enqueue_many([(n,) for n in range(20)])
    worker(threads=1)

    assert result.wait(timeout=LONG).return_value == 1
    until(lambda: not Job.objects.exclude(state="successful").exists())
    assert Execution.objects.count() == 41
    assert Run.objects.count() == 2


def test_context_of_a_job_does_not_reach_the_next_one_and_connections_do(worker):
    worker(threads=1)

    first, second = (
        tasks.handle_for_tenant.enqueue(name).wait(timeout=LONG).return_value
        for name in ("north", "south")
    )

    assert first == second
    assert second[:2] == ["", "en-us"]
