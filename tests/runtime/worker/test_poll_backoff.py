"""The delay before a worker's next poll."""

import time

import pytest

from django_dbqueue.runtime.worker.poll_backoff import PollBackoff

A_WHILE = 1.0


@pytest.fixture
def backoff():
    return PollBackoff()


def test_full_claim_polls_again_at_once(backoff):
    assert backoff.after_jobs(full=True) == 0


def test_partial_claim_lets_threads_start_first(backoff):
    assert 0 < backoff.after_jobs(full=False) < 0.01


def test_delay_grows_to_longest_without_jobs(backoff):
    delays = [backoff.after_none(time.monotonic(), longest=0.1, listens=False) for _ in range(10)]
    assert delays == sorted(delays)
    assert delays[0] < 0.02 and delays[-1] == 0.1


def test_jobs_reset_the_delay(backoff):
    for _ in range(10):
        backoff.after_none(time.monotonic(), longest=5.0, listens=False)
    backoff.after_jobs(full=True)
    assert backoff.after_none(time.monotonic(), longest=5.0, listens=False) < 0.02


def test_delay_stays_shortest_just_after_jobs(backoff):
    backoff.after_jobs(full=False)
    now = time.monotonic()
    delays = [
        backoff.after_none(now + after, longest=5.0, listens=False)
        for after in (0, 0.03, 0.06, 0.09)
    ]
    assert delays == [PollBackoff.FIRST] * 4
    assert backoff.after_none(now + A_WHILE, longest=5.0, listens=False) > PollBackoff.FIRST


def test_listening_worker_polls_at_longest_delay(backoff):
    assert backoff.after_none(time.monotonic(), longest=5.0, listens=True) == 5.0


def test_listening_worker_polls_once_after_notify(backoff):
    backoff.note_notify()
    now = time.monotonic()
    assert 0 < backoff.after_none(now, longest=5.0, listens=True) < 0.1
    assert backoff.after_none(now + A_WHILE, longest=5.0, listens=True) == 5.0
