"""Slot groups: short jobs that share a slot are claimed together and run one after another."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_dbqueue import limit, task
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.engine.slot_group import COUNTED
from django_dbqueue.models import ClaimedJob, Execution, Job, Process, Queue, Slot, TaskState
from django_dbqueue.models.enums import UNFINISHED
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.run_times import RunTimes
from django_dbqueue.runtime.worker.thread_pool import ThreadPool

from .. import direct
from ..conftest import LONG, a_process, all_claimed, until
from ..tasks import add, call_service, charge, nap, one_at_a_time, report

pytestmark = pytest.mark.django_db(transaction=True)
State, Outcome = Job.State, Execution.Outcome
ACCOUNT = "tests.tasks.charge account=1"


def settle(*jobs, outcome=Outcome.SUCCESSFUL, state=State.SUCCESSFUL, keeping=()):
    return direct.settle(
        [AttemptResult.of(job, outcome, state) for job in jobs], lambda job: job in keeping
    )


def taken(key=ACCOUNT):
    return Slot.objects.count_by_key([key])[key]


def by_slot_group(jobs):
    found = {}
    for job in jobs:
        found.setdefault(job.slot_group, []).append(job)
    return list(found.values())


# Claim


def test_next_waiters_share_the_slot_of_the_first(claim):
    charge.enqueue_many([(1,)] * 9)

    jobs = claim(group_size=3) + claim(group_size=3)

    assert [len(each) for each in by_slot_group(jobs)] == [3, 3]
    assert Job.objects.running().count() == 6
    assert taken() == 2
    assert sorted(job.pk for job in jobs) == list(
        Job.objects.order_by("pk").values_list("pk", flat=True)[:6]
    )
    assert claim(a_process("another")) == []


def test_slot_is_held_until_slot_group_ends(claim):
    one_at_a_time.enqueue_many([()] * 4)
    first, second, third = claim(group_size=3)

    assert settle(second, first).unblocked == []
    assert taken("tests.tasks.one_at_a_time") == 1
    assert settle(third).unblocked == ["default"]
    assert Job.objects.ready().count() == 1


def test_slot_that_the_group_keeps_is_settled_without_its_semaphore(claim):
    """Each settlement that locked it would wait for the claims of other processes."""
    one_at_a_time.enqueue_many([()] * 4)
    first, second, third = claim(group_size=3)

    with CaptureQueriesContext(connection) as captured:
        assert settle(first, second, keeping=[first, second]).unblocked == []

    assert not any("dbqueue_semaphore" in query["sql"] for query in captured)
    assert Slot.objects.get().job_id == third.pk
    assert settle(third).unblocked == ["default"]


def test_retried_job_leaves_its_slot_group(claim):
    """The retry is a new attempt: in the group it would run beside the other jobs."""
    one_at_a_time.enqueue_many([()] * 3)
    first, *_rest = claim(group_size=3)
    settle(first, outcome=Outcome.FAILED, state=State.READY)

    assert claim(group_size=3) == []
    assert Job.objects.get(pk=first.pk).state == State.BLOCKED


def test_released_jobs_acquire_slots_again(claim):
    charge.enqueue_many([(1,)] * 4)
    jobs = claim(group_size=2) + claim(group_size=2)
    direct.release([jobs[1], jobs[3]])

    assert taken() == 2
    assert claim(group_size=2) == []
    settle(jobs[0], jobs[2])
    assert len(claim(group_size=2)) == 2


def test_slot_of_a_stopped_job_that_is_released_passes_on(claim):
    one_at_a_time.enqueue_many([()] * 2)
    (first,) = claim()
    Job.objects.filter(pk=first.pk).stop()

    direct.release([first])

    assert list(Job.objects.order_by("pk").values_list("state", flat=True)) == [
        State.DISCARDED,
        State.READY,
    ]


def test_claim_leaves_half_of_the_free_slots_to_others_while_jobs_wait(claim):
    """One process had both slots of a limit and ran both groups on one core; the other was idle."""
    charge.enqueue_many([(1,)] * 9)
    other = a_process("another")

    assert [len(each) for each in by_slot_group(claim(group_size=3))] == [3]
    assert Job.objects.ready().count() == 1
    assert [len(each) for each in by_slot_group(claim(other, group_size=3))] == [3]
    assert taken() == 2


def test_claim_takes_all_free_slots_if_no_job_waits(claim):
    charge.enqueue_many([(1,)] * 2)

    assert len(claim(group_size=3)) == 2


def test_slot_group_does_not_exceed_claim_limit(claim):
    one_at_a_time.enqueue_many([()] * 50)

    assert len(claim(limit=5, group_size=100)) == 5


def test_slot_group_skips_no_waiter(claim):
    def of(function, **options):
        return task(concurrency=limit(1, group="printer"), **options)(function.func)

    of(add).enqueue_many([(1,)] * 3)
    of(charge).enqueue(1)
    of(add).enqueue(2)

    jobs = claim(group_size=10)

    assert [job.task for job in jobs] == ["tests.tasks.add"] * 3
    settle(*jobs)
    assert [job.task for job in claim(group_size=10)] == ["tests.tasks.charge"]


def test_slot_group_excludes_other_queues(claim):
    one_at_a_time.enqueue()
    one_at_a_time.using(queue_name="mail").enqueue()
    Job.objects.filter(queue="mail").update(
        state=State.BLOCKED, blocked_by="tests.tasks.one_at_a_time"
    )

    assert [job.queue for job in claim(group_size=10)] == ["default"]


def test_slot_group_shares_slots_of_all_limits(claim):
    report.enqueue_many([(1,)] * 3)
    report.enqueue(2)

    jobs = claim(group_size=10)

    assert sorted(len(each) for each in by_slot_group(jobs)) == [1, 3]
    assert taken("tests.tasks.report") == 2
    assert taken("tests.tasks.report account=1") == 1


def test_rate_counts_each_job_of_slot_group(claim):
    call_service.enqueue_many([(1,)] * 5)

    assert len(claim(group_size=10)) == 1


def test_queue_limit_counts_each_job_of_slot_group(process):
    Queue.objects.ensure_rows(["default"])
    Queue.objects.update(limit=2)
    one_at_a_time.enqueue_many([()] * 9)

    jobs = all_claimed(
        Claimer("default", process, QueueSelector(("*",)), group_size=lambda job, line: 5), 10
    )

    assert len(jobs) == 2


def test_waiters_continue_after_slot_group_is_lost(claim, process):
    one_at_a_time.enqueue_many([()] * 6)
    assert len(claim(group_size=3)) == 3
    Job.objects.running().delete()

    direct.sweep(10)

    assert len(claim(group_size=3)) == 3


# Claims behind a running job


def claim_behind(member, process, size=100, limit=100, jobs=None):
    return direct.claim_behind(member, process, limit, lambda job, line: size, jobs=jobs)


def test_waiting_jobs_join_the_group_of_a_running_job(claim, process):
    one_at_a_time.enqueue_many([()] * 6)
    first, second = claim(group_size=2)

    third, fourth = claim_behind(second, process, size=3)

    assert {job.slot_group for job in (first, second, third, fourth)} == {first.slot_group}
    assert [job.pk for job in (first, second, third, fourth)] == list(
        Job.objects.running().order_by("pk").values_list("pk", flat=True)
    )
    assert (third.attempt, third.process_id, third.state) == (1, process.pk, State.RUNNING)
    assert taken("tests.tasks.one_at_a_time") == 1
    assert settle(first, second, third).unblocked == []
    assert settle(fourth).unblocked == ["default"]
    assert (Job.objects.ready().count(), Job.objects.filter(state=State.BLOCKED).count()) == (1, 1)


def test_no_job_joins_a_group_that_has_ended(claim, process):
    """Its slot is another job's by now."""
    one_at_a_time.enqueue_many([()] * 4)
    (first,) = claim()
    settle(first)

    assert claim_behind(first, process) == []
    assert taken("tests.tasks.one_at_a_time") == 0
    assert len(claim()) == 1
    assert claim_behind(first, process) == []
    assert taken("tests.tasks.one_at_a_time") == 1


