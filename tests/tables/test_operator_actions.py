"""Operators' actions on jobs and failures that are found by any query."""

from __future__ import annotations

import pytest
from django.db import connection
from django.db.models import Count, Q, Window
from django.db.models.functions import RowNumber
from django.utils import timezone

from django_dbqueue import batch
from django_dbqueue.models import Failure, Job
from django_dbqueue.models.enums import FINISHED, State

from ..reliability.conftest import Elsewhere, held_open
from .test_locking import until_a_lock_is_awaited

pytestmark = pytest.mark.django_db(transaction=True)
# Each of them finds the jobs "scheduled", ..., and not those of the batch.
QUERIES = {
    "one table": lambda: Job.objects.filter(batch=None),
    "outer join": lambda: Job.objects.filter(Q(batch__description="") | Q(batch=None)),
    "excluded join": lambda: Job.objects.exclude(batch__description="a"),
    "missing rows": lambda: Job.objects.filter(batch__description__isnull=True),
    "missing rows of a reverse join": lambda: Job.objects.filter(slots__isnull=True, batch=None),
    "distinct": lambda: Job.objects.filter(batch=None).distinct(),
    "grouped": lambda: Job.objects.annotate(slots_held=Count("slots")).filter(
        slots_held=0, batch=None
    ),
    "several rows of a join": lambda: Job.objects.filter(executions__attempt__gt=0),
    "window": lambda: (
        Job.objects.filter(batch=None)
        .annotate(place=Window(RowNumber(), partition_by="state"))
        .filter(place=1)
    ),
    "subquery": lambda: Job.objects.filter(pk__in=Job.objects.filter(batch=None).values("pk")),
    "related rows": lambda: Job.objects.filter(batch=None).select_related("batch"),
    "order of a join": lambda: Job.objects.filter(batch=None).order_by("batch__description"),
}
VERBS = {
    "retry": lambda jobs: jobs.retry(),
    "run_now": lambda jobs: jobs.run_now(),
    "reschedule": lambda jobs: jobs.reschedule(60),
    "discard": lambda jobs: jobs.discard(),
    "move": lambda jobs: jobs.move("mail"),
    "reprioritise": lambda jobs: jobs.reprioritise(7),
    "stop": lambda jobs: jobs.stop(),
    "stop and retry": lambda jobs: jobs.stop(then="retry"),
}
ELIGIBLE = {
    "retry": ["discarded", "failed"],
    "run_now": ["scheduled"],
    "discard": ["blocked", "failed", "ready", "scheduled"],
    "stop": ["running"],
    "stop and retry": ["running"],
}


def a_job(state, process, **columns):
    return Job.objects.create(
        task=str(state),
        queue="default",
        state=state,
        blocked_by="key" if state == State.BLOCKED else None,
        process=process if state == State.RUNNING else None,
        finished_at=timezone.now() if state in FINISHED else None,
        **columns,
    )


def changed(before):
    """Return the jobs that have other values than before."""
    return sorted(row["task"] for row in Job.objects.values() if row not in before)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("query", QUERIES)
def test_action_changes_the_eligible_jobs_of_any_query(verb, query, process):
    with batch(description="a") as members:
        pass
    for state in State:
        job = a_job(state, process)
        job.executions.create(attempt=1, **_ended())
        job.executions.create(attempt=2, **_ended())
        a_job(state, process, batch_id=members.id)
    before = list(Job.objects.values())

    count = VERBS[verb](QUERIES[query]())

    assert changed(before) == ELIGIBLE.get(verb, ["blocked", "ready", "scheduled"])
    assert count == len(changed(before))


def _ended():
    now = timezone.now()
    return {"outcome": "failed", **dict.fromkeys(("claimed_at", "started_at", "finished_at"), now)}


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one lock")
@pytest.mark.parametrize("query", QUERIES)
def test_action_checks_the_row_that_it_has_locked(query, process):
    job = a_job(State.READY, process)
    job.executions.create(attempt=1, **_ended())

    def claim():
        Job.objects.filter(pk=job.pk).update(state=State.RUNNING, process=process)

    with held_open(claim):
        discarding = Elsewhere(QUERIES[query]().discard)
        until_a_lock_is_awaited()

    assert discarding.result() == 0
    assert Job.objects.get().state == State.RUNNING


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one lock")
@pytest.mark.parametrize("query", QUERIES)
def test_action_checks_the_query_for_the_row_that_it_has_locked(query, process):
    job = a_job(State.READY, process)
    job.executions.create(attempt=1, **_ended())
    mail = QUERIES[query]().filter(queue="default")

    with held_open(lambda: Job.objects.filter(pk=job.pk).update(queue="mail")):
        discarding = Elsewhere(mail.discard)
        until_a_lock_is_awaited()

    assert discarding.result() == 0


@pytest.mark.parametrize(
    "failures",
    [
        lambda: Failure.objects.filter(executions__job__queue="default"),
        lambda: Failure.objects.annotate(jobs=Count("executions")).filter(jobs=2),
        lambda: Failure.objects.filter(message="").distinct(),
    ],
)
def test_failures_of_any_query_are_changed(failures, process):
    failure = Failure.objects.create(fingerprint="a", error_type="a", message="", location="")
    job = a_job(State.FAILED, process)
    for attempt in (1, 2):
        job.executions.create(attempt=attempt, failure=failure, **_ended())

    assert [failures().mute(), failures().reopen(), failures().resolve()] == [1, 1, 1]
