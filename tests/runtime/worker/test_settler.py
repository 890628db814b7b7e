"""Outcomes whose rows another transaction has locked do not delay other outcomes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from django.db import OperationalError, connections

from django_dbqueue.compat import task_backends
from django_dbqueue.core.options import Options
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job, Process
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.worker import settler as settler_module
from django_dbqueue.runtime.worker.settler import Settler
from django_dbqueue.runtime.worker.worker import Worker

from ... import tasks
from ...conftest import LONG, until
from ...reliability.conftest import Elsewhere, held_open

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        connections["default"].vendor == "sqlite", reason="SQLite locks the whole database."
    ),
]


def locked(jobs):
    """Lock the rows of these jobs in another transaction, inside the block."""
    return held_open(
        lambda: list(Job.objects.filter(pk__in=[job.pk for job in jobs]).select_for_update())
    )


def success(job):
    return AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)


def settled():
    return Job.objects.filter(state="successful").count()


@pytest.fixture
def settler():
    settler = Settler("default", Options())
    settler.start()
    yield settler
    settler.close()
    settler.join(LONG)
    assert not settler.alive
    connections.close_all()


def test_locked_rows_do_not_delay_other_outcomes(claim, settler):
    tasks.nothing.enqueue_many([()] * 520)
    jobs = claim(limit=520)
    first, others = jobs[:500], jobs[500:]

    with locked(first):
        for job in jobs:
            settler.put(success(job))
        until(lambda: settled() == len(others))
        until(lambda: len(settler.unwritten_results()) == 500)

    until(lambda: settled() == 520)


def test_outcome_survives_repeated_serialization_failures(claim, settler, monkeypatch):
    tasks.add.enqueue(1)
    (job,) = claim()
    settle, refusals = settler_module.settle, iter(range(5))

    class Conflict(Exception):
        sqlstate = "40001"

    def settle_at_last(executions, outcomes, *args):
        # A rehearsal is not committed, so it meets no conflict.
        if not connections["default"].in_atomic_block and next(refusals, None) is not None:
            raise OperationalError from Conflict()
        return settle(executions, outcomes, *args)

    monkeypatch.setattr(settler_module, "settle", settle_at_last)
    settler.put(replace(success(job), result=1))

    until(lambda: not Job.objects.running().exists())
    assert (Job.objects.get().state, Job.objects.get().result, Execution.objects.get().outcome) == (
        "successful",
        1,
        "successful",
    )


def test_closed_settler_writes_locked_outcomes(claim):
    tasks.nothing.enqueue()
    (job,) = claim()
    settler = Settler("default", Options())
    settler.start()

    with locked([job]):
        settler.put(success(job))
        until(lambda: settler.unwritten_results())
        settler.close()
        settler.join(0.3)
        assert settler.alive and settled() == 0

    settler.join(LONG)
    assert (settler.alive, settled()) == (False, 1)
    connections.close_all()


def test_locked_row_does_not_block_release_of_others(claim, backend):
    tasks.nothing.enqueue_many([()] * 3)
    jobs = claim()
    worker = Worker(backend, backend.config, SharedStatus.private(10))
    worker._heartbeat.process = jobs[0].process

    with locked(jobs[:1]):
        releasing = Elsewhere(lambda: worker._release(jobs))
        until(lambda: Job.objects.ready().count() == 2)
        releasing.result()
        assert worker._in_doubt

    worker._release_unknown()
    assert (Job.objects.ready().count(), worker._in_doubt) == (3, False)
    worker._listener.close()


def recovered_elsewhere(process, not_started):
    """Recover a dead process elsewhere; the jobs ``not_started`` had not started when it died."""
    death = recovery.ExitReason(how="died", not_started=frozenset(job.pk for job in not_started))
    dead = Process.objects.filter(pk=process.pk)
    return Elsewhere(lambda: recovery.recover(task_backends["default"], dead, death, list))


def test_locked_row_does_not_block_recovery_of_others(claim, process):
    tasks.nothing.enqueue_many([()] * 3)
    jobs = claim()

    with locked(jobs[:1]):
        recovering = recovered_elsewhere(process, jobs)
        until(lambda: Job.objects.ready().count() == 2)
        recovering.result()

    assert (
        recovery.recover(
            task_backends["default"], Process.objects.none(), recovery.ExitReason(how="died"), list
        )
        == 1
    )


def test_briefly_locked_job_of_dead_process_spends_no_attempt(claim, process):
    tasks.nothing.enqueue_many([()] * 3)
    jobs = claim()

    with locked(jobs[:1]):
        recovering = recovered_elsewhere(process, jobs)
        until(lambda: Job.objects.ready().count() == 2)

    assert recovering.result() == 3
    assert Job.objects.ready().count() == 3
    assert not Execution.objects.exists()


def test_locked_orphans_do_not_block_recovery_of_others(claim, process, monkeypatch):
    monkeypatch.setattr(recovery, "BATCH", 5)
    tasks.nothing.enqueue_many([()] * 8)
    jobs = claim()
    process.delete()

    with locked(jobs[:6]):
        assert (
            recovery.recover(
                task_backends["default"],
                Process.objects.none(),
                recovery.ExitReason(how="died"),
                list,
            )
            == 2
        )

    assert (
        recovery.recover(
            task_backends["default"], Process.objects.none(), recovery.ExitReason(how="died"), list
        )
        == 5
    )


def test_locked_due_job_does_not_keep_dispatcher_busy(process):
    tasks.nothing.enqueue()
    Job.objects.update(state="scheduled")
    dispatcher = Dispatcher(task_backends["default"], Options(), SharedStatus.private())

    with locked(Job.objects.all()):
        pauses = [dispatcher._work() for _ in range(10)]
        assert sum(pauses) > 4.0, pauses
        tasks.nothing.using(run_after=Job.objects.get().enqueued_at).enqueue()
        assert dispatcher._work() == 0.0
        assert Job.objects.filter(state="ready").count() == 1

    assert dispatcher._work() == 0.0
    assert Job.objects.filter(state="ready").count() == 2