def test_no_job_joins_a_group_of_a_dead_process(claim, process):
    one_at_a_time.enqueue_many([()] * 4)
    (first,) = claim()
    Process.objects.filter(pk=process.pk).delete()

    assert claim_behind(first, process) == []


def test_job_that_differs_is_not_overtaken(claim, process):
    charge.enqueue(1)
    (first,) = claim()
    charge.enqueue_many([(1,)] * 2)
    claim()  # The second slot; one job waits.
    charge.using(queue_name="other").enqueue(1)
    charge.enqueue_many([(1,)] * 2)

    assert len(claim_behind(first, process)) == 1
    assert claim_behind(first, process) == []


@pytest.mark.parametrize("held_back", ["paused queue", "paused task", "queue with a limit"])
def test_no_job_of_a_held_back_queue_or_task_joins(claim, process, held_back):
    one_at_a_time.enqueue_many([()] * 4)
    (first,) = claim()
    claimer = Claimer("default", process, QueueSelector(("*",)))
    if held_back == "paused task":
        TaskState.objects.named(one_at_a_time.module_path).pause()
    elif held_back == "paused queue":
        Queue.objects.named("default").pause()
    else:
        Queue.objects.named("default").restrict(3)

    assert claimer.claim_behind(first, 10, lambda job, line: 5) == []

    TaskState.objects.all().delete()
    Queue.objects.all().delete()
    assert len(claimer.claim_behind(first, 10, lambda job, line: 3)) == 2


