"""Claim size: a worker holds claimed jobs only up to ``prefetch_bytes`` of arguments."""

from __future__ import annotations

import random
import time

import pytest

from django_dbqueue import limit
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.engine.claim import claim
from django_dbqueue.engine.claim_size import Budget
from django_dbqueue.engine.dispatch import dispatch
from django_dbqueue.models import ClaimedJob, Job
from django_dbqueue.models.enums import Lane
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.thread_pool import ThreadPool

from ..conftest import LONG, all_claimed, until
from ..tasks import add, echo_text

pytestmark = pytest.mark.django_db(transaction=True)
KB = 1024
# Random, so that the database can hardly compress it.
LARGE = random.Random(1).randbytes(50 * KB).hex()
ROOM = 350 * KB


@pytest.fixture
def claimer(process):
    return Claimer(
        "default", process, QueueSelector(("*",), frozenset()), Options(prefetch_bytes=ROOM)
    )


def test_claim_stops_at_byte_limit_and_continues_at_once(claimer):
    echo_text.enqueue_many([(LARGE,)] * 8)

    sizes = [len(all_claimed(claimer, 100)) for _ in range(4)]

    assert sizes == [3, 3, 2, 0]
    assert Job.objects.ready().count() == 0


def test_held_jobs_count_against_byte_limit(claimer):
    echo_text.enqueue_many([(LARGE,)] * 8)
    first = all_claimed(claimer, 2)
    held = sum(job.size for job in first)

    assert held > 200 * KB
    assert [len(jobs) for jobs in claimer.claim(100, held)] == [1]
    assert list(claimer.claim(100, ROOM)) == []
    assert Job.objects.ready().count() == 5


def test_oversized_job_is_claimed_when_nothing_is_held(claimer):
    echo_text.enqueue_many([(LARGE * 4,)] * 2)

    (job,) = all_claimed(claimer, 100)

    assert job.args == [LARGE * 4]
    assert list(claimer.claim(100, job.size)) == []


def test_only_what_is_large_once_it_is_decompressed_counts(claimer):
    for text in (LARGE[:15_000], LARGE[:17_000], "x" * 300_000):
        echo_text.enqueue(text)

    jobs = all_claimed(claimer, 100)

    assert [job.size // 1000 for job in jobs] == [0, 17, 300]
    assert [len(job.args[0]) for job in jobs] == [15_000, 17_000, 300_000]


def test_large_and_small_jobs_keep_order_and_arguments(claimer):
    for number in range(5):
        echo_text.enqueue(f"{number}" + (LARGE if number % 2 else ""))
    echo_text.enqueue(text=f"5{LARGE}")

    jobs = all_claimed(claimer, 100)

    texts = [*(job.args[0] for job in jobs[:-1]), jobs[-1].kwargs["text"]]
    assert texts == ["0", f"1{LARGE}", "2", f"3{LARGE}", "4", f"5{LARGE}"]


@pytest.mark.parametrize(
    ("texts", "claimed"), [([LARGE] * 8, 1), (["a", "b", LARGE, "c"], 2), (["a"] * 8, 8)]
)
def test_large_jobs_do_not_follow_in_the_slot_of_another(process, texts, claimed):
    limited = echo_text.using(concurrency=limit(1, group="one at a time"))
    limited.enqueue_many([(text,) for text in texts])

    jobs = claim(
        ClaimedJob.objects.all(),
        Lane("default", 0),
        process,
        100,
        group_size=lambda job, line: 100,
        budget=Budget(ROOM),
    )

    assert [job.args[0] for job in jobs] == texts[:claimed]
    assert sum(len(job.args[0]) for job in jobs) < ROOM


def test_worker_runs_all_large_jobs_of_a_limit_and_holds_few(worker):
    held = []
    limited = echo_text.using(concurrency=limit(1, group="one at a time"))
    limited.enqueue_many([(LARGE,)] * 40)
    worker(threads=4, prefetch_bytes=ROOM)

    def all_ended():
        held.append(Job.objects.running().count())
        return not dispatch("default") and not Job.objects.exclude(state="successful").exists()

    until(all_ended)
    assert max(held) < 10


def test_worker_runs_all_large_jobs_and_holds_few(worker, monkeypatch):
    held, put = [], ThreadPool.put

    def put_and_count(pool, jobs):
        put(pool, jobs)
        held.append(len(pool.waiting()))

    monkeypatch.setattr(ThreadPool, "put", put_and_count)
    echo_text.enqueue_many([(LARGE, 0.002)] * 200)
    worker(threads=1, prefetch_bytes=ROOM)

    until(lambda: not Job.objects.exclude(state="successful").exists())

    assert 0 < max(held) <= 4


def test_notified_worker_claims_large_job(worker):
    worker(poll_interval=60.0)
    add.enqueue(1).wait(timeout=LONG)
    began = time.monotonic()

    assert echo_text.enqueue(LARGE).wait(timeout=LONG).is_finished
    assert time.monotonic() - began < 30
