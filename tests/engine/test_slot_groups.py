"""Short jobs of one line are claimed together, and run one after the other on one slot."""

from __future__ import annotations

import random
import threading
import time
from itertools import pairwise
from statistics import median
from uuid import uuid4

import pytest

from django_dbqueue import limit, task
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import ClaimedJob, Execution, Job, Process, Queue, Slot
from django_dbqueue.models.enums import UNFINISHED
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.durations import RunTimes
from django_dbqueue.runtime.worker.thread_pool import ThreadPool

from .. import direct
from ..conftest import LONG, a_process, all_claimed, until
from ..tasks import add, call_service, charge, nap, one_at_a_time, report

pytestmark = pytest.mark.django_db(transaction=True)
State, Outcome = Job.State, Execution.Outcome
ACCOUNT = "tests.tasks.charge account=1"


def settle(*jobs, outcome=Outcome.SUCCESSFUL, state=State.SUCCESSFUL):
    return direct.settle([AttemptResult.of(job, outcome, state) for job in jobs])


def taken(key=ACCOUNT):
    return Slot.objects.count_by_key([key])[key]


def by_series(jobs):
    found = {}
    for job in jobs:
        found.setdefault(job.slot_group, []).append(job)
    return list(found.values())


# The claim


def test_those_next_in_line_run_behind_the_first_on_its_slot(claim):
    charge.enqueue_many([(1,)] * 9)

    jobs = claim(group_size=3)

    assert [len(each) for each in by_series(jobs)] == [3, 3]
    assert Job.objects.running().count() == 6
    assert taken() == 2
    assert sorted(job.pk for job in jobs) == list(
        Job.objects.order_by("pk").values_list("pk", flat=True)[:6]
    )
    assert claim(a_process("another")) == []


def test_the_slot_is_taken_until_the_last_of_the_series_has_ended(claim):
    one_at_a_time.enqueue_many([()] * 4)
    first, second, third = claim(group_size=3)

    assert settle(second, first).unblocked == []
    assert taken("tests.tasks.one_at_a_time") == 1
    assert settle(third).unblocked == ["default"]
    assert Job.objects.ready().count() == 1


def test_a_retried_first_job_does_not_go_on_beside_the_others(claim):
    """Its attempt is another one: to belong to the group once more would be to run beside it."""
    one_at_a_time.enqueue_many([()] * 3)
    first, *_rest = claim(group_size=3)
    settle(first, outcome=Outcome.FAILED, state=State.READY)

    assert claim(group_size=3) == []
    assert Job.objects.get(pk=first.pk).state == State.BLOCKED


def test_those_behind_that_are_given_back_take_slots_anew(claim):
    charge.enqueue_many([(1,)] * 4)
    jobs = claim(group_size=2)
    direct.release(jobs[2:])

    assert taken() == 2
    assert claim(group_size=2) == []
    settle(*jobs[:2])
    assert len(claim(group_size=2)) == 2


def test_no_more_are_claimed_than_wanted(claim):
    one_at_a_time.enqueue_many([()] * 50)

    assert len(claim(limit=5, group_size=100)) == 5


def test_nobody_in_the_line_is_passed_over(claim):
    def of(function, **options):
        return task(concurrency=limit(1, group="printer"), **options)(function.func)

    of(add).enqueue_many([(1,)] * 3)
    of(charge).enqueue(1)
    of(add).enqueue(2)

    jobs = claim(group_size=10)

    assert [job.task for job in jobs] == ["tests.tasks.add"] * 3
    settle(*jobs)
    assert [job.task for job in claim(group_size=10)] == ["tests.tasks.charge"]


def test_those_of_another_queue_are_left_to_its_workers(claim):
    one_at_a_time.enqueue()
    one_at_a_time.using(queue_name="mail").enqueue()
    Job.objects.filter(queue="mail").update(
        state=State.BLOCKED, blocked_by="tests.tasks.one_at_a_time"
    )

    assert [job.queue for job in claim(group_size=10)] == ["default"]


def test_with_several_limits_they_share_the_slots_of_all(claim):
    report.enqueue_many([(1,)] * 3)
    report.enqueue(2)

    jobs = claim(group_size=10)

    assert sorted(len(each) for each in by_series(jobs)) == [1, 3]
    assert taken("tests.tasks.report") == 2
    assert taken("tests.tasks.report account=1") == 1


def test_a_rate_counts_each(claim):
    call_service.enqueue_many([(1,)] * 5)

    assert len(claim(group_size=10)) == 1


