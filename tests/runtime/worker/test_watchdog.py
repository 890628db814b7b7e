"""What a worker's watch notices, and what a board keeps."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_dbqueue.core.uuid7 import uuid7
from django_dbqueue.exceptions import TimedOut
from django_dbqueue.models import ClaimedJob
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.worker.durations import RunTimes
from django_dbqueue.runtime.worker.task_call import Call
from django_dbqueue.runtime.worker.watchdog import Watchdog


class Stub(Call):
    def stack(self) -> str:
        return f"at {self.job.task}"

    def _interrupt(self, reason) -> None:
        self.interrupted = reason


@pytest.fixture
def watch(backend):
    woken = []
    durations = RunTimes()
    watch = Watchdog(backend, 5.0, durations, list, lambda: woken.append(True))
    watch.woken, watch.durations = woken, durations
    return watch


def call(began: float = 0.0, **values) -> Stub:
    stub = Stub(ClaimedJob(task="t", queue="q", **values))
    stub.began = began
    return stub


def test_a_job_is_ended_when_its_time_is_over_and_given_up_after_the_grace(watch, monkeypatch):
    one = call(timeout=timedelta(seconds=2))
    watch._look(one, 1.9)
    assert one.reason is None
    watch._look(one, 2.1)
    assert one.interrupted is TimedOut
    one.asked_at = 2.1
    watch._look(one, 7.0)
    assert not watch.stuck
    watch._look(one, 7.2)
    assert watch.stuck == {one}
    assert list(watch.stacks()) == [(one.job, "at t")]
    assert watch.woken


def test_a_job_hangs_that_runs_for_many_times_as_long_as_usual(watch):
    watch.durations.observe("t", 10.0)
    one = call()

    watch._look(one, 199.0)
    assert not list(watch.stacks())
    watch._look(one, 201.0)
    assert list(watch.stacks()) == [(one.job, "at t")]
    watch._look(one, 202.0)
    assert not list(watch.stacks())
    watch._look(one, 262.0)
    assert len(list(watch.stacks())) == 1
    assert not watch.stuck and one.reason is None


def test_a_short_job_hangs_after_a_minute_at_the_earliest(watch):
    watch.durations.observe("t", 0.001)
    one = call()

    watch._look(one, 59.0)
    assert not list(watch.stacks())
    watch._look(one, 61.0)
    assert list(watch.stacks())


def test_a_board_has_what_was_not_begun():
    board, ids = SharedStatus(bytearray(SharedStatus.size(3))), [uuid7() for _ in range(5)]
    for each in ids:
        board.hold(each)
    assert board.not_started() == set(ids[:3])  # The others have no place, and count as begun.

    board.drop(ids[0])
    board.drop(ids[4])
    board.hold(ids[4])

    assert board.not_started() == {ids[1], ids[2], ids[4]}


def test_a_board_is_silent_before_its_first_word():
    board = SharedStatus.private()
    assert board.since_gil_alive() == board.since_loop_tick() == 0.0
    board.turn()
    assert 0 <= board.since_loop_tick() < 1
    assert not board.is_draining
    board.leave()
    assert board.is_draining
