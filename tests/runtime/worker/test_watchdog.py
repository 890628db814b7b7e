"""The worker's watchdog and the shared status."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_dbqueue.core.uuid7 import uuid7
from django_dbqueue.exceptions import TimedOut
from django_dbqueue.models import ClaimedJob
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.worker.run_times import RunTimes
from django_dbqueue.runtime.worker.services import WorkerServices
from django_dbqueue.runtime.worker.task_call import Call
from django_dbqueue.runtime.worker.watchdog import Watchdog


class Stub(Call):
    def stack(self) -> str:
        return f"at {self.job.task}"

    def _interrupt(self, reason) -> None:
        self.interrupted = reason


@pytest.fixture
def watchdog(backend):
    woken = []
    run_times = RunTimes()
    services = WorkerServices(running=list, wake=lambda: woken.append(True))
    watchdog = Watchdog(backend, 5.0, run_times, services)
    watchdog.woken, watchdog.run_times = woken, run_times
    return watchdog


def take_stacks(watchdog) -> list:
    """Remove and return the stacks that the worker has not stored yet."""
    found = list(watchdog.stacks)
    watchdog.stacks.clear()
    return found


def call(began: float = 0.0, **values) -> Stub:
    stub = Stub(ClaimedJob(task="t", queue="q", **values))
    stub.began = began
    return stub


def test_timed_out_job_is_interrupted_and_stuck_after_grace(watchdog, monkeypatch):
    one = call(timeout=timedelta(seconds=2))
    watchdog._check(one, 1.9)
    assert one.reason is None
    watchdog._check(one, 2.1)
    assert one.interrupted is TimedOut
    one.interrupted_at = 2.1
    watchdog._check(one, 7.0)
    assert not watchdog.stuck
    watchdog._check(one, 7.2)
    assert watchdog.stuck == {one}
    assert take_stacks(watchdog) == [(one.job, "at t", {})]
    assert watchdog.woken


def test_job_far_over_usual_run_time_is_hanged(watchdog):
    watchdog.run_times.observe("t", 10.0)
    one = call()

    watchdog._check(one, 199.0)
    assert not take_stacks(watchdog)
    watchdog._check(one, 201.0)
    assert take_stacks(watchdog) == [(one.job, "at t", {})]
    watchdog._check(one, 202.0)
    assert not take_stacks(watchdog)
    watchdog._check(one, 262.0)
    assert len(take_stacks(watchdog)) == 1
    assert not watchdog.stuck and one.reason is None


def test_short_job_is_hanged_after_one_minute(watchdog):
    watchdog.run_times.observe("t", 0.001)
    one = call()

    watchdog._check(one, 59.0)
    assert not take_stacks(watchdog)
    watchdog._check(one, 61.0)
    assert take_stacks(watchdog)


def test_shared_status_tracks_jobs_not_started():
    status, ids = SharedStatus(bytearray(SharedStatus.size(3))), [uuid7() for _ in range(5)]
    for each in ids:
        status.mark_claimed(each)
    assert status.not_started() == set(ids[:3])  # The others exceed its size and count as started.

    status.mark_started(ids[0])
    status.mark_started(ids[4])
    status.mark_claimed(ids[4])

    assert status.not_started() == {ids[1], ids[2], ids[4]}


def test_shared_status_has_no_age_before_first_tick():
    status = SharedStatus.private()
    assert status.since_gil_alive() == status.since_loop_tick() == 0.0
    status.tick()
    assert 0 <= status.since_loop_tick() < 1
    assert not status.is_draining
    status.mark_draining()
    assert status.is_draining
