"""How soon a worker looks for jobs again."""

import time

import pytest

from django_dbqueue.runtime.worker.poll_backoff import PollBackoff

A_WHILE = 1.0


@pytest.fixture
def pace():
    return PollBackoff()


def test_after_a_full_claim_it_looks_at_once(pace):
    assert pace.after_jobs(full=True) == 0


def test_where_there_was_room_for_more_the_threads_begin_first(pace):
    assert 0 < pace.after_jobs(full=False) < 0.01


def test_without_jobs_it_looks_less_and_less_up_to_the_longest_pause(pace):
    pauses = [
        pace.after_none(time.monotonic(), longest=0.1, would_be_told=False) for _ in range(10)
    ]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.02 and pauses[-1] == 0.1


def test_after_jobs_it_looks_often_again(pace):
    for _ in range(10):
        pace.after_none(time.monotonic(), longest=5.0, would_be_told=False)
    pace.after_jobs(full=True)
    assert pace.after_none(time.monotonic(), longest=5.0, would_be_told=False) < 0.02


def test_for_a_moment_after_jobs_it_looks_as_often_as_it_can(pace):
    pace.after_jobs(full=False)
    now = time.monotonic()
    pauses = [
        pace.after_none(now + after, longest=5.0, would_be_told=False)
        for after in (0, 0.03, 0.06, 0.09)
    ]
    assert pauses == [PollBackoff.FIRST] * 4
    assert pace.after_none(now + A_WHILE, longest=5.0, would_be_told=False) > PollBackoff.FIRST


def test_who_would_be_told_looks_seldom_at_once(pace):
    assert pace.after_none(time.monotonic(), longest=5.0, would_be_told=True) == 5.0


def test_just_after_it_was_told_it_looks_once_when_it_would_be_told_again(pace):
    pace.tell()
    now = time.monotonic()
    assert 0 < pace.after_none(now, longest=5.0, would_be_told=True) < 0.1
    assert pace.after_none(now + A_WHILE, longest=5.0, would_be_told=True) == 5.0
