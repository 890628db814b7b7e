"""A worker holds claimed jobs with large arguments only up to a number of bytes."""

from __future__ import annotations

import random
import time

import pytest

from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.models import Job
from django_dbqueue.runtime.worker.claimer import Claimer

from ..conftest import LONG, all_claimed, until
from ..tasks import add, echo_text

pytestmark = pytest.mark.django_db(transaction=True)
KB = 1024
# Little of it can be compressed.
LARGE = random.Random(1).randbytes(50 * KB).hex()
ROOM = 350 * KB


@pytest.fixture
def claimer(process):
    return Claimer(
        "default", process, QueueSelector(("*",), frozenset()), Options(prefetch_bytes=ROOM)
    )


def test_claim_of_large_jobs_stops_at_the_limit_of_bytes_and_goes_on_at_once(claimer):
    echo_text.enqueue_many([(LARGE,)] * 8)

    sizes = [len(all_claimed(claimer, 100)) for _ in range(4)]

    assert sizes == [3, 3, 2, 0]
    assert Job.objects.ready().count() == 0


def test_what_is_held_counts_against_the_limit_of_bytes(claimer):
    echo_text.enqueue_many([(LARGE,)] * 8)
    first = all_claimed(claimer, 2)
    held = sum(job.size for job in first)

    assert held > 200 * KB
    assert [len(jobs) for jobs in claimer.claim(100, held)] == [1]
    assert list(claimer.claim(100, ROOM)) == []
    assert Job.objects.ready().count() == 5


def test_single_job_over_the_limit_of_bytes_is_claimed_if_nothing_is_held(claimer):
    echo_text.enqueue_many([(LARGE * 4,)] * 2)

    (job,) = all_claimed(claimer, 100)

    assert job.args == [LARGE * 4]
    assert list(claimer.claim(100, job.size)) == []


def test_large_and_small_jobs_are_claimed_in_their_order_with_their_arguments(claimer):
    for number in range(5):
        echo_text.enqueue(f"{number}" + (LARGE if number % 2 else ""))
    echo_text.enqueue(text=f"5{LARGE}")

    jobs = all_claimed(claimer, 100)

    texts = [*(job.args[0] for job in jobs[:-1]), jobs[-1].kwargs["text"]]
    assert texts == ["0", f"1{LARGE}", "2", f"3{LARGE}", "4", f"5{LARGE}"]


def test_worker_runs_all_large_jobs_and_holds_few(worker):
    held = []
    echo_text.enqueue_many([(LARGE, 0.02)] * 40)
    worker(threads=1, prefetch_bytes=ROOM)

    def all_ended():
        held.append(Job.objects.running().count())
        return not Job.objects.exclude(state="successful").exists()

    until(all_ended)

    # Three that wait, one that runs, and those whose outcomes are not yet written.
    assert max(held) < 20


def test_worker_that_is_told_of_a_large_job_claims_it(worker):
    worker(poll_interval=60.0)
    add.enqueue(1).wait(timeout=LONG)
    began = time.monotonic()

    assert echo_text.enqueue(LARGE).wait(timeout=LONG).is_finished
    assert time.monotonic() - began < 30
