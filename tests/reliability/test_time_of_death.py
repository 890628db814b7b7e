"""What is known of a process that has died says what becomes of its jobs: time after its last sign of life is not running time."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from django.db import OperationalError
from django.db.models import F

from django_dbqueue.compat import task_backends
from django_dbqueue.models import Execution, Job, Process, Settlement
from django_dbqueue.runtime import executor, recovery
from django_dbqueue.runtime.claimer import Claimer

from .. import tasks
from ..conftest import a_process, until

pytestmark = pytest.mark.django_db(transaction=True)

# What a job is after a failover that has lost its first claim.
UNCLAIMED = {"state": "ready", "process": None, "attempt": 0, "started_at": None}


def recover(**death):
    recovery.recover(task_backends["default"], Process.objects.all(), recovery.Death(how="died", **death), list)
    return Execution.objects.get().outcome, Job.objects.get().state


@pytest.fixture
def started(claim, process):
    """A running job with a timeout of 5 s. ``ago``: seconds since its claim. ``heartbeat_ago``: since its process was last heard."""

    def started(ago, heartbeat_ago):
        tasks.nothing.enqueue()
        Job.objects.update(timeout=timedelta(seconds=5))
        (job,) = claim()
        Job.objects.update(started_at=F("started_at") - timedelta(seconds=ago))
        Process.objects.update(heartbeat_at=F("heartbeat_at") - timedelta(seconds=heartbeat_ago))
        return job

    return started


def test_a_job_of_a_silent_host_has_not_run_longer_than_its_timeout_meanwhile(started):
    started(ago=30.5, heartbeat_ago=30)

    assert recover(silent=True) == ("lost", "scheduled")


def test_a_job_of_a_silent_host_that_had_run_longer_than_its_timeout_before_has_timed_out(started):
    started(ago=60, heartbeat_ago=30)

    assert recover(silent=True) == ("timed_out", "failed")


def test_a_job_whose_process_is_gone_without_a_trace_has_not_timed_out(started, process):
    started(ago=3600, heartbeat_ago=0)
    process.delete()

    assert recover() == ("lost", "scheduled")


def test_a_job_that_was_held_ready_for_a_while_has_not_run_meanwhile(started):
    started(ago=6, heartbeat_ago=0)

    assert recover() == ("lost", "scheduled")


def test_a_job_whose_process_was_ended_for_it_has_timed_out(started):
    started(ago=5.5, heartbeat_ago=0)

    assert recover(blameless=True) == ("timed_out", "failed")


def test_a_job_whose_process_died_while_the_database_was_away_has_not_run_since(started):
    started(ago=60, heartbeat_ago=60)

    assert recover(at=time.monotonic() - 60) == ("lost", "scheduled")


def test_a_job_that_had_run_longer_than_its_timeout_when_the_database_went_away_has_timed_out(started):
    started(ago=60, heartbeat_ago=30)

    assert recover(at=time.monotonic() - 30) == ("timed_out", "failed")


def test_a_claim_that_a_failover_has_lost_does_not_let_two_settle_one_attempt(claim):
    """An asynchronous standby that is promoted knows nothing of the last claim, nor of the process that made it."""
    tasks.add.enqueue(1)
    (first,) = claim()
    Job.objects.update(**UNCLAIMED)
    Process.objects.all().delete()
    (second,) = claim(a_process("another"))
    assert (second.attempt, second.process_id) != (first.attempt, first.process_id)

    early = Execution.objects.settle([Settlement.of(first, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="first")])
    assert [outcome.fence for outcome in early.lost] == [first.fence] == [outcome.fence for outcome in early.twice]
    assert not Job.objects.owned(first).exists()
    settled = Execution.objects.settle(
        [Settlement.of(second, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="second")]
    )

    assert [outcome.fence for outcome in settled.written] == [second.fence]
    assert Job.objects.get().result == "second"
    late = Execution.objects.settle([Settlement.of(first, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="first")])
    assert [outcome.fence for outcome in late.twice] == [first.fence]
    assert Execution.objects.get().process == "another"


def test_an_outcome_of_a_claim_that_a_failover_has_lost_leaves_the_number_of_its_attempt_to_the_next_claim(claim):
    tasks.add.enqueue(1)
    (first,) = claim()
    Job.objects.update(**UNCLAIMED)
    early = Execution.objects.settle([Settlement.of(first, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="first")])
    assert [outcome.fence for outcome in early.twice] == [first.fence]
    assert not Execution.objects.exists()

    (second,) = claim(a_process("another"))
    settled = Execution.objects.settle(
        [Settlement.of(second, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result="second")]
    )

    assert [outcome.fence for outcome in settled.written] == [second.fence]
    assert (Job.objects.get().result, Execution.objects.get().process) == ("second", "another")


def test_a_worker_that_makes_a_lost_claim_again_runs_the_job_under_another_token(worker, monkeypatch):
    begun, go_on, is_away, is_back, tries = [], threading.Event(), threading.Event(), threading.Event(), []
    run, claim = executor.run, Claimer.claim

    def run_and_hold_the_first(call, backend):
        begun.append(call.job.fence)
        assert len(begun) > 1 or go_on.wait(60)
        return run(call, backend)

    def claim_if_the_database_is_there(*args):
        if is_back.is_set():
            tries.append(1)
        # The second failure is sure to come after a look at what the worker owns now.
        if is_away.is_set() and len(tries) < 3:
            raise OperationalError("The connection is lost.")
        return claim(*args)

    monkeypatch.setattr(executor, "run", run_and_hold_the_first)
    monkeypatch.setattr(Claimer, "claim", claim_if_the_database_is_there)
    tasks.nothing.enqueue()
    worker()
    until(lambda: begun)
    is_away.set()
    Job.objects.update(**UNCLAIMED)
    is_back.set()

    until(lambda: len(begun) > 1)
    go_on.set()
    until(lambda: Job.objects.get().state == "successful")

    assert begun[0] != begun[1]
    assert Job.objects.get().attempt == 2
