"""Ids of jobs sort by the time at which they were made."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from threading import Thread

import pytest

from django_dbqueue.core import uuid7 as module
from django_dbqueue.core.uuid7 import time_of, uuid7

AT = datetime(2026, 3, 29, 1, 2, 3, 456_000, tzinfo=timezone.utc)
SECOND = 1_000_000_000


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; call it with nanoseconds to move it."""
    now = [int(AT.timestamp()) * SECOND + 456_000_000]
    monkeypatch.setattr(module, "_last", 0)
    monkeypatch.setattr(module.time, "time_ns", lambda: now[0])

    def move(nanoseconds):
        now[0] += nanoseconds

    return move


def test_id_has_its_time_version_and_variant(clock):
    made = uuid7()

    assert (made.version, made.variant) == (7, "specified in RFC 4122")
    assert time_of(made) == AT


@pytest.mark.parametrize("back", [0, 1, 300, 20_000, SECOND // 2])
def test_ids_stay_in_order_if_the_clock_stands_still_or_goes_back(clock, back):
    made = [uuid7()]
    clock(-back)
    made += [uuid7() for _ in range(10_000)]

    assert made == sorted(made)
    assert len({*made}) == len(made)
    assert time_of(made[-1]) - AT < timedelta(milliseconds=10)


def test_a_clock_that_is_set_right_is_followed(clock):
    uuid7()
    clock(-3600 * SECOND)

    assert time_of(uuid7()) == AT - timedelta(hours=1)


def test_threads_make_no_id_twice(clock):
    made = []
    threads = [Thread(target=lambda: made.extend([uuid7() for _ in range(5000)])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({*made}) == 20_000
