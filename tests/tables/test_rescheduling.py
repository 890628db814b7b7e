"""Operators change the time of jobs: retry(), run_now() and reschedule()."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from django_dbqueue.compat import InvalidTask
from django_dbqueue.models import Job
from django_dbqueue.models.expressions import now_plus

from .. import tasks

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
STATES = ["scheduled", "blocked", "ready", "running", "successful", "failed", "discarded"]


@pytest.fixture
def woken(monkeypatch):
    """Record the queues whose workers are woken."""
    found = []
    monkeypatch.setattr("django_dbqueue.models.job.notify_queues", lambda _db, q: found.extend(q))
    return found


@pytest.fixture
def one_of_each_state(process):
    for state in STATES:
        Job.objects.create(
            task=state,
            state=state,
            run_after=now_plus(3600),
            blocked_by="key" if state == "blocked" else None,
            process=process if state == "running" else None,
            finished_at=timezone.now() if state in STATES[4:] else None,
        )


def test_run_now_makes_scheduled_jobs_ready_and_wakes_their_workers(woken):
    tasks.add.using(run_after=HOUR, queue_name="mail").enqueue(1)
    tasks.add.using(run_after=HOUR).enqueue(2)

    assert Job.objects.run_now() == 2

    assert set(Job.objects.values_list("state", flat=True)) == {"ready"}
    assert not Job.objects.filter(run_after__gt=now_plus(0)).exists()
    assert sorted(woken) == ["default", "mail"]


def test_time_that_no_database_stores_is_refused():
    early = datetime(1000, 1, 1, tzinfo=timezone.get_fixed_timezone(60))
    with pytest.raises(ValueError, match=r"is not later than the year 1000\. Give a later time"):
        Job.objects.reschedule(early)
    with pytest.raises(InvalidTask, match=r"run_after: .* is not later than the year 1000"):
        tasks.add.using(run_after=early).enqueue(1)
    assert tasks.add.using(run_after=early.replace(year=1900)).enqueue(1)


def test_run_now_leaves_jobs_in_other_states_unchanged(one_of_each_state):
    before = list(Job.objects.exclude(task="scheduled").order_by("pk").values())

    assert Job.objects.run_now() == 1

    assert list(Job.objects.exclude(task="scheduled").order_by("pk").values()) == before
    assert Job.objects.get(task="scheduled").state == "ready"


def test_retry_keeps_times_to_come(woken):
    tasks.add.using(run_after=HOUR, expires=2 * HOUR).enqueue(1)
    tasks.add.using(expires=HOUR).enqueue(2)
    ahead, due = Job.objects.order_by("pk")
    Job.objects.discard()

    assert Job.objects.retry() == 2

    kept = Job.objects.get(pk=ahead.pk)
    assert kept.state == "scheduled" and kept.finished_at is None
    assert (kept.run_after, kept.expires_at) == (ahead.run_after, ahead.expires_at)
    retried = Job.objects.get(pk=due.pk)
    assert (retried.state, retried.expires_at) == ("ready", None)
    assert retried.run_after > due.run_after


def test_run_now_of_a_filter_changes_only_its_jobs():
    for number in (1, 2):
        tasks.add.using(run_after=HOUR, queue_name=f"q{number}").enqueue(number)

    assert Job.objects.filter(queue="q1").run_now() == 1

    assert list(Job.objects.order_by("queue").values_list("state", flat=True)) == [
        "ready",
        "scheduled",
    ]


@pytest.mark.parametrize("when", [HOUR, 3600, 3600.0, "time"])
def test_reschedule_schedules_waiting_jobs_only(one_of_each_state, when):
    before = list(Job.objects.exclude(task__in=STATES[:3]).order_by("pk").values())
    time = timezone.now() + HOUR

    assert Job.objects.reschedule(time if when == "time" else when) == 3

    changed = Job.objects.filter(task__in=STATES[:3])
    assert {(job.state, job.blocked_by) for job in changed} == {("scheduled", None)}
    assert all(abs(job.run_after - time) < timedelta(minutes=1) for job in changed)
    assert list(Job.objects.exclude(task__in=STATES[:3]).order_by("pk").values()) == before


def test_reschedule_leaves_jobs_that_would_expire_before_unchanged():
    tasks.add.using(expires=timedelta(minutes=30)).enqueue(1)
    tasks.add.using(expires=timedelta(hours=2)).enqueue(2)

    assert Job.objects.reschedule(HOUR) == 1

    assert Job.objects.scheduled().get().args == [2]


@pytest.mark.parametrize(
    ("when", "error", "message"),
    [
        ("tomorrow", TypeError, "reschedule(): 'tomorrow' is not a delay"),
        (None, TypeError, "reschedule(): None is not a delay"),
        (True, TypeError, "reschedule(): True is not a delay"),
        (-1, ValueError, "reschedule(): -1 is not a delay from 0"),
        (timedelta(days=-1), ValueError, "is not a delay from 0"),
        (float("nan"), ValueError, "reschedule(): nan is not a delay"),
        (timedelta(days=40_000), ValueError, "36,500 days"),
        (datetime(2030, 1, 1), ValueError, "is not an aware datetime"),
    ],
)
def test_invalid_time_is_refused_and_nothing_changes(when, error, message):
    tasks.add.enqueue(1)

    with pytest.raises(error) as raised:
        Job.objects.reschedule(when)

    assert message in str(raised.value)
    assert Job.objects.get().state == "ready"