def test_the_limit_of_a_queue_counts_each(process):
    Queue.objects.know(["default"])
    Queue.objects.update(limit=2)
    one_at_a_time.enqueue_many([()] * 9)

    jobs = all_claimed(
        Claimer("default", process, QueueSelector(("*",)), group_size=lambda job: 5), 10
    )

    assert len(jobs) == 2


def test_a_line_goes_on_when_the_process_of_a_series_is_gone(claim, process):
    one_at_a_time.enqueue_many([()] * 4)
    claim(group_size=3)
    direct.release(ClaimedJob.objects.running().order_by("pk")[1:])
    Job.objects.running().delete()

    direct.sweep(10)

    assert len(claim(group_size=3)) == 3


# The pool


class Ran:
    """A pool whose jobs each take so long as their first argument says; what ran when."""

    def __init__(self, **options):
        self.began: list[tuple[str, float]] = []
        self.spans: dict[str, tuple[float, float]] = {}
        self.durations = RunTimes()
        self.pool = ThreadPool(
            Options(**options),
            SharedStatus.private(1000),
            self.durations,
            self.run,
            lambda outcome: None,
            lambda: None,
        )

    def run(self, call):
        began = time.monotonic()
        time.sleep(call.job.args[0])
        self.spans[call.job.args[1]] = began, time.monotonic()
        self.durations.observe(call.job.task, call.job.args[0])

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


def a_job(name, seconds=0.0, slot_group=None, ago=0.0, **values):
    job = ClaimedJob(task="t", args=[seconds, name], attempt=1, **values)
    job.clock, job.slot_group = time.monotonic() - ago, slot_group
    return job


def test_of_one_series_one_runs_at_a_time_and_others_beside_it(ran):
    pool = ran(threads=4)
    one, other = uuid4(), uuid4()
    names = {slot_group: [f"{slot_group} {n}" for n in range(5)] for slot_group in (one, other)}
    pool.pool.put(
        [
            a_job(name, 0.02, slot_group)
            for n in range(5)
            for slot_group in names
            for name in names[slot_group][n : n + 1]
        ]
    )
    pool.pool.put([a_job("free", 0.02)])

    until(lambda: len(pool.spans) == 11)

    assert pool.at_a_time(names[one]) == pool.at_a_time(names[other]) == 1
    assert pool.at_a_time(pool.spans) >= 2
    assert sorted(names[one], key=lambda name: pool.spans[name]) == names[one]
    assert pool.pool._behind == {}


def test_a_series_goes_on_before_what_waits_for_a_thread(ran):
    pool = ran(threads=1)
    slot_group = uuid4()
    pool.pool.put(
        [a_job("first", 0.01, slot_group), a_job("other"), a_job("second", 0.0, slot_group)]
    )

    until(lambda: len(pool.spans) == 3)

    assert sorted(pool.spans, key=pool.spans.__getitem__) == ["first", "second", "other"]


def test_a_job_with_a_slot_goes_before_those_that_have_none(ran):
    pool = ran(threads=1)
    pool.pool.put(
        [
            a_job("runs", 0.05),
            a_job("plain"),
            a_job("one", slot_group=uuid4()),
            a_job("two", slot_group=uuid4()),
        ]
    )

    until(lambda: len(pool.spans) == 4)

    assert sorted(pool.spans, key=pool.spans.__getitem__)[-1] == "plain"
    assert pool.spans["one"] < pool.spans["two"]


def test_what_waits_too_long_is_given_back_and_sooner_behind_another(ran):
    pool = ran(threads=1).pool
    running, waiting = uuid4(), uuid4()
    pool.put([a_job("runs", 0.3, running, ago=9)])
    until(pool.running)
    pool.put(
        [
            a_job("behind", 0.0, running, ago=0.1),
            a_job("waits", 0.0, waiting, ago=9),
            a_job("last", 0.0, waiting, ago=9),
        ]
    )
    assert pool.late_in() <= 0
    pool.put([a_job("fresh", 0.0, running), a_job("other", ago=0.1)])

    assert [job.args[1] for job in pool.take_back(late=True)] == ["waits", "behind", "last"]

    assert 0.01 < pool.late_in() <= pool.GROUP_LATE
    assert [job.args[1] for job in pool.waiting()] == ["other", "fresh"]
    until(lambda: not pool.running() and not pool.waiting())
    assert pool._behind == {}
    assert pool.late_in() == float("inf")


