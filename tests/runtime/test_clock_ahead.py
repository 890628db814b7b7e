"""The database's clock was ahead for a while, and was set back, as by a failover to a host and back."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db.models import F

from django_dbqueue import Rate, task
from django_dbqueue.models import Job, RecurringTask, Semaphore
from django_dbqueue.models.expressions import Now, after
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus

from .. import direct
from ..tasks import add

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def dispatcher(backend):
    """One that runs, and has seen the database's time."""
    dispatcher = Dispatcher(backend, backend.config, SharedStatus.private())
    dispatcher._heartbeat._sign_on()
    dispatcher._work()
    return dispatcher


def set_back(dispatcher, by=HOUR):
    """What the dispatcher has seen before was ahead."""
    dispatcher._witness._seen += by


def wait_of(row):
    """Seconds until its next time, by the database's clock."""
    found = RecurringTask.objects.annotate(seen_at=Now()).get(pk=row.pk)
    return (found.next_run_at - found.seen_at).total_seconds()


def recurring(ahead=HOUR, **values):
    row = RecurringTask.objects.create(name="it", task="tests.tasks.nothing", **values)
    now = RecurringTask.objects.annotate(seen_at=Now()).get().seen_at
    RecurringTask.objects.update(next_run_at=row.time_after(now + ahead))
    row.refresh_from_db()
    return row


SCHEDULES = {
    "cron": {"cron": "*/5 * * * *"},
    "every": {"every": 5 * MINUTE},
    "drift": {"every": 5 * MINUTE, "drift": True},
    "starts_at": {
        "every": 5 * MINUTE,
        "starts_at": datetime(2020, 1, 1, 0, 2, tzinfo=timezone.utc),
    },
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
def test_time_that_was_planned_ahead_is_planned_again_once_the_clock_is_set_back(
    dispatcher, schedule
):
    row = recurring(**schedule)
    phase = row.next_run_at.timestamp() % 300
    set_back(dispatcher)

    dispatcher._work()

    assert 0 <= wait_of(row) <= 300
    row.refresh_from_db()
    assert row.drift or row.next_run_at.timestamp() % 300 == phase


def test_dispatcher_that_starts_after_the_clock_was_set_back_plans_again(backend):
    row = recurring(cron="*/5 * * * *")
    dispatcher = Dispatcher(backend, backend.config, SharedStatus.private())
    dispatcher._heartbeat._sign_on()

    dispatcher._work()

    assert wait_of(row) <= 300


@pytest.mark.parametrize(
    "schedule",
    [
        *SCHEDULES.values(),
        {"every": 5 * MINUTE, "starts_at": datetime(2200, 1, 1, tzinfo=timezone.utc)},
        {
            "every": 5 * MINUTE,
            "drift": True,
            "starts_at": datetime(2200, 1, 1, tzinfo=timezone.utc),
        },
    ],
    ids=str,
)
def test_time_that_is_as_late_as_it_can_be_is_left(dispatcher, schedule):
    row = recurring(ahead=timedelta(), **schedule)
    set_back(dispatcher)

    dispatcher._work()

    planned = row.next_run_at
    row.refresh_from_db()
    assert row.next_run_at == planned


def test_last_time_of_a_task_that_was_passed_only_by_the_clock_ahead_comes(dispatcher):
    row = recurring(every=5 * MINUTE)
    RecurringTask.objects.update(ends_at=after(HOUR / 2), is_over=True, next_run_at=None)
    set_back(dispatcher)

    dispatcher._work()
    dispatcher._scheduler._look_at = 0.0
    dispatcher._work()

    assert wait_of(row) <= 300


@pytest.mark.parametrize("columns", [("earliest", "booked"), ("booked",)], ids=str)
def test_rate_whose_times_were_booked_ahead_goes_on_once_the_clock_is_set_back(
    dispatcher, claim, columns
):
    frequent = task(rate=Rate(1, per=1, group="frequent"))(add.func)
    frequent.enqueue(0)
    assert len(claim()) == 1
    Semaphore.objects.update(**{name: F(name) + HOUR for name in columns})
    frequent.enqueue(1)
    assert claim() == []
    set_back(dispatcher)

    dispatcher._work()
    direct.reserve_times()

    (waiting,) = Job.objects.exclude(state="running").annotate(db_now=Now())
    assert waiting.state == "scheduled"
    assert (waiting.run_after - waiting.db_now).total_seconds() <= 6


def test_rate_whose_times_are_as_late_as_they_can_be_is_left(dispatcher, claim):
    slow = task(rate=Rate(3, per=3600, burst=3, group="slow"))(add.func)
    slow.enqueue_many([(number,) for number in range(9)])
    assert len(claim()) == 3
    times = Semaphore.objects.values_list("earliest", "booked")
    before = times.get()
    set_back(dispatcher)

    dispatcher._work()

    assert times.get() == before
