"""Every interleaving of the steps of two workers and all other roles, within bounds.

A step is one call of the engine's own functions. With a crash, a lost answer or a failover between
any two steps, each property holds in each reachable world. If the fix of a known defect is removed,
the explorer finds the defect and prints its story.

SQLite only: a call is atomic on every database. The state machine and the tests of races cover how
calls wait for each other's locks, on every database.
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
# Added to the number of each event of the scenarios: 1 takes minutes, 2 hours.
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
        pytest.skip("Databases differ by their locks, which the model does not have.")
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


# Known defects, reintroduced one at a time.


def silence_is_run_time(monkeypatch):
    """Time after a process's last sign of life counts as run time."""
    monkeypatch.setattr(recovery, "_ran_for", lambda job, death: job.seen_at - job.started_at)


def stop_ends_with_attempt(monkeypatch):
    """A stop is forgotten when the attempt ends by itself."""
    monkeypatch.setattr(AttemptResult, "stopped", lambda self: self)


def release_drops_stop(monkeypatch):
    """A stop is forgotten when the job is released."""
    state = Case(When(run_after__gt=Now(), then=Value(State.SCHEDULED)), default=Value(State.READY))
    monkeypatch.setitem(claiming._RELEASED, "state", state)
    monkeypatch.setitem(claiming._RELEASED, "finished_at", None)


def rerun_ignores_delay(monkeypatch):
    """A rerun does not wait for the time of its call."""

    def restart_run(rows, wait):
        changes = {
            "failures": 0,
            "attempts_before": F("attempt"),
            "rerun_requested": False,
            "stop_requested_at": None,
            "started_at": None,
        }
        rows.update(state=State.READY, process=None, run_after=Now(), **changes)

    monkeypatch.setattr(settling, "restart_run", restart_run)


def release_ignores_delay(monkeypatch):
    """A rerun of a released job does not wait for the time of its call."""
    stopped = When(claiming._WAS_STOPPED, then=Value(State.DISCARDED))
    monkeypatch.setitem(claiming._RELEASED, "state", Case(stopped, default=Value(State.READY)))


def fence_without_process(monkeypatch):
    """The fencing token is (id, attempt)."""
    replace_fence(monkeypatch, lambda row, fence: (*fence[:2], row.process_id))


def no_fence(monkeypatch):
    replace_fence(monkeypatch, lambda row, fence: (fence[0], row.attempt, row.process_id))


def replace_fence(monkeypatch, fence_of):
    settle = direct.settle

    def settle_with_fence(outcomes):
        rows = {row.pk: row for row in Job.objects.running()}
        return settle(
            [replace(o, fence=fence_of(rows.get(o.fence[0], o.job), o.fence)) for o in outcomes]
        )

    monkeypatch.setattr(direct, "settle", settle_with_fence)


def all_processes_are_silent(monkeypatch):
    """Recovery ignores heartbeats."""
    monkeypatch.setattr(ProcessQuerySet, "silent", lambda self: self.all())


def slots_leak(monkeypatch):
    """A slot counts though its attempt does not run."""
    monkeypatch.setattr(SlotQuerySet, "taken", lambda self: self.all())


def slots_are_not_counted(monkeypatch):
    monkeypatch.setattr(limits, "count_slots", lambda database, semaphores: None)


def rerun_is_dropped(monkeypatch):
    """A call during a run is not run after it."""
    settle = settling.settle

    def drop_reruns(database, results, *rest):
        jobs = Job.objects.using(database).filter(pk__in=[each.fence[0] for each in results])
        jobs.update(rerun_requested=False)
        return settle(database, results, *rest)

    monkeypatch.setattr(settling, "settle", drop_reruns)


def stop_outlives_call(monkeypatch):
    """A call after a stop is discarded with the released job."""
    was_stopped = models.Q(stop_requested_at__isnull=False)
    (_stopped, *others) = claiming._RELEASED["state"].cases
    state = Case(
        When(was_stopped, then=Value(State.DISCARDED)), *others, default=Value(State.READY)
    )
    finished_at = Case(
        When(was_stopped, then=Now()), default=None, output_field=models.DateTimeField()
    )
    monkeypatch.setitem(claiming._RELEASED, "state", state)
    monkeypatch.setitem(claiming._RELEASED, "finished_at", finished_at)


def lost_result_takes_next_attempt(monkeypatch):
    """The result of a lost claim is recorded under the number of the next attempt."""
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


def lost_claim_is_repeated(monkeypatch):
    """One process has one fencing token for two claims."""
    monkeypatch.setattr(Worker, "_not_held", lambda self, jobs: (jobs, ()))


MUTANTS = [
    (silence_is_run_time, "deaths", "has timed out after 0 s"),
    (stop_ends_with_attempt, "stops", "runs again, though an operator stopped it"),
    (
        release_drops_stop,
        "stops and keys",
        "runs again, though an operator stopped it",
    ),
    (rerun_ignores_delay, "keys", "s before the time of its call"),
    (release_ignores_delay, "stops and keys", "s before the time of its call"),
    (fence_without_process, "failovers", "was accepted for another claim, #2"),
    (no_fence, "outages", "was accepted for another claim"),
    (all_processes_are_silent, "deaths", "taken from a live worker"),
    (slots_leak, "limits", "job A is blocked"),
    (slots_are_not_counted, "limits", "2 jobs run under a limit of 1"),
    (rerun_is_dropped, "keys", "has ended without a run of its last call"),
    (stop_outlives_call, "stops and keys", "has ended without a run of its last call"),
    (
        lost_claim_is_repeated,
        "failovers",
        "was accepted for another claim, #2",
    ),
    (lost_result_takes_next_attempt, "failovers", "UNIQUE constraint failed"),
]


@pytest.mark.parametrize(
    ("mutant", "name", "why"), MUTANTS, ids=[mutant.__name__ for mutant, *_rest in MUTANTS]
)
def test_reintroduced_defect_is_found(database, monkeypatch, mutant, name, why):
    mutant(monkeypatch)

    assert why in (explored(database, name).story or ["no violation"])[-1]
