"""Locked rows are skipped, or awaited by a transaction without other row locks."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from django_dbqueue.models import Job
from django_dbqueue.models.locking import lock_first

from .. import tasks
from ..conftest import until_a_lock_is_awaited
from ..reliability.conftest import Elsewhere, held_open

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks the whole database."),
]


def locked(*jobs):
    return held_open(
        lambda: list(Job.objects.filter(pk__in=[job.pk for job in jobs]).select_for_update())
    )


def test_claim_skips_any_number_of_locked_jobs(claim):
    tasks.nothing.enqueue_many([()] * 250)
    jobs = list(Job.objects.order_by("run_after", "id"))

    with locked(*jobs[:240]):
        assert [job.pk for job in claim(limit=5)] == [job.pk for job in jobs[240:245]]


def test_two_claims_of_one_lane_skip_each_other_in_one_statement(claim):
    tasks.nothing.enqueue_many([()] * 40)
    jobs = list(Job.objects.order_by("run_after", "id"))

    with held_open(lambda: claim(limit=10)), CaptureQueriesContext(connection) as statements:
        second = claim(limit=10)

    assert [job.pk for job in second] == [job.pk for job in jobs[10:20]]
    assert len([each for each in statements if "SKIP LOCKED" in each["sql"]]) == 1


def test_claim_locks_no_more_jobs_than_it_takes(claim):
    tasks.nothing.enqueue_many([()] * 40)
    first = Job.objects.order_by("run_after", "id").first()

    with locked(first), held_open(lambda: claim(limit=10)), transaction.atomic():
        free = Job.objects.select_for_update(skip_locked=True)
        assert len(free) == 40 - 1 - 10


def test_claim_skips_jobs_of_concurrent_claim(claim):
    tasks.nothing.enqueue_many([()] * 4)
    others = list(Job.objects.order_by("run_after", "id"))[2:]

    with held_open(lambda: claim(limit=2)), transaction.atomic():
        found = lock_first(Job.objects.ready().order_by("run_after", "id"), 3)

    assert [job.pk for job in found] == [job.pk for job in others]


@pytest.mark.parametrize(
    ("rows", "limit"),
    [(lambda: Job.objects.ready(), 0), (lambda: Job.objects.filter(pk__in=[]), 5)],
    ids=["limit 0", "no rows"],
)
def test_nothing_is_locked_if_nothing_is_wanted(rows, limit):
    tasks.nothing.enqueue()

    with transaction.atomic():
        assert lock_first(rows().order_by("run_after", "id"), limit) == []


def test_discard_waiting_for_row_holds_no_other_lock():
    tasks.nothing.enqueue_many([()] * 3)
    first, second, third = Job.objects.order_by("pk")

    with locked(second):
        discarding = Elsewhere(Job.objects.all().discard)
        until_a_lock_is_awaited()
        with transaction.atomic():
            free = Job.objects.select_for_update(nowait=True).filter(pk__in=[first.pk, third.pk])
            assert {job.state for job in free} == {"discarded"}

    assert discarding.result() == 3


def test_retry_ends_although_retried_jobs_fail_at_once(monkeypatch):
    tasks.nothing.enqueue_many([()] * 5)
    Job.objects.update(state="failed", finished_at=F("enqueued_at"))
    monkeypatch.setattr("django_dbqueue.models.primary.PART", 2)

    def fail_again(execute, sql, params, many, context):
        done = execute(sql, params, many, context)
        if sql.startswith("UPDATE") and "ready" in (params or ()):
            context["cursor"].execute(
                "UPDATE dbqueue_job SET state = 'failed', finished_at = enqueued_at WHERE state = 'ready'"
            )
        return done

    with connection.execute_wrapper(fail_again):
        assert Job.objects.all().retry() == 5