@pytest.mark.parametrize("seed", range(12))
def test_limit_holds_while_a_group_ends_and_jobs_join_it(claim, process, seed):
    """The last settlement of the group and the claim behind it meet."""
    chance = random.Random(seed)
    one_at_a_time.enqueue_many([()] * 30)
    (member,) = claim()
    for _ in range(8):
        with ThreadPoolExecutor(2) as threads:
            joins = threads.submit(
                _with_own_connection, lambda it=member: claim_behind(it, process, size=2)
            )
            time.sleep(chance.random() * 0.004)
            settles = threads.submit(_with_own_connection, lambda it=member: settle(it))
            joined, unblocked = joins.result(), settles.result().unblocked
        assert taken("tests.tasks.one_at_a_time") == len(joined)
        assert len(unblocked) + len(joined) == 1
        (member,) = joined or claim()


def _with_own_connection(act):
    try:
        return act()
    finally:
        connection.close()


# Thread pool


class RecordingPool:
    """A thread pool whose jobs sleep for their first argument; records when each ran."""

    def __init__(self, **options):
        self.began: list[tuple[str, float]] = []
        self.spans: dict[str, tuple[float, float]] = {}
        self.run_times = RunTimes()
        self.ended = lambda job: None
        self.pool = ThreadPool(
            Options(**options),
            SharedStatus.private(1000),
            self.run_times,
            self.run,
        )

    def run(self, call):
        began = time.monotonic()
        time.sleep(call.job.args[0])
        self.spans[call.job.args[1]] = began, time.monotonic()
        self.run_times.observe(call.job.task, call.job.args[0])
        self.ended(call.job)

    def max_concurrent(self, names):
        spans = [self.spans[name] for name in names]
        return max(sum(begin <= moment < end for begin, end in spans) for moment, _end in spans)


@pytest.fixture
def recording_pool():
    made = []

    def make(**options):
        made.append(RecordingPool(**options))
        made[-1].pool.start()
        return made[-1]

    yield make
    for each in made:
        each.pool.close()


def a_job(name, seconds=0.0, slot_group=None, ago=0.0, **values):
    job = ClaimedJob(task="t", args=[seconds, name], attempt=1, **values)
    job.clock, job.slot_group, job.ago = time.monotonic(), slot_group, ago
    return job


def put(pool, jobs):
    """Let jobs wait as if they had come ``ago`` seconds ago."""
    pool.put(jobs)
    for job in jobs:
        job.waits_since -= job.ago


