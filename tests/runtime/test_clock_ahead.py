"""A database clock that ran ahead and is set back, as by a failover to another host and back."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db.models import F

from django_dbqueue import Rate, task
from django_dbqueue.models import Job, RecurringTask, Semaphore
from django_dbqueue.models.expressions import Now, now_plus
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus

from .. import direct
from ..tasks import add

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def dispatcher(backend):
    """A registered dispatcher that has read the database's time."""
    dispatcher = Dispatcher(backend, backend.config, SharedStatus.private())
    dispatcher._heartbeat._register()
    dispatcher._work()
    return dispatcher


def set_back(dispatcher, by=HOUR):
    """Set the database's clock back, as seen by the dispatcher."""
    dispatcher._failure_detector._seen += by


def seconds_to_next_run(row):
    """Return the seconds until the row's next run, by the database's clock."""
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
def test_next_run_is_recomputed_after_clock_is_set_back(dispatcher, schedule):
    row = recurring(**schedule)
    phase = row.next_run_at.timestamp() % 300
    set_back(dispatcher)

    dispatcher._work()

    assert 0 <= seconds_to_next_run(row) <= 300
    row.refresh_from_db()
    assert row.drift or row.next_run_at.timestamp() % 300 == phase


def test_dispatcher_started_after_setback_recomputes_next_run(backend):
    row = recurring(cron="*/5 * * * *")
    dispatcher = Dispatcher(backend, backend.config, SharedStatus.private())
    dispatcher._heartbeat._register()

    dispatcher._work()

    assert seconds_to_next_run(row) <= 300


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
def test_plausible_next_run_is_kept_after_setback(dispatcher, schedule):
    row = recurring(ahead=timedelta(), **schedule)
    set_back(dispatcher)

    dispatcher._work()

    planned = row.next_run_at
    row.refresh_from_db()
    assert row.next_run_at == planned


def test_recurring_task_ended_by_clock_ahead_resumes_after_setback(dispatcher):
    row = recurring(every=5 * MINUTE)
    RecurringTask.objects.update(ends_at=now_plus(HOUR / 2), is_over=True, next_run_at=None)
    set_back(dispatcher)

    dispatcher._work()
    dispatcher._scheduler._look_at = 0.0
    dispatcher._work()

    assert seconds_to_next_run(row) <= 300


@pytest.mark.parametrize("columns", [("earliest", "booked"), ("booked",)], ids=str)
def test_rate_limit_recovers_from_times_reserved_ahead(dispatcher, claim, columns):
    frequent = task(rate=Rate(1, per=4, group="frequent"))(add.func)
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
    assert (waiting.run_after - waiting.db_now).total_seconds() <= 9


def test_plausible_reserved_times_are_kept_after_setback(dispatcher, claim):
    slow = task(rate=Rate(3, per=3600, burst=3, group="slow"))(add.func)
    slow.enqueue_many([(number,) for number in range(9)])
    assert len(claim()) == 3
    times = Semaphore.objects.values_list("earliest", "booked")
    before = times.get()
    set_back(dispatcher)

    dispatcher._work()

    assert times.get() == before
