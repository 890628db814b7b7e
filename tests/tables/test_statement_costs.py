"""Frequent statements stay few and cheap: in transactions of their own, on rows that a test changes.

Not beside the tests of plans, which share their rows: the flush after a test here would empty them.
"""

from __future__ import annotations

import pytest
from django.db import connection

from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job, Semaphore
from django_dbqueue.models.enums import Lane, Outcome, State
from django_dbqueue.models.locking import lock

from .. import direct
from ..tasks import add
from .test_query_plans import analyze, buffers, double, fill, plan

pytestmark = pytest.mark.django_db(transaction=True)


def test_claim_and_settle_use_few_statements(
    process, django_assert_num_queries, django_assert_max_num_queries
):
    Job.objects.bulk_create([Job(task="t", queue="q") for _ in range(100)])
    # BEGIN, SELECT, UPDATE, COMMIT.
    with django_assert_num_queries(4):
        jobs = direct.claim(Lane("q", 0), process, 100)
    # BEGIN, SELECT, UPDATE, COPY of the executions, INSERT of their counts, COMMIT.
    with django_assert_max_num_queries(6):
        direct.settle(
            [
                AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)
                for job in jobs
            ]
        )

    assert len(jobs) == 100


@pytest.mark.skipif(
    connection.vendor != "postgresql", reason="Only PostgreSQL counts WAL per connection."
)
def test_job_writes_at_most_2700_bytes_of_wal(process, claim):
    """Jobs with arguments of 512 bytes are enqueued, claimed and settled in groups, in tables that have pages."""
    if connection.pg_version < 180000:
        pytest.skip("PostgreSQL counts WAL per connection from version 18.")

    def run_jobs(number: int) -> None:
        add.enqueue_many([("x" * 500,)] * number)
        direct.settle(
            [
                AttemptResult.of(job, Outcome.SUCCESSFUL, State.SUCCESSFUL)
                for job in claim(limit=number)
            ]
        )

    def wal_written() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute("SELECT wal_bytes FROM pg_stat_get_backend_wal(pg_backend_pid())")
            return int(cursor.fetchone()[0])

    def bytes_per_job(number: int) -> float:
        before = wal_written()
        run_jobs(number)
        return (wal_written() - before) / number

    run_jobs(200)

    # Some rounds write more: after a checkpoint each page is wal_written whole once (3,800 bytes), and a snapshot of another
    # session, such as autovacuum, keeps old row versions on their pages (2,630 bytes and more, instead of 2,310).
    assert min(bytes_per_job(1000) for _ in range(4)) <= 2700


def test_hundred_thousand_waiters_do_not_slow_other_statements():
    """The waiters have three priorities; a few jobs wait for other keys."""
    fill()
    blocked = {"task": "t", "queue": "served", "state": Job.State.BLOCKED}
    Job.objects.bulk_create(
        [Job(**blocked, blocked_by="saturated", priority=n % 3) for n in range(198)]
    )
    double(Job.objects.filter(blocked_by="saturated"), times=9)
    assert Job.objects.filter(blocked_by="saturated").count() > 100_000
    Job.objects.bulk_create([Job(**blocked, blocked_by=f"key {n}") for n in range(300)])
    Semaphore.objects.create(key="saturated", max_running=2)
    analyze()

    claim = plan(
        lock(Job.objects.ready().filter(queue="served", priority=1).order_by("run_after", "id"))[
            :10
        ]
    )
    waiters = plan(lock(Job.objects.waiting_for("saturated"))[:2])
    has_waiters = plan(Semaphore.objects.filter(pk="saturated").waiting())
    sweep = plan(Semaphore.objects.all().waiting())

    assert "dbqueue_job_lane" in claim
    for text in (waiters, has_waiters, sweep):
        # MySQL has read the single row of has_waiters before it made the plan.
        assert "dbqueue_job_blocked" in text or "Rows fetched before" in text, text
    if connection.vendor == "postgresql":
        assert "Sort" not in waiters
        assert buffers(claim) <= 60, claim
        for text in (waiters, has_waiters, sweep):
            assert buffers(text) <= 20, text