def test_slot_group_runs_serially_beside_other_jobs(recording_pool):
    pool = recording_pool(threads=4)
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

    assert pool.max_concurrent(names[one]) == pool.max_concurrent(names[other]) == 1
    assert pool.max_concurrent(pool.spans) >= 2
    assert sorted(names[one], key=lambda name: pool.spans[name]) == names[one]
    assert pool.pool._followers == {}


def test_all_but_the_last_job_of_a_slot_group_keep_the_slot(recording_pool):
    pool = recording_pool(threads=2)
    jobs = [a_job(str(number), 0.01, slot_group) for slot_group in [uuid4()] for number in range(3)]
    pool.pool.put([*jobs, a_job("free")])
    kept = {}
    pool.ended = lambda job: kept.setdefault(job.args[1], pool.pool.keeps_slot(job))

    until(lambda: len(kept) == 4)

    assert kept == {"0": True, "1": True, "2": False, "free": False}


def test_slot_group_continues_before_waiting_jobs(recording_pool):
    pool = recording_pool(threads=1)
    slot_group = uuid4()
    pool.pool.put(
        [a_job("first", 0.01, slot_group), a_job("other"), a_job("second", 0.0, slot_group)]
    )

    until(lambda: len(pool.spans) == 3)

    assert sorted(pool.spans, key=pool.spans.__getitem__) == ["first", "second", "other"]


def test_job_with_slot_runs_before_jobs_without(recording_pool):
    pool = recording_pool(threads=1)
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


def test_late_jobs_are_released_earlier_in_a_slot_group(recording_pool):
    pool = recording_pool(threads=1).pool
    running, waiting = uuid4(), uuid4()
    put(pool, [a_job("runs", 0.3, running, ago=9)])
    until(pool.running)
    put(
        pool,
        [
            a_job("behind", 0.0, running, ago=0.1),
            a_job("waits", 0.0, waiting, ago=9),
            a_job("last", 0.0, waiting, ago=9),
        ],
    )
    assert pool.late_in() <= 0
    put(pool, [a_job("fresh", 0.0, running), a_job("other", ago=0.1)])

    assert [job.args[1] for job in pool.take_back(late=True)] == ["waits", "behind", "last"]

    assert 0.01 < pool.late_in() <= pool.GROUP_LATE
    assert [job.args[1] for job in pool.waiting()] == ["other", "fresh"]
    until(lambda: not pool.running() and not pool.waiting())
    assert pool._followers == {}
    assert pool.late_in() == float("inf")


def test_job_behind_a_late_one_is_released_with_it(recording_pool):
    pool = recording_pool(threads=1).pool
    slot_group = uuid4()
    put(pool, [a_job("runs", 0.3)])
    until(pool.running)
    put(pool, [a_job("waits", 0.0, slot_group, ago=9), a_job("behind", 0.0, slot_group)])

    assert [job.args[1] for job in pool.take_back(late=True)] == ["waits", "behind"]
    assert pool.waiting() == []
    assert pool._followers == {}


def test_members_of_a_group_that_advances_as_usual_are_not_late(recording_pool):
    pool = recording_pool(threads=1)
    pool.run_times.observe("t", 0.04)
    slot_group = uuid4()
    pool.pool.put([a_job(str(number), 0.04, slot_group) for number in range(10)])
    released = []

    def is_done():
        released.extend(pool.pool.take_back(late=True))
        return len(pool.spans) + len(released) == 10

    until(is_done)

    # The machine may be slow for a moment.
    assert len(released) < 8
    until(lambda: pool.pool._followers == {} == pool.pool._advanced_at)


def test_group_members_without_other_slot_are_not_late(recording_pool):
    pool = recording_pool(threads=1).pool
    slot_group, limits = uuid4(), [{"key": "a", "max_running": 1}]
    put(pool, [a_job("runs", 0.1, slot_group, limits=limits)])
    until(pool.running)
    put(pool, [a_job("behind", 0.0, slot_group, ago=0.1, limits=limits)])

    assert pool.take_back(late=True) == []
    assert pool.late_in() > 0.2


