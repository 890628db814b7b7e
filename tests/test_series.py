"""Short jobs of one line are claimed together, and run one after the other on one slot."""

from __future__ import annotations

import threading
import time
from uuid import uuid4

import pytest

from django_dbqueue import limit, task
from django_dbqueue.models import Execution, Job, Queue, Semaphore, Settlement, Slot
from django_dbqueue.options import Options
from django_dbqueue.runtime.board import Board
from django_dbqueue.runtime.claimer import Claimer
from django_dbqueue.runtime.pool import Pool
from django_dbqueue.selector import QueueSelector

from .conftest import a_process, until
from .tasks import add, call_service, charge, one_at_a_time, report

pytestmark = pytest.mark.django_db(transaction=True)
State, Outcome = Job.State, Execution.Outcome
ACCOUNT = "tests.tasks.charge account=1"


def settle(*jobs, outcome=Outcome.SUCCESSFUL, state=State.SUCCESSFUL):
    return Execution.objects.settle([Settlement.of(job, outcome, state) for job in jobs])


def taken(key=ACCOUNT):
    return Slot.objects.count_by_key([key])[key]


def by_series(jobs):
    found = {}
    for job in jobs:
        found.setdefault(job.series, []).append(job)
    return list(found.values())


# The claim


def test_those_next_in_line_run_behind_the_first_on_its_slot(claim):
    charge.enqueue_many([(1,)] * 9)

    jobs = claim(in_a_row=3)

    assert [len(each) for each in by_series(jobs)] == [3, 3]
    assert Job.objects.running().count() == 6
    assert taken() == 2
    assert sorted(job.pk for job in jobs) == list(Job.objects.order_by("pk").values_list("pk", flat=True)[:6])
    assert claim(a_process("another")) == []


def test_the_slot_is_taken_until_the_last_of_the_series_has_ended(claim):
    one_at_a_time.enqueue_many([()] * 4)
    first, second, third = claim(in_a_row=3)

    assert settle(second, first).unblocked == []
    assert taken("tests.tasks.one_at_a_time") == 1
    assert settle(third).unblocked == ["default"]
    assert Job.objects.ready().count() == 1


def test_a_retried_first_job_does_not_go_on_beside_the_others(claim):
    """Its attempt is another one: to belong to the series once more would be to run beside it."""
    one_at_a_time.enqueue_many([()] * 3)
    first, *_rest = claim(in_a_row=3)
    settle(first, outcome=Outcome.FAILED, state=State.READY)

    assert claim(in_a_row=3) == []
    assert Job.objects.get(pk=first.pk).state == State.BLOCKED


def test_those_behind_that_are_given_back_take_slots_anew(claim):
    charge.enqueue_many([(1,)] * 4)
    jobs = claim(in_a_row=2)
    Job.objects.release(jobs[2:])

    assert taken() == 2
    assert claim(in_a_row=2) == []
    settle(*jobs[:2])
    assert len(claim(in_a_row=2)) == 2


def test_no_more_are_claimed_than_wanted(claim):
    one_at_a_time.enqueue_many([()] * 50)

    assert len(claim(limit=5, in_a_row=100)) == 5


def test_nobody_in_the_line_is_passed_over(claim):
    def of(function, **options):
        return task(concurrency=limit(1, group="printer"), **options)(function.func)

    of(add).enqueue_many([(1,)] * 3)
    of(charge).enqueue(1)
    of(add).enqueue(2)

    jobs = claim(in_a_row=10)

    assert [job.task for job in jobs] == ["tests.tasks.add"] * 3
    settle(*jobs)
    assert [job.task for job in claim(in_a_row=10)] == ["tests.tasks.charge"]


def test_those_of_another_queue_are_left_to_its_workers(claim):
    one_at_a_time.enqueue()
    one_at_a_time.using(queue_name="mail").enqueue()
    Job.objects.filter(queue="mail").update(state=State.BLOCKED, blocked_by="tests.tasks.one_at_a_time")

    assert [job.queue for job in claim(in_a_row=10)] == ["default"]


def test_with_several_limits_they_share_the_slots_of_all(claim):
    report.enqueue_many([(1,)] * 3)
    report.enqueue(2)

    jobs = claim(in_a_row=10)

    assert sorted(len(each) for each in by_series(jobs)) == [1, 3]
    assert taken("tests.tasks.report") == 2
    assert taken("tests.tasks.report account=1") == 1


def test_a_rate_counts_each(claim):
    call_service.enqueue_many([(1,)] * 5)

    assert len(claim(in_a_row=10)) == 1


