"""An operator quiets, resumes and stops processes, as by the admin's page of processes."""

from __future__ import annotations

import json
import re
import time

import pytest

from django_dbqueue.models import Execution, Job, Process
from django_dbqueue.models.enums import State

from .. import tasks
from ..conftest import a_process, log_of, until

pytestmark = pytest.mark.django_db(transaction=True)
OFTEN = {"DBQUEUE_OPTIONS": json.dumps({"beat_interval": 0.2, "dead_after": 3})}
Kind = Process.Kind


def live(kind):
    return Process.objects.alive().filter(kind=kind)


def states():
    return sorted(Job.objects.values_list("state", flat=True))


def within(seconds, condition):
    """Return whether a condition holds after this time."""
    time.sleep(seconds)
    return condition()


def quiet(child, kind):
    """Quiet the process of this kind, and wait until its workers have obeyed."""
    assert live(kind).quiet() == 1
    for each in {kind, Kind.WORKER}:
        until(
            lambda each=each: re.search(rf" {each}@\S+ was asked .* claim no more", log_of(child))
        )
    # The claim that was under way then may still find jobs.
    until(lambda: nothing_runs() and within(0.2, nothing_runs))


def nothing_runs():
    return State.RUNNING not in states()


@pytest.mark.parametrize("kind", [Kind.WORKER, Kind.SUPERVISOR])
def test_quiet_process_finishes_its_jobs_and_claims_no_others(runqueue, kind):
    child = runqueue("--threads", "2", **OFTEN)
    until(live(Kind.WORKER).exists)
    tasks.sleep.enqueue_many([(0.1,)] * 80)
    until(lambda: states().count(State.RUNNING) > 2)

    quiet(child, kind)

    # What had not started was released, and no attempt of it was spent.
    assert 0 < states().count(State.SUCCESSFUL) < 80
    assert {*states()} == {State.READY, State.SUCCESSFUL}
    before = Execution.objects.count()
    assert Execution.objects.exclude(outcome="successful").count() == 0
    tasks.nothing.enqueue()
    assert not within(1.5, lambda: Execution.objects.count() > before)

    assert live(kind).resume() == 1
    until(lambda: states() == [State.SUCCESSFUL] * 81)


def test_worker_that_replaces_one_of_a_quiet_supervisor_is_quiet(runqueue):
    child = runqueue(**OFTEN)
    until(live(Kind.WORKER).exists)
    quiet(child, Kind.SUPERVISOR)
    first = live(Kind.WORKER).get()
    assert first.is_quiet

    assert live(Kind.WORKER).stop() == 1

    second = until(lambda: live(Kind.WORKER).exclude(pk=first.pk).first())
    assert second.is_quiet
    tasks.nothing.enqueue()
    assert not within(1.5, Execution.objects.exists)
    live(Kind.SUPERVISOR).resume()
    until(lambda: states() == [State.SUCCESSFUL])


def test_stopped_worker_finishes_its_job_and_is_replaced(runqueue):
    runqueue("--threads", "1", **OFTEN)
    first = until(live(Kind.WORKER).first)
    tasks.sleep.enqueue(2.0)
    until(lambda: states() == [State.RUNNING])

    assert Process.objects.filter(pk=first.pk).stop() == 1
    tasks.nothing.enqueue()

    until(lambda: states() == [State.SUCCESSFUL] * 2)
    assert list(Execution.objects.values_list("outcome", flat=True)) == ["successful"] * 2
    until(lambda: not Process.objects.filter(pk=first.pk).exists())
    assert live(Kind.WORKER).get().request == ""


@pytest.mark.parametrize("how", [[], ["--reload"]])
def test_stopped_supervisor_ends_with_its_processes(runqueue, how):
    child = runqueue(*how, **OFTEN)
    until(lambda: live(Kind.WORKER).exists() and live(Kind.DISPATCHER).exists())

    assert live(Kind.SUPERVISOR).stop() == 1

    assert child.wait(30) == 0
    assert not Process.objects.exists()
    assert "was asked by an operator to stop" in log_of(child)


def test_process_reports_its_memory(runqueue):
    runqueue(**OFTEN)

    until(live(Kind.WORKER).filter(memory__gt=10_000_000).exists)


def test_dispatchers_dead_and_stopping_processes_are_not_controlled(db):
    a_process("dispatcher", kind=Kind.DISPATCHER)
    worker = a_process("worker", kind=Kind.WORKER)
    own = Process.objects.filter(pk=worker.pk)

    assert Process.objects.stop() == 1
    assert (own.quiet(), own.resume(), own.stop()) == (0, 0, 0)
    assert own.get().request == "stop"
    own.update(request="", expires_at=worker.started_at)
    assert own.quiet() == 0


def test_quiet_supervisor_that_was_declared_dead_stays_quiet(runqueue):
    child = runqueue(**OFTEN)
    until(live(Kind.WORKER).exists)
    quiet(child, Kind.SUPERVISOR)

    # As a dispatcher of another host does: then the supervisor registers again.
    Process.objects.filter(kind=Kind.SUPERVISOR).delete()

    until(live(Kind.SUPERVISOR).filter(request="quiet").exists)


@pytest.mark.parametrize(("then", "outcome"), [("discard", "discarded"), ("retry", "stopped")])
def test_job_of_a_stopped_worker_can_still_be_stopped(runqueue, then, outcome):
    runqueue("--threads", "1", **OFTEN)
    first = until(live(Kind.WORKER).first)
    tasks.loop.enqueue()
    until(lambda: states() == [State.RUNNING])
    Process.objects.filter(pk=first.pk).stop()
    until(lambda: live(Kind.WORKER).exclude(pk=first.pk).exists())

    assert Job.objects.stop(then=then) == 1

    ended = Execution.objects.filter(process=first.name)
    until(ended.exists, 20)
    assert ended.get().outcome == outcome
