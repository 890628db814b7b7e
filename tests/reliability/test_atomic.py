"""``@task(atomic=True)``: the task's writes and the end of its job are one commit."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import OperationalError, connections, transaction

from django_dbqueue import batch, task, testing
from django_dbqueue.compat import InvalidTask, signals
from django_dbqueue.models import Execution, Job
from django_dbqueue.runtime.worker import executor, failed_attempt
from django_dbqueue.runtime.worker.task_call import ThreadCall

from .. import direct, tasks
from ..conftest import a_process, until, until_a_lock_is_awaited
from ..models import Effect, Run
from .conftest import Elsewhere

pytestmark = pytest.mark.django_db(transaction=True)


def run(job, backend):
    return executor.run(ThreadCall(job), backend)


def test_effects_and_end_are_one_commit(backend, claim):
    tasks.atomic_row.enqueue("once")
    (job,) = claim()

    assert run(job, backend).written

    assert Run.objects.get().job == "once"
    assert (Job.objects.get().state, Job.objects.get().result) == ("successful", "done: once")
    assert Execution.objects.get().outcome == "successful"


def test_failure_rolls_back_effects(backend):
    result = tasks.atomic_row.enqueue("once", fail=True)
    testing.drain()

    assert not Run.objects.exists()
    assert backend.get_result(result.id).status == "FAILED"


@pytest.mark.parametrize("fails", [False, True])
def test_task_that_leaves_a_transaction_open_has_failed(backend, claim, fails):
    result = tasks.atomic_left_open.enqueue(fails)
    (job,) = claim()

    direct.settle([run(job, backend)])

    (error,) = backend.get_result(result.id).errors
    assert error.exception_class is (ZeroDivisionError if fails else RuntimeError)
    assert not connections["default"].in_atomic_block
    assert not Run.objects.exists()
    assert Job.objects.get().state == "failed"


def test_lost_job_rolls_back_effects(backend, claim):
    tasks.atomic_row.enqueue("once")
    (late,) = claim()
    direct.release([late])
    (owner,) = claim(a_process("another"))

    outcome = run(late, backend)

    assert not Run.objects.exists()
    assert direct.settle([outcome]).lost
    assert run(owner, backend).written
    assert Run.objects.count() == 1
    assert Job.objects.get().state == "successful"


def test_unserializable_result_rolls_back_effects(backend, claim):
    tasks.atomic_row.enqueue("once", result="not JSON")
    (job,) = claim()

    outcome = run(job, backend)

    assert not Run.objects.exists()
    assert outcome.state == "failed"


@pytest.mark.skipif(
    connections["default"].vendor == "sqlite", reason="SQLite's writers wait for each other."
)
def test_end_waits_for_briefly_locked_row(backend, claim):
    tasks.atomic_row.enqueue("once")
    (job,) = claim()
    holding, done = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic():
            Job.objects.select_for_update().get()
            holding.set()
            done.wait(20)
        connections.close_all()

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait(20)
    runner = Elsewhere(lambda: run(job, backend))
    until_a_lock_is_awaited()
    assert not Run.objects.exists()
    done.set()

    assert runner.result().written
    holder.join()
    assert Job.objects.get().state == "successful"


def test_coroutine_cannot_be_atomic():
    async def coroutine(): ...

    coroutine.__module__, coroutine.__qualname__ = "tests.tasks", "coroutine"
    with pytest.raises(InvalidTask, match="needs a plain function"):
        task(atomic=True)(coroutine)


def test_end_wakes_worker_for_batch_callback(runqueue):
    with batch(on_finish=tasks.sum_up):
        tasks.atomic_row.using(queue_name="limited").enqueue("once")
    runqueue("--poll-interval", "60")
    until(lambda: Run.objects.exists())

    until(lambda: Run.objects.count() == 2, 20)


def test_failing_on_commit_hook_keeps_job_successful_and_its_error(
    backend, claim, caplog, monkeypatch
):
    ended = []
    monkeypatch.setattr(signals.task_finished, "receivers", [])
    signals.task_finished.connect(
        lambda task_result, **_: ended.append(task_result.status), weak=False
    )
    tasks.atomic_with_hook.enqueue("once")
    (job,) = claim()

    settled = executor.run(ThreadCall(job), backend)

    assert [outcome.state for outcome in settled.written] == ["successful"]
    assert (Run.objects.count(), Job.objects.get().state) == (1, "successful")
    execution = Execution.objects.get()
    assert (execution.outcome, execution.error_type) == ("successful", "builtins.RuntimeError")
    assert execution.message == "An on_commit hook raised after the commit: the mail server is away"
    assert "the mail server is away" in caplog.text and "lost" not in caplog.text
    assert ended == ["SUCCESSFUL"]


def test_on_commit_hook_is_dropped_after_rollback(backend, claim):
    tasks.atomic_with_hook.enqueue("once", fail=True)
    (job,) = claim()

    outcome = executor.run(ThreadCall(job), backend)

    assert (outcome.state, Run.objects.count()) == ("failed", 0)


@pytest.mark.skipif(
    connections["default"].vendor != "postgresql",
    reason="PostgreSQL ends what cannot be serialized.",
)
def test_serialization_conflict_reruns_and_spends_no_attempt(backend, claim, monkeypatch):
    task = tasks.atomic_under_snapshot.using(key="a")
    task.enqueue("first")
    (job,) = claim()
    monkeypatch.setattr(
        tasks, "meanwhile", lambda: Elsewhere(lambda: task.enqueue("second")).result()
    )

    outcome = run(job, backend)
    assert (outcome.outcome, outcome.state, Run.objects.count()) == ("interrupted", "scheduled", 0)
    direct.settle([outcome])

    job = Job.objects.get()
    assert (job.state, job.failures, job.args) == ("scheduled", 0, ["second"])
    monkeypatch.setattr(tasks, "meanwhile", lambda: None)
    Job.objects.update(run_after=job.enqueued_at)
    direct.dispatch()
    (job,) = claim()
    assert [outcome.state for outcome in run(job, backend).written] == ["successful"]
    assert Run.objects.get().job == "second"


@pytest.mark.skipif(
    connections["default"].vendor != "postgresql",
    reason="PostgreSQL ends what cannot be serialized.",
)
def test_repeated_serialization_conflicts_fail_the_job(backend, claim, monkeypatch):
    tasks.atomic_under_snapshot.enqueue("never")
    monkeypatch.setattr(
        tasks, "meanwhile", lambda: Elsewhere(lambda: Job.objects.update(metadata={})).result()
    )
    monkeypatch.setattr(failed_attempt, "MOST_CONFLICTS", 3)

    ends = []
    while not ends or ends[-1] == "interrupted":
        (job,) = claim()
        outcome = run(job, backend)
        ends.append(outcome.outcome)
        direct.settle([outcome])
        Job.objects.filter(state="scheduled").update(run_after=job.enqueued_at)
        direct.dispatch()

    assert ends == ["interrupted"] * 3 + ["failed"]
    assert (Job.objects.get().failures, Run.objects.count()) == (1, 0)


@pytest.mark.skipif(
    connections["default"].vendor == "sqlite", reason="SQLite's writers wait for each other."
)
def test_deadlock_with_enqueue_of_same_key_loses_nothing(backend, claim, monkeypatch):
    """The caller locks the job's row and wants the task's row; the task's end wants the job's row."""
    Effect.objects.create(job="shared", attempt=0)
    task = tasks.atomic_change.using(key="a")
    task.enqueue("first")
    (job,) = claim()
    changed = threading.Event()

    def call():
        with transaction.atomic():
            task.enqueue("second")
            changed.wait(30)
            Effect.objects.update(attempt=2)

    def wait_for_caller():
        changed.set()
        until_a_lock_is_awaited()

    monkeypatch.setattr(tasks, "meanwhile", wait_for_caller)
    caller = Elsewhere(call)
    began = time.monotonic()
    outcome = run(job, backend)

    try:
        caller.result()
    except OperationalError:
        # The caller's transaction failed, and has changed nothing.
        assert outcome.written
        assert (Job.objects.get().state, Job.objects.get().args, Effect.objects.get().attempt) == (
            "successful",
            ["first"],
            1,
        )
    else:
        assert (outcome.outcome, outcome.state) == ("interrupted", "scheduled")
        direct.settle([outcome])
        again = Job.objects.get()
        assert (again.state, again.failures, again.args, Effect.objects.get().attempt) == (
            "scheduled",
            0,
            ["second"],
            2,
        )
    assert time.monotonic() - began < 20