def test_the_limit_of_a_queue_counts_each(process):
    Queue.objects.know(["default"])
    Queue.objects.update(limit=2)
    one_at_a_time.enqueue_many([()] * 9)

    jobs = Claimer("default", process, QueueSelector(("*",)), in_a_row=lambda task: 5).claim(10)

    assert len(jobs) == 2


def test_a_line_goes_on_when_the_process_of_a_series_is_gone(claim, process):
    one_at_a_time.enqueue_many([()] * 4)
    claim(in_a_row=3)
    Job.objects.release(Job.objects.running().order_by("pk")[1:])
    Job.objects.running().delete()

    Semaphore.objects.sweep(10)

    assert len(claim(in_a_row=3)) == 3


# The pool


class Ran:
    """A pool whose jobs each take so long as their first argument says; what ran when."""

    def __init__(self, **options):
        self.began: list[tuple[str, float]] = []
        self.spans: dict[str, tuple[float, float]] = {}
        self.pool = Pool(Options(**options), Board.private(1000), self.run, lambda outcome: None, lambda: None)

    def run(self, call):
        began = time.monotonic()
        time.sleep(call.job.args[0])
        self.spans[call.job.args[1]] = began, time.monotonic()

    def at_a_time(self, names):
        spans = [self.spans[name] for name in names]
        return max(sum(begin <= moment < end for begin, end in spans) for moment, _end in spans)


@pytest.fixture
def ran():
    made = []

    def make(**options):
        made.append(Ran(**options))
        made[-1].pool.start()
        return made[-1]

    yield make
    for each in made:
        each.pool.close()


def a_job(name, seconds=0.0, series=None, ago=0.0):
    job = Job(task="t", args=[seconds, name], attempt=1)
    job.clock, job.series = time.monotonic() - ago, series
    return job


def test_of_one_series_one_runs_at_a_time_and_others_beside_it(ran):
    pool = ran(threads=4)
    one, other = uuid4(), uuid4()
    names = {series: [f"{series} {n}" for n in range(5)] for series in (one, other)}
    pool.pool.put([a_job(name, 0.02, series) for n in range(5) for series in names for name in names[series][n : n + 1]])
    pool.pool.put([a_job("free", 0.02)])

    until(lambda: len(pool.spans) == 11)

    assert pool.at_a_time(names[one]) == pool.at_a_time(names[other]) == 1
    assert pool.at_a_time(pool.spans) >= 2
    assert sorted(names[one], key=lambda name: pool.spans[name]) == names[one]
    assert pool.pool._behind == {}


def test_a_series_goes_on_before_what_waits_for_a_thread(ran):
    pool = ran(threads=1)
    series = uuid4()
    pool.pool.put([a_job("first", 0.01, series), a_job("other"), a_job("second", 0.0, series)])

    until(lambda: len(pool.spans) == 3)

    assert sorted(pool.spans, key=pool.spans.__getitem__) == ["first", "second", "other"]


def test_what_waits_too_long_behind_another_is_given_back(ran):
    pool = ran(threads=1).pool
    running, waiting = uuid4(), uuid4()
    pool.put([a_job("runs", 0.3, running, ago=9)])
    until(lambda: pool.running())
    pool.put([a_job("behind", 0.0, running, ago=9), a_job("waits", 0.0, waiting, ago=9), a_job("last", 0.0, waiting, ago=9)])
    pool.put([a_job("fresh", 0.0, running)])

    assert [job.args[1] for job in pool.take_back(older_than=2)] == ["waits", "behind", "last"]

    assert [job.args[1] for job in pool.waiting()] == ["fresh"]
    until(lambda: not pool.running() and not pool.waiting())
    assert pool._behind == {}


def test_those_behind_take_no_room_from_other_jobs(ran):
    pool = ran(threads=2, prefetch=50).pool
    series, hold = uuid4(), threading.Event()
    pool._run = lambda call: hold.wait(10) and None
    pool.put([a_job("first", series=series), *(a_job(str(n), series=series) for n in range(20))])
    until(pool.running)

    assert pool.room() == 1
    pool.put([a_job(str(n), series=series) for n in range(31)])
    assert pool.room() == 0
    hold.set()


@pytest.mark.parametrize(("seconds", "prefetch", "expected"), [(0.01, 500, (10, 20)), (0.0, 7, (7, 7)), (0.3, 500, (0, 0))])
def test_so_many_are_run_in_a_row_as_take_a_moment(ran, seconds, prefetch, expected):
    pool = ran(threads=1, prefetch=prefetch)
    assert pool.pool.in_a_row("t") <= 1

    pool.pool.put([a_job("one", seconds), a_job("two", seconds)])
    until(lambda: len(pool.spans) == 2 and not pool.pool.running())

    least, most = expected
    assert least <= pool.pool.in_a_row("t") <= most