def test_those_for_whom_there_is_no_other_slot_have_no_hurry(ran):
    pool = ran(threads=1).pool
    slot_group, limits = uuid4(), [{"key": "a", "most": 1}]
    pool.put([a_job("runs", 0.1, slot_group, limits=limits)])
    until(pool.running)
    pool.put([a_job("behind", 0.0, slot_group, ago=0.1, limits=limits)])

    assert pool.take_back(late=True) == []
    assert pool.late_in() > 0.2


def test_all_that_wait_are_given_back_at_the_end(ran):
    pool = ran(threads=1).pool
    slot_group = uuid4()
    pool.put([a_job("runs", 0.1, slot_group)])
    until(pool.running)
    pool.put([a_job("behind", 0.0, slot_group), a_job("waits")])

    assert [job.args[1] for job in pool.take_back()] == ["waits", "behind"]
    assert pool.waiting() == []


class Slow(dict):
    """Between the look at a job and its taking, others have time to come."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        time.sleep(0.0005)
        return found


def test_each_job_is_run_or_taken_back_and_never_both(ran):
    pool, taken, names = ran(threads=4), [], [str(n) for n in range(3000)]
    pool.pool._waiting = Slow()
    for start in range(0, 3000, 30):
        pool.pool.put(
            [
                a_job(name, slot_group=uuid4() if start % 90 else None)
                for name in names[start : start + 30]
            ]
        )
        time.sleep(random.uniform(0, 0.002))
        taken += [job.args[1] for job in pool.pool.take_back()]
    until(lambda: not pool.pool.running())

    assert taken and pool.spans
    assert sorted([*taken, *pool.spans]) == sorted(names)
    assert pool.pool.waiting() == [] and pool.pool._behind == {}


def test_nothing_is_claimed_ahead_of_threads_that_do_not_get_on(ran):
    pool = ran(threads=2, prefetch=50).pool
    hold = threading.Event()
    pool._mean = 0.001
    pool._run = lambda call: hold.wait(LONG) and None
    pool.put([a_job("one"), a_job("two")])
    until(lambda: len(pool.running()) == 2)
    assert pool.room() > 10

    until(lambda: pool.room() == 0)
    hold.set()


def test_those_behind_take_no_room_from_other_jobs(ran):
    pool = ran(threads=2, prefetch=50).pool
    slot_group, hold = uuid4(), threading.Event()
    pool._run = lambda call: hold.wait(LONG) and None
    pool.put(
        [
            a_job("first", slot_group=slot_group),
            *(a_job(str(n), slot_group=slot_group) for n in range(20)),
        ]
    )
    until(pool.running)

    assert pool.room() == 1
    pool.put([a_job(str(n), slot_group=slot_group) for n in range(31)])
    assert pool.room() == 0
    hold.set()


@pytest.mark.parametrize(
    ("seconds", "most", "prefetch", "expected"),
    [(0.005, 2, 500, 5), (0.005, 1, 500, 40), (0.0, 2, 7, 7), (0.1, 2, 500, 0), (0.3, 1, 500, 0)],
)
def test_so_many_are_run_in_a_row_as_take_a_moment(ran, seconds, most, prefetch, expected):
    pool = ran(threads=1, prefetch=prefetch)
    job = a_job("one", limits=[{"key": "a", "most": 9}, {"key": "b", "most": most}])
    assert pool.pool.group_size(job) == 1

    pool.durations.observe("t", seconds)

    assert pool.pool.group_size(job) == expected


# The worker


def test_a_slot_that_is_free_does_not_wait_for_a_long_job_of_a_short_task(runqueue):
    """Those claimed behind it take the other slot."""
    runqueue("--embedded", "--threads", "4")
    until(lambda: Process.objects.filter(kind="worker").exists())
    gaps = []
    for _ in range(3):
        nap.enqueue_many([("warm", 0.0)] * 100)
        until(lambda: not Job.objects.filter(state__in=UNFINISHED).exists())
        _long, *short = nap.enqueue_many([("a", 3.0)] + [("a", 0.0)] * 7)
        until(lambda: not Job.objects.filter(state__in=UNFINISHED).exists())
        runs = Execution.objects.filter(job__in=[each.id for each in short]).order_by("started_at")
        times = list(runs.values_list("started_at", "finished_at"))
        gaps.append(
            max((began - ended).total_seconds() for (_, ended), (began, _) in pairwise(times))
        )

    # Behind the long one they would wait for three seconds.
    assert median(gaps) < 1.5, gaps
