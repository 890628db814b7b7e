"""Every interleaving of a few workers, a dispatcher, a supervisor, an operator and a client, within bounds.

A step is one call of the engine's own functions: with a crash, a lost answer or a failover between any two of them, each
property holds in each world that is reached. Without what cures a defect, the explorer finds it, and tells how it comes about.

On SQLite alone. A call is atomic on every database; how they wait for each other's locks in between is the business of the
machine, and of the tests of races, on every database.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import connection, models
from django.db.models import Case, F, Value, When

from django_dbqueue.engine import claim as claiming
from django_dbqueue.engine import limits
from django_dbqueue.engine import settle as settling
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job
from django_dbqueue.models.enums import State
from django_dbqueue.models.expressions import Now
from django_dbqueue.models.process import ProcessQuerySet
from django_dbqueue.models.slot import SlotQuerySet
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.worker.worker import Worker

from .. import direct, tasks
from .database import Database
from .explorer import explore
from .steps import Model, Scenario
from .world import TIMEOUT

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(1200)]
# How much more often each thing may happen than the scenarios say: 1 takes minutes, 2 hours.
DEEPER = int(os.environ.get("DBQUEUE_DEEPER", 0))


def one_job():
    tasks.nothing.enqueue()
    Job.objects.update(timeout=timedelta(seconds=TIMEOUT), max_attempts=2)


def one_job_with_a_key():
    tasks.index_document.using(key="A").enqueue("call 1")


def two_jobs_with_a_limit_of_one():
    for _ in range(2):
        tasks.one_at_a_time.enqueue()


SCENARIOS = {
    "deaths": Scenario(one_job, {"crash": 1, "time": 1, "silence": 1, "not started": 1}),
    "outages": Scenario(one_job, {"crash": 1, "no answer": 1, "failure": 1, "time": 1}),
    "failovers": Scenario(one_job, {"failover": 1, "no answer": 1, "release": 1}),
    "stops": Scenario(one_job, {"stop": 1, "retry": 1, "crash": 1, "failure": 1}),
    "keys": Scenario(one_job_with_a_key, {"call": 2, "time": 1}),
    "stops and keys": Scenario(
        one_job_with_a_key, {"call": 1, "stop": 1, "interrupted": 1, "release": 1}
    ),
    "limits": Scenario(two_jobs_with_a_limit_of_one, {"crash": 1, "release": 1, "no answer": 1}),
}


@pytest.fixture
def database(monkeypatch):
    if connection.vendor != "sqlite":
        pytest.skip("What differs by database is locking, which the model does not have.")
    monkeypatch.setattr(recovery.random, "uniform", min)
    logger = logging.getLogger("django_dbqueue")
    monkeypatch.setattr(logger, "disabled", True)
    with Database().in_memory() as database:
        yield database


def explored(database, name, deeper=0):
    scenario = SCENARIOS[name]
    may = {what: number + deeper for what, number in scenario.may.items()}
    found = explore(Model(database, replace(scenario, may=may)))
    print(f"{name}: {found}")
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_interleaving_breaks_a_property(database, name):
    found = explored(database, name, DEEPER)

    assert not found.story
    assert found.worlds > 100


# What is cured, put back one at a time.


def judged_by_now(monkeypatch):
    """Item 1: time after the last sign of life of a process is taken for running time."""
    monkeypatch.setattr(recovery, "_ran_for", lambda job, death: job.seen_at - job.started_at)


def a_stop_of_the_attempt(monkeypatch):
    """Item 5: a stop is forgotten once the attempt has ended by itself."""
    monkeypatch.setattr(AttemptResult, "stopped", lambda self: self)


def a_stop_that_a_release_forgets(monkeypatch):
    """Item 5, for a job that is given back."""
    state = Case(When(run_after__gt=Now(), then=Value(State.SCHEDULED)), default=Value(State.READY))
    monkeypatch.setitem(claiming._RELEASED, "state", state)
    monkeypatch.setitem(claiming._RELEASED, "finished_at", None)


def again_at_once(monkeypatch):
    """Item 7: what was asked for again while it ran does not wait for the time of that call."""

    def restart_run(rows, wait):
        anew = {
            "failures": 0,
            "attempts_before": F("attempt"),
            "asked_again": False,
            "stop_asked_at": None,
            "started_at": None,
        }
        rows.update(state=State.READY, process=None, run_after=Now(), **anew)

    monkeypatch.setattr(settling, "restart_run", restart_run)


def released_at_once(monkeypatch):
    """Item 7, for a job that is given back."""
    stopped = When(claiming._WAS_STOPPED, then=Value(State.DISCARDED))
    monkeypatch.setitem(claiming._RELEASED, "state", Case(stopped, default=Value(State.READY)))


def a_fence_without_process(monkeypatch):
    """Item 16: (id, attempt) is the fence."""
    put_another_fence(monkeypatch, lambda row, fence: (*fence[:2], row.process_id))


def no_fence(monkeypatch):
    put_another_fence(monkeypatch, lambda row, fence: (fence[0], row.attempt, row.process_id))


def put_another_fence(monkeypatch, fence_of):
    settle = direct.settle

    def settle_otherwise(outcomes):
        rows = {row.pk: row for row in Job.objects.running()}
        return settle(
            [replace(o, fence=fence_of(rows.get(o.fence[0], o.job), o.fence)) for o in outcomes]
        )

    monkeypatch.setattr(direct, "settle", settle_otherwise)


def all_are_silent(monkeypatch):
    """Recovery does not look at heartbeats."""
    monkeypatch.setattr(ProcessQuerySet, "silent", lambda self: self.all())


def slots_that_leak(monkeypatch):
    """A slot counts whether its attempt runs or not."""
    monkeypatch.setattr(SlotQuerySet, "taken", lambda self: self.all())


def slots_that_do_not_count(monkeypatch):
    monkeypatch.setattr(limits, "_count_slots", lambda database, semaphores: None)


def a_call_that_is_forgotten(monkeypatch):
    """What was asked for while the job ran does not run after it."""
    move_jobs = settling._move_jobs

    def forget(jobs, outcomes, again):
        jobs.filter(pk__in=again).update(asked_again=False)
        move_jobs(jobs, outcomes, set())

    monkeypatch.setattr(settling, "_move_jobs", forget)


def a_stop_that_outlives_a_call(monkeypatch):
    """A call after a stop is discarded with the job that is given back."""
    was_stopped = models.Q(stop_asked_at__isnull=False)
    (_stopped, *others) = claiming._RELEASED["state"].cases
    state = Case(
        When(was_stopped, then=Value(State.DISCARDED)), *others, default=Value(State.READY)
    )
    finished_at = Case(
        When(was_stopped, then=Now()), default=None, output_field=models.DateTimeField()
    )
    monkeypatch.setitem(claiming._RELEASED, "state", state)
    monkeypatch.setitem(claiming._RELEASED, "finished_at", finished_at)


def a_dropped_outcome_in_the_place_of_the_next(monkeypatch):
    """The outcome of a claim that a failover has lost is recorded, and the attempt is yet to be made."""
    settle = direct.settle

    def record_all(outcomes):
        settled = settle(outcomes)
        for lost in settled.lost:
            rows = Execution.objects.filter(job=lost.fence[0], attempt=lost.fence[1])
            if (
                not rows.exists()
                and not Job.objects.running()
                .filter(pk=lost.fence[0], attempt=lost.fence[1])
                .exists()
            ):
                times = {
                    "claimed_at": lost.started_at,
                    "started_at": lost.started_at,
                    "finished_at": lost.finished_at,
                }
                Execution.objects.create(
                    job=lost.job,
                    attempt=lost.fence[1],
                    outcome="lost",
                    process=lost.process,
                    **times,
                )
        return settled

    monkeypatch.setattr(direct, "settle", record_all)


def a_lost_claim_that_its_worker_makes_again(monkeypatch):
    """One process has one fencing token twice."""
    monkeypatch.setattr(Worker, "_not_held", lambda self, jobs: jobs)


MUTANTS = [
    (judged_by_now, "deaths", "has timed out after 0 s"),
    (a_stop_of_the_attempt, "stops", "runs again, though an operator has stopped it"),
    (
        a_stop_that_a_release_forgets,
        "stops and keys",
        "runs again, though an operator has stopped it",
    ),
    (again_at_once, "keys", "s before the time that was asked for"),
    (released_at_once, "stops and keys", "s before the time that was asked for"),
    (a_fence_without_process, "failovers", "was accepted for claim #2, which another has made"),
    (no_fence, "outages", "which another has made"),
    (all_are_silent, "deaths", "taken from a worker that is alive"),
    (slots_that_leak, "limits", "job A is blocked"),
    (slots_that_do_not_count, "limits", "2 jobs run under a limit of 1"),
    (a_call_that_is_forgotten, "keys", "has not run as it was asked for last"),
    (a_stop_that_outlives_a_call, "stops and keys", "has not run as it was asked for last"),
    (
        a_lost_claim_that_its_worker_makes_again,
        "failovers",
        "was accepted for claim #2, which another has made",
    ),
    (a_dropped_outcome_in_the_place_of_the_next, "failovers", "UNIQUE constraint failed"),
]


@pytest.mark.parametrize(
    ("mutant", "name", "why"), MUTANTS, ids=[mutant.__name__ for mutant, *_rest in MUTANTS]
)
def test_a_defect_that_is_put_back_is_found(database, monkeypatch, mutant, name, why):
    mutant(monkeypatch)

    assert why in (explored(database, name).story or ["nothing is found"])[-1]
