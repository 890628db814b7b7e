"""Staged races: one side locks a row at the worst moment while the other arrives."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
from django.db import connections

from django_dbqueue.compat import signals, task_backends
from django_dbqueue.context import JobContext
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.exceptions import JobLost
from django_dbqueue.models import Execution, Job, Process, Slot
from django_dbqueue.runtime import announcer, process_identity, recovery

from .. import direct, tasks
from ..conftest import a_process, until_a_lock_is_awaited
from .conftest import Elsewhere, held_open

pytestmark = pytest.mark.django_db(transaction=True)
locks_rows = pytest.mark.skipif(
    connections["default"].vendor == "sqlite", reason="SQLite locks as a whole."
)


def succeed(job, result=None):
    return AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result=result)


def recover(dead, how="was killed by signal 9", **values):
    backend = task_backends["default"]
    return recovery.recover(
        backend, dead, recovery.ExitReason(how=how, **values), partial(announcer.announce, backend)
    )


@locks_rows
def test_recovery_does_not_overwrite_result_being_written(claim, process):
    tasks.add.enqueue(1)
    (job,) = claim()

    with held_open(lambda: direct.settle([succeed(job, "right")])):
        assert recover(Process.objects.filter(pk=process.pk)) == 0

    assert recover(Process.objects.none()) == 0
    assert (Job.objects.get().state, Job.objects.get().result) == ("successful", "right")
    assert Execution.objects.get().outcome == "successful"


@locks_rows
def test_recovery_of_briefly_locked_job_keeps_exit_reason(claim, process, monkeypatch, caplog):
    tasks.add.enqueue(1)
    (job,) = claim()
    settle, times = recovery.settle, []

    def settle_with_locked_row(database, outcomes):
        times.append(outcomes)
        with (
            held_open(lambda: Job.objects.select_for_update().get())
            if len(times) == 1
            else nullcontext()
        ):
            return settle(database, outcomes)

    monkeypatch.setattr(recovery, "settle", settle_with_locked_row)

    assert recover(Process.objects.filter(pk=process.pk)) == 1

    assert len(times) == 2
    assert (
        Execution.objects.get().message
        == "It was lost: its process, worker@here:1:abc, was killed by signal 9."
    )
    assert [record.message for record in caplog.records if "It is now" in record.message] == [
        f"recovery: job {job.pk} of tests.tasks.add: {Execution.objects.get().message} It is now scheduled."
    ]


@locks_rows
def test_result_during_recovery_is_held_and_then_dropped(claim, process):
    tasks.add.enqueue(1)
    (job,) = claim()

    with held_open(lambda: recover(Process.objects.filter(pk=process.pk))):
        held = direct.settle([succeed(job)]).locked_elsewhere
        assert [o.fence for o in held] == [job.fence]

    assert direct.settle(held).lost
    assert Execution.objects.get().outcome == "lost"


@locks_rows
def test_concurrent_recoveries_of_a_process_recover_its_jobs_once(claim, process):
    tasks.add.enqueue_many([(n,) for n in range(20)])
    claim()
    dead = Process.objects.filter(pk=process.pk)

    with held_open(lambda: recover(dead)):
        second = Elsewhere(lambda: recover(dead))
        until_a_lock_is_awaited()

    assert second.result() == 0
    assert Execution.objects.filter(outcome="lost").count() == 20
    assert set(Job.objects.values_list("failures", flat=True)) == {1}


@locks_rows
def test_heartbeat_before_recovery_keeps_process_alive(claim, process):
    tasks.add.enqueue(1)
    claim()
    Process.objects.update(expires_at="2020-01-01T00:00:00Z")

    with held_open(lambda: Process.objects.filter(pk=process.pk).beat(30)):
        judge = Elsewhere(lambda: recover(Process.objects.silent(), "was silent"))
        until_a_lock_is_awaited()

    assert judge.result() == 0
    assert Job.objects.get().state == "running"
    assert Process.objects.filter(pk=process.pk).exists()


@locks_rows
def test_heartbeat_after_recovery_returns_false(process):
    Process.objects.update(expires_at="2020-01-01T00:00:00Z")

    with held_open(lambda: recover(Process.objects.silent(), "was silent")):
        late = Elsewhere(lambda: Process.objects.filter(pk=process.pk).beat(30))
        until_a_lock_is_awaited()

    assert late.result() is False


@locks_rows
def test_job_retried_during_prune_is_kept(claim):
    tasks.add.enqueue(1)
    (job,) = claim()
    direct.settle([AttemptResult.of(job, Execution.Outcome.FAILED, Job.State.FAILED)])
    Job.objects.update(finished_at="2020-01-01T00:00:00Z")

    with held_open(lambda: Job.objects.all().retry()):
        assert direct.prune_jobs(["failed"], 3600, 10) == 0

    assert Job.objects.get().state == "ready"


@locks_rows
def test_slot_taken_during_prune_counts(claim):
    tasks.one_at_a_time.enqueue()
    direct.release(claim())
    tasks.one_at_a_time.enqueue()

    with held_open(lambda: claim(limit=1)):
        pruning = Elsewhere(lambda: direct.prune_semaphores(100))
        pruning.wait(1.0)
    pruning.result()

    assert Slot.objects.taken().count() == 1
    assert claim() == []


def test_lost_attempt_cannot_save_metadata(claim, backend):
    tasks.add.enqueue(1)
    (late,) = claim()
    direct.release([late])
    claim(a_process("another"))
    late.metadata = {"done": 17}
    context = JobContext(task_result=backend.get_result(str(late.pk)), job=late, call=None)

    with pytest.raises(JobLost):
        context.save_metadata()

    assert Job.objects.get().metadata == {}


def test_lost_attempt_cannot_start_on_lost_fail_job(claim):
    tasks.transfer.enqueue("x")
    (late,) = claim()
    direct.release([late])
    (owner,) = claim(a_process("another"))

    assert not direct.mark_started(late)
    assert not Job.objects.get().has_begun
    assert direct.mark_started(owner)


@pytest.mark.parametrize("is_reenqueued", [False, True])
def test_task_finished_is_sent_for_job_failed_by_recovery(claim, process, is_reenqueued):
    received = []

    def listen(task_result, **kwargs):
        received.append((task_result.id, task_result.status))

    result = tasks.transfer.using(key="x").enqueue("x")
    (job,) = claim()
    direct.mark_started(job)
    if is_reenqueued:
        tasks.transfer.using(key="x").enqueue("x")
    signals.task_finished.connect(listen)
    try:
        recover(Process.objects.filter(pk=process.pk))
    finally:
        signals.task_finished.disconnect(listen)

    assert received == ([] if is_reenqueued else [(result.id, "FAILED")])
    assert Job.objects.get().state == ("ready" if is_reenqueued else "failed")


def test_recovery_imports_nothing(claim, process):
    import sys

    tasks.transfer.enqueue("x")
    Job.objects.update(task="tests.explosive.task")
    (job,) = claim()
    direct.mark_started(job)

    recover(Process.objects.filter(pk=process.pk))

    assert Job.objects.get().state == "failed"
    assert "tests.explosive" not in sys.modules


class TestIsGone:
    """A process is gone only if this host can know it."""

    def test_running_process_is_not_gone(self):
        import os

        assert not process_identity.is_gone(os.getpid(), process_identity.identity())
        assert not process_identity.is_gone(
            1, {**process_identity.identity(), "born": process_identity._born(1)}
        )

    def test_ended_process_and_reused_pid_are_gone(self):
        import os
        import subprocess

        child = subprocess.Popen(["sleep", "60"])
        noted = {**process_identity.identity(), "born": process_identity._born(child.pid)}
        assert not process_identity.is_gone(child.pid, noted)
        child.kill()
        child.wait()

        assert process_identity.is_gone(child.pid, noted)
        assert process_identity.is_gone(os.getpid(), {**process_identity.identity(), "born": -1})

    @pytest.mark.parametrize("other", [{"boot": "another"}, {"space": "pid:[1]"}])
    def test_process_of_another_host_is_never_gone(self, other):
        assert not process_identity.is_gone(10**7, {**process_identity.identity(), **other})
        assert not process_identity.is_gone(10**7, {})
