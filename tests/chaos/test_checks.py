"""Each check of chaos can fail: what it is to find is staged here."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from django.db import connection

from django_dbqueue.models import Batch, Execution, Job, Process
from django_dbqueue.models.expressions import Now, after

from ..conftest import a_process
from ..models import Interval
from ..reliability.conftest import held_open
from . import tasks
from .load import Load
from .operators import Operators
from .promises import _debounced, _stopped
from .report import report
from .servers import deadlocks_in
from .watch import Watch

pytestmark = pytest.mark.django_db
# In seconds.
DEAD_AFTER, SAMPLE = 6, 2
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def worker():
    return a_process("worker@a:1:b", kind=Process.Kind.WORKER, heartbeat_at=after(60))


@pytest.fixture
def dispatcher():
    return a_process("dispatcher@a:1:b", kind=Process.Kind.DISPATCHER, heartbeat_at=after(60))


@pytest.fixture
def stands(monkeypatch):
    """The kinds that the watch reports after so many seconds, with a sample each ``SAMPLE`` seconds."""
    monkeypatch.setattr("tests.chaos.watch.SAMPLE", SAMPLE)

    def stands(seconds, refused_at=None):
        watch = Watch(DEAD_AFTER)
        for time in range(0, seconds + 1, SAMPLE):
            watch.act()
            if time == refused_at:
                watch.refused()
        return [what.partition(":")[0] for what in watch.idle]

    return stands


def a_ready_job():
    tasks.effect.enqueue(0)


def a_blocked_job():
    tasks.effect_within_a_limit.enqueue("a", 0)
    job = Job.objects.get()
    Job.objects.update(state="blocked", blocked_by=job.limits[0]["key"])


def a_due_job():
    tasks.effect.enqueue(0)
    Job.objects.update(state="scheduled")


def a_batch_whose_jobs_have_ended():
    Batch.objects.bulk_create([Batch(sealed_at=Now())])


def a_running_job(process):
    tasks.effect_within_a_limit.enqueue("a", 0)
    Job.objects.update(state="running", process=process, attempt=1, started_at=Now())
    return Job.objects.get()


STAGED = {
    "ready": a_ready_job,
    "due": a_due_job,
    "slot free": a_blocked_job,
    "batch": a_batch_whose_jobs_have_ended,
}


@pytest.mark.parametrize("kind", STAGED)
def test_what_a_live_process_leaves_undone_is_found(worker, dispatcher, stands, kind):
    STAGED[kind]()

    assert stands(4) == []
    assert stands(8) == [kind]


@pytest.mark.parametrize("kind", STAGED)
def test_without_a_live_process_no_time_counts(worker, dispatcher, stands, kind):
    STAGED[kind]()
    Process.objects.update(heartbeat_at=after(-DEAD_AFTER / 3))

    assert stands(20) == []


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one lock")
@pytest.mark.django_db(transaction=True)
def test_while_another_transaction_holds_a_row_no_time_counts(worker, dispatcher, stands):
    a_due_job()

    with held_open(lambda: Job.objects.select_for_update().get()):
        assert stands(20) == []
    assert stands(20) == ["due"]


def test_an_outcome_that_a_live_process_does_not_write_is_found(worker, stands):
    job = a_running_job(worker)
    assert stands(20) == []
    Interval.objects.create(key="a/2", job=str(job.pk), attempt=1, ended_at=Now())

    assert stands(4) == []
    assert stands(8) == ["ended, not written"]


def test_a_job_of_a_dead_process_that_is_not_recovered_is_found(worker, dispatcher, stands):
    """After an outage, all processes have their time anew."""
    a_running_job(worker)
    Process.objects.filter(pk=worker.pk).update(heartbeat_at=after(-DEAD_AFTER))

    assert stands(16) == []
    assert stands(18) == ["left by a dead process"]
    assert stands(30, refused_at=16) == []


def test_an_attempt_after_the_one_that_was_stopped_is_found():
    attempts = [
        Execution(job_id="a", attempt=1),
        Execution(job_id="b", attempt=2),
        Execution(job_id="c", attempt=2),
    ]

    assert [each[:1] for each in _stopped({"a": 1, "b": 1}, attempts)] == ["b"]


def test_a_debounced_call_that_starts_early_is_found():
    """Not one that began before the call, or when its time had come."""
    load = SimpleNamespace(put_off={"a": [(NOW, NOW + timedelta(seconds=3))]})
    times = {
        number: NOW + timedelta(seconds=seconds) for number, seconds in enumerate((-1, 1, 3), 1)
    }
    attempts = [
        Execution(job_id="a", attempt=number, claimed_at=time) for number, time in times.items()
    ]

    (found,) = _debounced(load, attempts)

    assert found.startswith("a: attempt 2 began")


def test_a_deadlock_in_the_log_is_found(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "LOG:  ready\nERROR:  deadlock detected\nDETAIL:  Process 1 waits\n"
        "InnoDB: Transactions deadlock detected, dumping detailed information.\n"
    )

    deadlocks = deadlocks_in(log)

    assert len(deadlocks) == 2
    assert report(Load(1), Operators(), Watch(DEAD_AFTER), {}, []).is_clean
    assert not report(Load(1), Operators(), Watch(DEAD_AFTER), {}, deadlocks).is_clean
