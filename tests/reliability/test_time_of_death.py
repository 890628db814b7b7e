"""Recovery uses the time of death: time after a process's last sign of life is not run time."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.db import OperationalError
from django.db.models import F

from django_dbqueue.compat import task_backends
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job, Process
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.supervisor.supervisor import Supervisor

from .. import direct, tasks
from ..conftest import a_process

pytestmark = pytest.mark.django_db(transaction=True)


def recover(**death):
    recovery.recover(
        task_backends["default"],
        Process.objects.all(),
        recovery.ExitReason(how="died", **death),
        list,
    )
    return Execution.objects.get().outcome, Job.objects.get().state


@pytest.fixture
def started(claim, process):
    """Claim a job with a timeout of 5 s. Arguments: seconds since the claim and the heartbeat."""

    def started(ago, heartbeat_ago):
        tasks.nothing.enqueue()
        Job.objects.update(timeout=timedelta(seconds=5))
        (job,) = claim()
        Job.objects.update(started_at=F("started_at") - timedelta(seconds=ago))
        Process.objects.update(heartbeat_at=F("heartbeat_at") - timedelta(seconds=heartbeat_ago))
        return job

    return started


def test_silence_of_host_is_not_run_time(started):
    started(ago=30.5, heartbeat_ago=30)

    assert recover(silent=True) == ("lost", "scheduled")


def test_timeout_before_silence_of_host_counts(started):
    started(ago=60, heartbeat_ago=30)

    assert recover(silent=True) == ("timed_out", "failed")


def test_job_of_deleted_process_row_has_not_timed_out(started, process):
    started(ago=3600, heartbeat_ago=0)
    process.delete()

    assert recover() == ("lost", "scheduled")


def test_wait_of_claimed_job_is_not_run_time(started):
    started(ago=6, heartbeat_ago=0)

    assert recover() == ("lost", "scheduled")


def test_job_whose_process_was_ended_for_it_has_timed_out(started):
    started(ago=5.5, heartbeat_ago=0)

    assert recover(innocent=True) == ("timed_out", "failed")


def test_delay_of_recovery_is_not_run_time(started, backend, monkeypatch):
    def raise_operational_error(*args):
        raise OperationalError("the server is away")

    started(ago=0.5, heartbeat_ago=0)
    supervisor = Supervisor(backend, [], {})
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "recover", raise_operational_error)
        supervisor._recover(Process.objects.all(), recovery.ExitReason(how="was killed"))

    class HalfAMinuteLater:
        monotonic = staticmethod(lambda: time.monotonic() + 30)

    Job.objects.update(started_at=F("started_at") - timedelta(seconds=30))
    monkeypatch.setattr(recovery, "time", HalfAMinuteLater)
    assert supervisor._recover_dead()

    assert (Execution.objects.get().outcome, Job.objects.get().state) == ("lost", "scheduled")


def test_process_that_died_while_clock_was_ahead_is_detected(started):
    started(ago=0.5, heartbeat_ago=-3600)
    Process.objects.update(expires_at=F("heartbeat_at") + timedelta(seconds=30))

    assert Process.objects.silent().exists()
    assert recover(silent=True) == ("lost", "scheduled")


def test_process_with_clock_slightly_ahead_is_not_declared_dead(started):
    started(ago=0.5, heartbeat_ago=-20)

    assert not Process.objects.silent().exists()


def test_claim_lost_in_failover_lets_one_process_settle(claim):
    """The promoted asynchronous standby has neither the last claim nor its process."""
    tasks.add.enqueue(1)
    (first,) = claim()
    Job.objects.update(state="ready", process=None, attempt=0, started_at=None)
    Process.objects.all().delete()
    (second,) = claim(a_process("another"))
    assert (second.attempt, second.process_id) != (first.attempt, first.process_id)

    early = direct.settle(
        [
            AttemptResult.of(
                first, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="first"
            )
        ]
    )
    assert (
        [outcome.fence for outcome in early.lost]
        == [first.fence]
        == [outcome.fence for outcome in early.twice]
    )
    assert not Job.objects.owned(first).exists()
    settled = direct.settle(
        [
            AttemptResult.of(
                second, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="second"
            )
        ]
    )

    assert [outcome.fence for outcome in settled.written] == [second.fence]
    assert Job.objects.get().result == "second"
    late = direct.settle(
        [
            AttemptResult.of(
                first, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="first"
            )
        ]
    )
    assert [outcome.fence for outcome in late.twice] == [first.fence]
    assert Execution.objects.get().process == "another"


def test_claim_lost_in_failover_frees_its_attempt_number(claim):
    """The lost claim's result arrives before the job is claimed again."""
    tasks.add.enqueue(1)
    (first,) = claim()
    Job.objects.update(state="ready", process=None, attempt=0, started_at=None)

    early = direct.settle(
        [
            AttemptResult.of(
                first, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="first"
            )
        ]
    )
    assert [outcome.fence for outcome in early.twice] == [first.fence]
    (second,) = claim(a_process("another"))
    direct.settle(
        [
            AttemptResult.of(
                second, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="second"
            )
        ]
    )

    assert Job.objects.get().result == "second"
    assert Execution.objects.get().process == "another"