def test_all_waiting_jobs_are_released_at_shutdown(recording_pool):
    pool = recording_pool(threads=1).pool
    slot_group = uuid4()
    put(pool, [a_job("runs", 0.1, slot_group)])
    until(pool.running)
    put(pool, [a_job("behind", 0.0, slot_group), a_job("waits")])

    assert [job.args[1] for job in pool.take_back()] == ["waits", "behind"]
    assert pool.waiting() == []


def test_jobs_whose_claim_took_long_are_not_late(recording_pool):
    pool = recording_pool(threads=1).pool
    slot_group = uuid4()
    jobs = [a_job("runs", 0.2, slot_group), a_job("behind", 0.0, slot_group)]
    for job in jobs:
        job.clock -= 9

    pool.put(jobs)

    assert pool.late_in() > 0
    assert pool.take_back(late=True) == []


class SlowDict(dict):
    """A dict with a delay after each lookup, to provoke races."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        time.sleep(0.0005)
        return found


@pytest.mark.parametrize("late", [False, True])
def test_each_job_either_runs_or_is_taken_back(recording_pool, late):
    pool, taken, names = recording_pool(threads=4), [], [str(n) for n in range(3000)]
    pool.pool._waiting = SlowDict()
    for start in range(0, 3000, 30):
        slot_group = uuid4() if start % 90 else None
        put(
            pool.pool,
            [
                a_job(name, 0.0, slot_group, ago=random.choice([0.0, 0.03, 9.0]))
                for name in names[start : start + 30]
            ],
        )
        time.sleep(random.uniform(0, 0.002))
        taken += [job.args[1] for job in pool.pool.take_back(late)]

    def is_done():
        taken.extend(job.args[1] for job in pool.pool.take_back(late))
        return not pool.pool.running() and not pool.pool.waiting()

    until(is_done)

    assert taken and pool.spans
    assert sorted([*taken, *pool.spans]) == sorted(names)
    assert pool.pool._followers == {}


def test_stalled_threads_stop_prefetching(recording_pool):
    pool = recording_pool(threads=2, prefetch=50).pool
    hold = threading.Event()
    pool._mean = 0.001
    pool._run = lambda call: hold.wait(LONG) and None
    put(pool, [a_job("one"), a_job("two")])
    until(lambda: len(pool.running()) == 2)
    for call in pool.running():
        call.began = time.monotonic()
    assert pool.room() > 10

    until(lambda: pool.room() == 0)
    hold.set()


def test_slot_group_members_take_no_room_from_other_jobs(recording_pool):
    pool = recording_pool(threads=2, prefetch=50).pool
    slot_group, hold = uuid4(), threading.Event()
    pool._run = lambda call: hold.wait(LONG) and None
    put(
        pool,
        [
            a_job("first", slot_group=slot_group),
            *(a_job(str(n), slot_group=slot_group) for n in range(20)),
        ],
    )
    until(pool.running)

    assert pool.room() == 1
    put(pool, [a_job(str(n), slot_group=slot_group) for n in range(31)])
    assert pool.room() == 0
    hold.set()


@pytest.mark.parametrize(
    ("seconds", "max_running", "line", "prefetch", "expected"),
    [
        # A job of 5 ms: 25 ms of work, or as much as 0.2 s of it if the line is long.
        (0.005, 2, 0, 500, 5),
        (0.005, 2, 30, 500, 15),
        (0.005, 2, 1000, 500, 40),
        (0.005, 1, 0, 500, 40),
        (0.0, 2, 0, 7, 7),
        (0.1, 2, 0, 500, 0),
        (0.1, 2, 100, 500, 2),
        (0.3, 1, 1000, 500, 0),
    ],
)
def test_group_size_follows_run_time_and_line(
    recording_pool, seconds, max_running, line, prefetch, expected
):
    pool = recording_pool(threads=1, prefetch=prefetch)
    job = a_job(
        "one", limits=[{"key": "a", "max_running": 9}, {"key": "b", "max_running": max_running}]
    )
    assert pool.pool.group_size(job, line) == 1

    pool.run_times.observe("t", seconds)

    assert pool.pool.group_size(job, line) == expected


def test_longer_line_makes_larger_groups(process):
    """Two slots: with few waiting jobs, the other slot may be free for them soon."""
    asked = []

    def size(job, line):
        asked.append(line)
        return 3

    charge.enqueue_many([(1,)] * 21)

    direct.claim(Job.objects.lanes()[0], process, 100, size)

    assert set(asked) == {COUNTED, 19 // 2}


def running_group(pool, seconds=0.02, size=2, lasts=0.3, **values):
    """Start a group, and return its first job, which runs for longer than usual."""
    pool.run_times.observe("t", seconds)
    values = {"limits": [{"key": "a", "max_running": 1}], **values}
    group = uuid4()
    jobs = [a_job(f"{group} {number}", lasts, group, **values) for number in range(size)]
    pool.pool.put(jobs)
    until(lambda: any(call.job is jobs[0] for call in pool.pool.running()))
    return jobs[0]


def test_short_group_may_be_joined(recording_pool):
    pool = recording_pool(threads=2)
    job = running_group(pool, size=5)

    assert pool.pool.short_groups() == [(job, 4)]

    pool.pool.put([a_job("later", 0.3, job.slot_group)])
    assert pool.pool.short_groups() == []  # Half of the ten jobs that run in 0.2 s.


def test_job_for_whose_slot_none_waited_is_not_asked_for(recording_pool):
    """A limit that is never reached would cost a transaction for each job."""
    pool = recording_pool(threads=2)
    running_group(pool, size=1)

    assert pool.pool.short_groups() == []


def test_group_is_not_joined_while_all_threads_are_busy(recording_pool):
    """Other jobs would wait for as long as the line lasts."""
    pool = recording_pool(threads=2)
    running_group(pool)
    pool.pool.put([a_job("other", 0.3)])
    until(lambda: len(pool.pool.running()) == 2)

    assert pool.pool.short_groups() == []


def test_one_group_of_each_limit_may_be_joined(recording_pool):
    """Otherwise this process would keep all slots, and the others none."""
    pool = recording_pool(threads=4)
    # On a busy machine, the third may start much later than the first.
    first, _second = running_group(pool, lasts=1.5), running_group(pool, lasts=1.5)
    other = running_group(pool, limits=[{"key": "b", "max_running": 1}], lasts=1.5)

    assert pool.pool.short_groups() == [(first, 1), (other, 1)]


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({"limits": [{"key": "a", "max_running": 1}, {"key": "b", "max_running": 2}]}, 0.02),
        ({}, 0.15),  # Too long for a group.
    ],
)
def test_group_with_several_limits_or_long_jobs_is_not_joined(recording_pool, values, seconds):
    pool = recording_pool(threads=2)
    running_group(pool, seconds, **values)

    assert pool.pool.short_groups() == []


@pytest.mark.parametrize(("slots", "joined"), [(2, False), (1, True)])
def test_group_behind_a_long_job_is_joined_only_if_there_is_no_other_slot(
    recording_pool, slots, joined
):
    pool = recording_pool(threads=2)
    running_group(pool, limits=[{"key": "a", "max_running": slots}])
    time.sleep(pool.pool.GROUP_LATE)

    assert bool(pool.pool.short_groups()) == joined


def test_group_is_not_joined_again_once_none_waited(recording_pool):
    pool = recording_pool(threads=2)
    job = running_group(pool)
    pool.pool.end_group(job)

    assert pool.pool.short_groups() == []
    until(lambda: not pool.pool.running())
    assert pool.pool._with_line == set()


# Worker


def test_free_slot_is_used_while_first_job_of_group_runs_long(runqueue):
    """Jobs claimed behind the long job take the other slot."""
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

    # Behind the long job they would wait three seconds.
    assert median(gaps) < 1.5, gaps
