"""Claims continue at the cursor of their lane, and rescans find the jobs before it."""

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
from django_dbqueue.runtime.worker import lane_cursors
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.lane_cursors import LaneCursors

from ... import direct, tasks
from ...conftest import all_claimed
from ...tables.test_query_plans import analyze, buffers, plan

LANE = Lane("default", 0)
keeps_dead_rows = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite keeps no dead rows and needs no cursors."
)


@pytest.fixture
def claimer(process, monkeypatch):
    """A claimer that rescans its lanes only on request, and whose scans never count as slow."""
    monkeypatch.setattr(Claimer, "FRESH", 3600.0)
    monkeypatch.setattr(LaneCursors, "LONG", 3600.0)
    return Claimer("default", process, QueueSelector(("*",)))


@pytest.fixture
def slow(claimer, monkeypatch):
    """Make every full scan slow, as an old transaction does; call the result when the next scan is due."""
    monkeypatch.setattr(LaneCursors, "LONG", -1.0)
    monkeypatch.setattr(lane_cursors, "REST", 1e9)
    monkeypatch.setattr(lane_cursors, "LONGEST_REST", 1e9)

    def due(claimer):
        claimer._cursors._rests_until = claimer._read_at = float("-inf")

    return due


def enqueue(number: int, **changes) -> None:
    result = tasks.add.enqueue(number)
    if changes:
        Job.objects.filter(pk=result.id).update(**changes)


def claimed(claimer, limit: int) -> list[int]:
    return [job.args[0] for job in all_claimed(claimer, limit)]


@keeps_dead_rows
def test_worker_resting_from_scans_is_not_idle(claimer, slow):
    """An idle worker polls ten times less often."""
    assert claimed(claimer, 1) == []
    assert claimer.idle
    claimer._read_at = float("-inf")
    assert claimed(claimer, 1) == []
    assert not claimer.idle


EARLIER = {"run_after": timezone.now() - timedelta(days=1)}


@pytest.fixture
def job_before_cursor(claimer):
    """Ten jobs, of which four are claimed, and then one job that sorts before them."""
    tasks.add.enqueue_many([(number,) for number in range(10)])
    assert claimed(claimer, 4) == [0, 1, 2, 3]
    enqueue(100, **EARLIER)


@keeps_dead_rows
@pytest.mark.django_db
def test_full_lane_is_read_from_cursor(claimer, job_before_cursor):
    assert claimed(claimer, 4) == [4, 5, 6, 7]


@pytest.mark.django_db
def test_lane_is_rescanned_each_second(claimer, job_before_cursor):
    claimer._read_at -= claimer.FRESH

    assert claimed(claimer, 4) == [100, 4, 5, 6]


@pytest.mark.django_db
def test_short_claim_rescans_lane(claimer, job_before_cursor):
    assert sorted(claimed(claimer, 10)) == [4, 5, 6, 7, 8, 9, 100]


@keeps_dead_rows
@pytest.mark.django_db
def test_slow_scan_postpones_rescan(claimer, slow):
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
def test_notified_lane_is_claimed_during_rest_from_slow_scans(claimer, slow):
    enqueue(0)
    assert claimed(claimer, 10) == [0]
    enqueue(1, priority=7)
    assert claimed(claimer, 10) == []

    claimer.on_notify("default,7")

    assert claimed(claimer, 10) == [1]


@keeps_dead_rows
@pytest.mark.django_db
def test_notified_lane_is_remembered_until_there_is_room(claimer, slow):
    tasks.add.enqueue_many([(number,) for number in range(4)])
    assert claimed(claimer, 2) == [0, 1]
    enqueue(100, priority=-7)
    claimer.on_notify("default,-7")

    assert claimed(claimer, 2) == [2, 3]
    assert claimed(claimer, 2) == [100]


@keeps_dead_rows
@pytest.mark.django_db
def test_pause_is_observed_during_rest_from_slow_scans(claimer, slow):
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
def test_scanned_empty_lane_keeps_its_cursor(claimer, slow):
    """No job sorts before the cursor."""
    enqueue(0)
    claimed(claimer, 10)
    slow(claimer)

    claimed(claimer, 10)

    assert claimer._cursors.of(LANE)


@keeps_dead_rows
@pytest.mark.django_db
def test_new_job_in_empty_lane_is_claimed_without_notify(claimer, slow):
    """Not every ready job sends a NOTIFY."""
    enqueue(0)
    claimed(claimer, 10)
    slow(claimer)
    assert claimed(claimer, 10) == []
    enqueue(1)

    assert claimed(claimer, 10) == [1]


@keeps_dead_rows
def test_single_slow_scan_is_repeated_within_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(
        "django_dbqueue.runtime.worker.lane_cursors.time",
        SimpleNamespace(monotonic=lambda: clock[0]),
    )
    cursors = LaneCursors("default")

    cursors.scan(lambda: clock.__setitem__(0, 300.0) or [])

    assert cursors.slow and not cursors.rested
    clock[0] += 6
    assert cursors.rested


@pytest.mark.django_db
def test_emptied_lane_has_no_cursor_if_scans_are_fast(claimer):
    enqueue(0)
    claimed(claimer, 10)

    assert claimer._cursors.of(LANE) is None


@keeps_dead_rows
@pytest.mark.django_db(transaction=True)
def test_old_transaction_does_not_slow_claims(claimer):
    """Jobs of one enqueue_many() share their time, so the cursor includes the id."""
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

        full_scan = plan(lock(Job.objects.of_lane(LANE))[:10])
        from_cursor = plan(
            lock(Job.objects.of_lane(LANE).filter(NotBefore(*claimer._cursors.of(LANE))))[:10]
        )
    finally:
        other.close()

    if connection.vendor == "postgresql":
        assert "dbqueue_job_lane" in from_cursor
        assert buffers(full_scan) > 120, full_scan
        assert buffers(from_cursor) <= 40, from_cursor
    else:
        # MariaDB's words, and MySQL's.
        wanted = r" range (\S+ )?dbqueue_job_lane |Index range scan on \w+ using dbqueue_job_lane "
        assert re.search(wanted, from_cursor), from_cursor


def test_claim_of_one_kind_leaves_the_other_kind_to_the_next_claim(claimer):
    def of_coroutines(limit):
        return [job.args for jobs in claimer.claim_kind(limit, 0, coroutines=True) for job in jobs]

    for number in range(3):
        enqueue(number)
    tasks.echo.enqueue_many([(10,), (11,), (12,)])

    assert of_coroutines(2) == [[10], [11]]
    assert of_coroutines(2) == [[12]]
    tasks.echo.enqueue(13)
    assert of_coroutines(2) == []  # The claim before found fewer than wanted.
    assert claimed(claimer, 5) == [0, 1, 2, 13]
