"""Each check of chaos reports a staged violation."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from django.db import connection

from django_dbqueue.models import Batch, Execution, Job, Process, StatisticDelta
from django_dbqueue.models.expressions import Now, now_plus

from ..conftest import a_process
from ..models import Interval, Mark
from ..reliability.conftest import held_open
from . import tasks
from .load import Load
from .operators import Operators
from .promises import _counts, _debounced, _expiring, _members, _stopped
from .report import report
from .servers import deadlocks_in
from .watch import Watch

pytestmark = pytest.mark.django_db
# In seconds.
DEAD_AFTER, SAMPLE = 6, 2
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def worker():
    return a_process("worker@a:1:b", kind=Process.Kind.WORKER, heartbeat_at=now_plus(60))


@pytest.fixture
def dispatcher():
    return a_process("dispatcher@a:1:b", kind=Process.Kind.DISPATCHER, heartbeat_at=now_plus(60))


@pytest.fixture
def stalls(monkeypatch):
    """Return the kinds that the watch reports after some seconds, one sample each ``SAMPLE`` s."""
    monkeypatch.setattr("tests.chaos.watch.SAMPLE", SAMPLE)

    def stalls(seconds, refused_at=None):
        watch = Watch(DEAD_AFTER)
        for time in range(0, seconds + 1, SAMPLE):
            watch.act()
            if time == refused_at:
                watch.refused()
        return [what.partition(":")[0] for what in watch.stalled]

    return stalls


def a_ready_job():
    tasks.effect.enqueue(0)


def a_blocked_job():
    tasks.effect_within_a_limit.enqueue("a", 0)
    job = Job.objects.get()
    Job.objects.update(state="blocked", blocked_by=job.limits[0]["key"])


def a_due_job():
    tasks.effect.enqueue(0)
    Job.objects.update(state="scheduled")


def an_unfinished_batch():
    Batch.objects.bulk_create([Batch(sealed_at=Now())])


def a_running_job(process):
    tasks.effect_within_a_limit.enqueue("a", 0)
    Job.objects.update(state="running", process=process, attempt=1, started_at=Now())
    return Job.objects.get()


STAGED = {
    "ready": a_ready_job,
    "due": a_due_job,
    "slot free": a_blocked_job,
    "batch": an_unfinished_batch,
}


@pytest.mark.parametrize("kind", STAGED)
def test_stalled_work_is_reported(worker, dispatcher, stalls, kind):
    STAGED[kind]()

    assert stalls(4) == []
    assert stalls(8) == [kind]


@pytest.mark.parametrize("kind", STAGED)
def test_time_without_live_process_does_not_count(worker, dispatcher, stalls, kind):
    STAGED[kind]()
    Process.objects.update(heartbeat_at=now_plus(-DEAD_AFTER / 3))

    assert stalls(20) == []


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one lock")
@pytest.mark.django_db(transaction=True)
def test_time_with_locked_row_does_not_count(worker, dispatcher, stalls):
    a_due_job()

    with held_open(lambda: Job.objects.select_for_update().get()):
        assert stalls(20) == []
    assert stalls(20) == ["due"]


def test_unsettled_result_of_live_process_is_reported(worker, stalls):
    job = a_running_job(worker)
    assert stalls(20) == []
    Interval.objects.create(key="a/2", job=str(job.pk), attempt=1, ended_at=Now())

    assert stalls(4) == []
    assert stalls(8) == ["not settled"]


def test_unrecovered_job_of_dead_process_is_reported(worker, dispatcher, stalls):
    """After an outage, the time for recovery starts again."""
    a_running_job(worker)
    Process.objects.filter(pk=worker.pk).update(heartbeat_at=now_plus(-DEAD_AFTER))

    assert stalls(16) == []
    assert stalls(18) == ["not recovered"]
    assert stalls(30, refused_at=16) == []


def test_attempt_after_a_stop_is_reported():
    attempts = [
        Execution(job_id="a", attempt=1),
        Execution(job_id="b", attempt=2),
        Execution(job_id="c", attempt=2),
    ]

    assert [each[:1] for each in _stopped({"a": 1, "b": 1}, attempts)] == ["b"]


def test_early_start_of_debounced_job_is_reported():
    """A start before the call, or after the delay, is allowed."""
    load = SimpleNamespace(put_off={"a": [(NOW, NOW + timedelta(seconds=3))]})
    times = {
        number: NOW + timedelta(seconds=seconds) for number, seconds in enumerate((-1, 1, 3), 1)
    }
    attempts = [
        Execution(job_id="a", attempt=number, claimed_at=time) for number, time in times.items()
    ]

    (found,) = _debounced(load, attempts)

    assert found.startswith("a: attempt 2 began")


EXPIRES_AT = NOW + timedelta(seconds=10)
# By name: the state, the outcomes with the seconds at which they ended, and whether it is kept.
EXPIRIES = {
    "in time": ("successful", [("successful", 9)], True),
    "expired": ("discarded", [("discarded", 11)], True),
    "lost, then expired": ("discarded", [("lost", 9), ("discarded", 11)], True),
    "no time for a retry": ("failed", [("failed", 9.8)], True),
    "must not run twice": ("failed", [("lost", 9)], True),
    "not run and not discarded": ("ready", [], False),
    "discarded too early": ("discarded", [("discarded", 9)], False),
    "failed with time for a retry": ("failed", [("failed", 5)], False),
    "no attempt": ("discarded", [], False),
}


@pytest.mark.parametrize("name", EXPIRIES)
def test_job_that_did_not_keep_its_expiry_is_reported(name):
    state, ends, is_kept = EXPIRIES[name]
    tasks.effect_before_expiry.using(on_lost="fail").enqueue(EXPIRES_AT.isoformat(), 0)
    finished_at = None if state == "ready" else NOW + timedelta(seconds=ends[-1][1] if ends else 0)
    Job.objects.update(state=state, finished_at=finished_at)
    attempts = [
        Execution(
            job_id=Job.objects.get().pk,
            attempt=number,
            outcome=outcome,
            finished_at=NOW + timedelta(seconds=seconds),
            error_type="django_dbqueue.exceptions.Expired" if outcome == "discarded" else "",
        )
        for number, (outcome, seconds) in enumerate(ends, 1)
    ]

    assert bool(list(_expiring(attempts))) != is_kept


def test_start_after_expiry_is_reported():
    tasks.effect_before_expiry.enqueue(EXPIRES_AT.isoformat(), 0)
    job = Job.objects.get()
    Job.objects.update(state="successful", finished_at=NOW)
    ended = Execution(job_id=job.pk, attempt=1, outcome="successful", finished_at=NOW)
    Mark.objects.create(job=str(job.pk), attempt=1, value=1900)
    assert not list(_expiring([ended]))
    Mark.objects.update(value=2100)

    (found,) = _expiring([ended])

    assert found == f"{job.pk}: started 2100 ms after its expiry"


@pytest.mark.parametrize(
    ("outcome", "claimed_at", "ended_at", "has_waited"),
    [
        ("successful", 1, 2, True),
        ("failed", 1, 2, False),
        ("successful", -2, 1, False),
        ("successful", 1, 9, False),
    ],
)
def test_batch_that_finished_before_its_run_of_a_key_is_reported(
    outcome, claimed_at, ended_at, has_waited
):
    """The batch is called at 0 s and finishes at 5 s."""
    tasks.effect_after_a_batch.enqueue("batch")
    Job.objects.update(enqueued_at=NOW + timedelta(seconds=5))
    attempt = Execution(
        job_id="a",
        outcome=outcome,
        claimed_at=NOW + timedelta(seconds=claimed_at),
        finished_at=NOW + timedelta(seconds=ended_at),
    )

    assert bool(list(_members({"batch": (NOW, ["a"])}, [attempt]))) != has_waited


@pytest.mark.parametrize(("runs", "failures"), [(1, 0), (2, 1), (3, 0), (2, 0)])
def test_attempt_that_is_not_counted_once_is_reported(runs, failures):
    """Attempts whose outcome was dropped are not counted."""
    StatisticDelta.objects.create(queue="q", task="t", counts={"runs": runs, "failures": failures})
    dropped = (
        "It ended (failed) when its job belonged to another process; that outcome was dropped."
    )
    attempts = [
        Execution(job_id="a", attempt=1, outcome="successful"),
        Execution(job_id="a", attempt=2, outcome="discarded"),
        Execution(job_id="a", attempt=3, outcome="lost", message=dropped),
    ]

    assert bool(list(_counts(attempts))) == ((runs, failures) != (2, 0))


def test_deadlock_in_server_log_is_reported(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "LOG:  ready\nERROR:  deadlock detected\nDETAIL:  Process 1 waits\n"
        "InnoDB: Transactions deadlock detected, dumping detailed information.\n"
    )

    deadlocks = deadlocks_in(log)

    assert len(deadlocks) == 2
    assert report(Load(1), Operators(), Watch(DEAD_AFTER), {}, []).is_clean
    assert not report(Load(1), Operators(), Watch(DEAD_AFTER), {}, deadlocks).is_clean
