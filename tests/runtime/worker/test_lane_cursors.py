"""A claim goes on where the last one of its lane ended, and nothing that stands before that is left behind."""

from __future__ import annotations

import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection, connections
from django.utils import timezone

from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Job, Queue
from django_dbqueue.models.enums import Lane, Outcome, State
from django_dbqueue.models.expressions import NotBefore
from django_dbqueue.models.locking import lock
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.lane_cursors import LaneCursors

from ... import direct, tasks
from ...conftest import all_claimed
from ...tables.test_query_plans import analyze, buffers, plan

LANE = Lane("default", 0)
keeps_dead_rows = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite keeps no dead rows, and needs no marks"
)


@pytest.fixture
def claimer(process, monkeypatch):
    """It reads its lanes anew, by the time, only when a test says so; and no look takes long, however full the machine is."""
    monkeypatch.setattr(Claimer, "FRESH", 3600.0)
    monkeypatch.setattr(LaneCursors, "LONG", 3600.0)
    return Claimer("default", process, QueueSelector(("*",)))


@pytest.fixture
def slow(claimer, monkeypatch):
    """As if an old transaction made every look from the start take long; call it when the next one is due."""
    monkeypatch.setattr(LaneCursors, "LONG", -1.0)
    monkeypatch.setattr(LaneCursors, "REST", 1e9)
    monkeypatch.setattr(LaneCursors, "LONGEST_REST", 1e9)

    def due(claimer):
        claimer._marks._rests_until = claimer._read_at = float("-inf")

    return due


def enqueue(number: int, **changes) -> None:
    result = tasks.add.enqueue(number)
    if changes:
        Job.objects.filter(pk=result.id).update(**changes)


def claimed(claimer, limit: int) -> list[int]:
    return [job.args[0] for job in all_claimed(claimer, limit)]


@keeps_dead_rows
def test_a_worker_that_rests_from_looks_does_not_think_that_there_is_nothing(claimer, slow):
    """It would look ten times less often."""
    assert claimed(claimer, 1) == []
    assert claimer.idle
    claimer._read_at = float("-inf")
    assert claimed(claimer, 1) == []
    assert not claimer.idle


EARLIER = {"run_after": timezone.now() - timedelta(days=1)}


@pytest.fixture
def fallen_behind(claimer):
    """Of ten jobs, four were claimed; then one comes to stand before these."""
    tasks.add.enqueue_many([(number,) for number in range(10)])
    assert claimed(claimer, 4) == [0, 1, 2, 3]
    enqueue(100, **EARLIER)


@keeps_dead_rows
@pytest.mark.django_db
def test_a_full_lane_is_read_from_where_the_last_claim_ended(claimer, fallen_behind):
    assert claimed(claimer, 4) == [4, 5, 6, 7]


@pytest.mark.django_db
def test_it_is_read_from_the_start_each_second(claimer, fallen_behind):
    claimer._read_at -= claimer.FRESH

    assert claimed(claimer, 4) == [100, 4, 5, 6]


@pytest.mark.django_db
def test_it_is_read_from_the_start_when_it_has_too_little(claimer, fallen_behind):
    assert sorted(claimed(claimer, 10)) == [4, 5, 6, 7, 8, 9, 100]


@keeps_dead_rows
@pytest.mark.django_db
def test_while_that_takes_long_it_is_not(claimer, slow):
    enqueue(0)
    enqueue(1, queue="second")
    assert sorted(claimed(claimer, 10)) == [0, 1]
    enqueue(100, **EARLIER)
    enqueue(2)

    assert claimed(claimer, 10) == [2]
    assert claimed(claimer, 10) == []
    slow(claimer)
    assert claimed(claimer, 10) == [100]


@keeps_dead_rows
@pytest.mark.django_db
def test_while_that_takes_long_it_knows_the_lanes_that_it_is_told_of(claimer, slow):
    enqueue(0)
    assert claimed(claimer, 10) == [0]
    enqueue(1, priority=7)
    assert claimed(claimer, 10) == []

    claimer.on_notify("default,7")

    assert claimed(claimer, 10) == [1]


@keeps_dead_rows
@pytest.mark.django_db
def test_what_it_was_told_of_while_it_had_no_room_is_not_forgotten(claimer, slow):
    tasks.add.enqueue_many([(number,) for number in range(4)])
    assert claimed(claimer, 2) == [0, 1]
    enqueue(100, priority=-7)
    claimer.on_notify("default,-7")

    assert claimed(claimer, 2) == [2, 3]
    assert claimed(claimer, 2) == [100]


@keeps_dead_rows
@pytest.mark.django_db
def test_while_that_takes_long_pauses_and_limits_are_still_learnt(claimer, slow):
    enqueue(0)
    claimed(claimer, 10)
    enqueue(1)
    Queue.objects.named("default").pause(until=None)
    claimer._read_at -= claimer.FRESH

    assert claimed(claimer, 10) == []
    Queue.objects.named("default").resume()
    assert claimed(claimer, 10) == [1]


@keeps_dead_rows
@pytest.mark.django_db
def test_an_empty_lane_keeps_its_mark_when_it_was_looked_at(claimer, slow):
    """There is nothing before it."""
    enqueue(0)
    claimed(claimer, 10)
    slow(claimer)

    claimed(claimer, 10)

    assert claimer._marks.of(LANE)


@keeps_dead_rows
@pytest.mark.django_db
def test_what_comes_to_a_lane_that_was_empty_at_the_last_look_is_found_untold(claimer, slow):
    """A retry, or anything where nobody is told."""
    enqueue(0)
    claimed(claimer, 10)
    slow(claimer)
    assert claimed(claimer, 10) == []
    enqueue(1)

    assert claimed(claimer, 10) == [1]


@keeps_dead_rows
def test_one_look_that_took_minutes_is_made_again_in_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(
        "django_dbqueue.runtime.worker.lane_cursors.time",
        SimpleNamespace(monotonic=lambda: clock[0]),
    )
    marks = LaneCursors("default")

    marks.look(lambda: clock.__setitem__(0, 300.0) or [])

    assert marks.slow and not marks.rested
    clock[0] += 6
    assert marks.rested


@pytest.mark.django_db
def test_a_lane_that_was_emptied_has_no_mark_if_looks_are_quick(claimer):
    enqueue(0)
    claimed(claimer, 10)

    assert claimer._marks.of(LANE) is None


@keeps_dead_rows
@pytest.mark.django_db(transaction=True)
def test_an_old_transaction_makes_claims_no_dearer(claimer):
    """Of one statement that enqueued them, all jobs have the same time: the mark tells their ids apart."""
    tasks.add.enqueue_many([(number,) for number in range(5000)])
    other = connections.create_connection("default")
    other.set_autocommit(False)
    try:
        with other.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT count(*) FROM dbqueue_job")
        for _ in range(9):
            jobs = all_claimed(claimer, 500)
            direct.settle(
                [AttemptResult.of(job, Outcome.SUCCESSFUL, State.SUCCESSFUL) for job in jobs]
            )
        analyze()

        from_the_start = plan(lock(Job.objects.of_lane(LANE))[:10])
        from_the_mark = plan(
            lock(Job.objects.of_lane(LANE).filter(NotBefore(*claimer._marks.of(LANE))))[:10]
        )
    finally:
        other.close()

    if connection.vendor == "postgresql":
        assert "dbqueue_job_lane" in from_the_mark
        assert buffers(from_the_start) > 120, from_the_start
        assert buffers(from_the_mark) <= 40, from_the_mark
    else:
        assert re.search(r" range (\S+ )?dbqueue_job_lane ", from_the_mark), from_the_mark
