"""Clear a queue, move its jobs to another, and count its load."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction

from django_dbqueue.models import Job, Queue
from django_dbqueue.models import queue as queue_module
from django_dbqueue.models.bounded_count import BoundedCount
from django_dbqueue.models.enums import Lane
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.models.job import JobQuerySet

from .. import tasks
from ..conftest import a_process

pytestmark = pytest.mark.django_db
State = Job.State


def in_states(queue, *states):
    process = a_process(f"worker of {queue}")
    for state in states:
        values = {"process": process, "attempt": 1} if state == State.RUNNING else {}
        if state == State.BLOCKED:
            values = {"blocked_by": "x"}
        if state in (State.FAILED, State.SUCCESSFUL):
            values = {"finished_at": now_plus(0), "attempt": 1}
        values |= {"blocked_by": "a key"} if state == State.BLOCKED else {}
        Job.objects.create(task="t", queue=queue, state=state, **values)


def states_of(queue):
    return sorted(Job.objects.filter(queue=queue).values_list("state", flat=True))


def test_clear_discards_only_waiting_jobs():
    every = [
        State.READY,
        State.SCHEDULED,
        State.BLOCKED,
        State.RUNNING,
        State.FAILED,
        State.SUCCESSFUL,
    ]
    in_states("mail", *every)
    in_states("other", *every)

    assert Queue.objects.named("mail").clear() == 3

    assert states_of("mail") == sorted([State.DISCARDED] * 3 + every[3:])
    assert states_of("other") == sorted(every)


def test_clear_uses_statements_of_bounded_size(monkeypatch):
    monkeypatch.setattr(queue_module, "CLEARED_TOGETHER", 7)
    Job.objects.bulk_create([Job(task="t", queue="mail", priority=n % 2) for n in range(50)])
    Job.objects.bulk_create(
        [
            Job(task="t", queue=q, state="scheduled", run_after=now_plus(60))
            for q in ("mail", "x")
            for n in range(30)
        ]
    )
    numbers = []
    discard = JobQuerySet.discard
    monkeypatch.setattr(
        JobQuerySet, "discard", lambda rows: numbers.append(discard(rows)) or numbers[-1]
    )

    assert Queue.objects.named("mail").clear() == 80

    assert max(numbers) == 7
    assert states_of("x") == ["scheduled"] * 30


def test_clear_ends_and_leaves_jobs_enqueued_meanwhile(monkeypatch):
    monkeypatch.setattr(queue_module, "CLEARED_TOGETHER", 5)
    Job.objects.bulk_create(
        [Job(task="t", queue="mail", enqueued_at=now_plus(-1)) for n in range(20)]
    )
    discard = JobQuerySet.discard

    def discard_beside_an_enqueuer(rows):
        Job.objects.bulk_create(
            [Job(task="t", queue="mail", enqueued_at=now_plus(1)) for n in range(10)]
        )
        return discard(rows)

    monkeypatch.setattr(JobQuerySet, "discard", discard_beside_an_enqueuer)

    assert Queue.objects.named("mail").clear() <= 25
    assert Job.objects.ready().exists()


def test_waiting_jobs_are_moved_to_another_queue():
    every = [
        State.READY,
        State.SCHEDULED,
        State.BLOCKED,
        State.RUNNING,
        State.FAILED,
        State.SUCCESSFUL,
    ]
    in_states("mail", *every)

    assert Job.objects.filter(queue="mail").move("slow") == 3
    assert Job.objects.move("slow") == 0

    assert states_of("slow") == sorted(every[:3])
    assert states_of("mail") == sorted(every[3:])


@pytest.mark.parametrize("name", ["", "a,b", "*", "-mail", "x" * 101, "a\0", "\ud800", None])
def test_invalid_queue_name_is_refused(name):
    with pytest.raises(ValueError, match=r"is not a queue name\. Give 1 to 100 characters"):
        Job.objects.move(name)


@pytest.mark.django_db(transaction=True)
def test_resume_wakes_workers_of_the_queue(monkeypatch):
    woken = []
    monkeypatch.setattr("django_dbqueue.core.notify.wake", lambda *given: woken.append(given))
    Queue.objects.named("mail", "slow")
    Queue.objects.named("mail").pause()

    assert Queue.objects.all().resume() == 1

    assert woken == [("default", "mail")]


@pytest.mark.django_db(transaction=True)
def test_move_wakes_workers_once_after_commit(monkeypatch):
    woken = []
    monkeypatch.setattr("django_dbqueue.core.notify.wake", lambda *given: woken.append(given))
    tasks.add.enqueue(1)

    with transaction.atomic():
        Job.objects.move("slow")
        Job.objects.move("slow")

    assert woken == [("default", "slow")]


def test_load_counts_jobs_by_state():
    in_states(
        "mail",
        State.READY,
        State.SCHEDULED,
        State.SCHEDULED,
        State.BLOCKED,
        State.RUNNING,
        State.SUCCESSFUL,
    )
    in_states("other", State.READY)
    Job.objects.create(task="t", queue="mail", priority=9, run_after=now_plus(-60))

    load = Queue.objects.load("mail")

    assert (load.ready, load.scheduled, load.blocked, load.running) == (2, 2, 1, 1)
    assert timedelta(seconds=60) <= load.age < timedelta(seconds=90)
    assert load.oldest == Job.objects.get(priority=9).run_after


def test_loads_of_very_many_lanes_are_read_together(django_assert_num_queries):
    for number in range(120):
        in_states(f"q{number}", State.READY, State.SCHEDULED)
    Job.objects.create(task="t", queue="q7", priority=9, attempt=1)
    lanes = Job.objects.lanes()

    # One for the oldest jobs of 121 lanes, and one for all counts.
    with django_assert_num_queries(2):
        loads = Queue.objects.loads(lanes)

    assert len(loads) == 120
    assert (loads["q7"].ready, loads["q7"].retries) == (2, 1)
    assert {load.scheduled for load in loads.values()} == {1}
    assert all(load.oldest for load in loads.values())


def test_load_counts_fewer_jobs_of_each_of_many_queues(monkeypatch):
    monkeypatch.setattr("django_dbqueue.models.queue.LIMIT", 10)
    monkeypatch.setattr("django_dbqueue.models.queue.MOST_COUNTED", 3 * 10 + 8)
    for queue in ("one", "two"):
        Job.objects.bulk_create([Job(task="t", queue=queue) for _ in range(5)])
    in_states("three", *[State.SCHEDULED] * 11)

    loads = Queue.objects.loads(Job.objects.lanes())

    assert [str(loads[queue].ready) for queue in ("one", "two", "three")] == ["4+", "4+", "0"]
    assert str(loads["three"].scheduled) == "10+"


def test_waits_of_hundreds_of_lanes_are_read_in_few_statements(django_assert_num_queries):
    lanes = [Lane(f"q{number}", priority) for number in range(100) for priority in range(6)]
    rows = [Job(task="t", queue=lane.queue, priority=lane.priority) for lane in lanes[1:]]
    Job.objects.bulk_create([*rows, Job(task="u", queue="q7", priority=2)])
    Job.objects.filter(queue="q7", priority=2, task="t").update(run_after=now_plus(-60))

    with django_assert_num_queries(2):
        waits = Job.objects.waits(lanes)
    assert waits.keys() == {*lanes[1:]}
    assert 60 <= waits[Lane("q7", 2)] < 90
    assert all(wait < 30 for lane, wait in waits.items() if lane != ("q7", 2))
    # Filters of the jobs, such as those without paused tasks, hold for each lane.
    assert Job.objects.exclude(task__in=["t", "gone"]).waits(lanes)[Lane("q7", 2)] < 30
    with django_assert_num_queries(0):
        assert Job.objects.waits([]) == {}


def test_load_of_empty_queue_is_zero():
    load = Queue.objects.load("mail")

    assert (load.ready, load.scheduled, load.running, load.oldest, load.age) == (
        0,
        0,
        0,
        None,
        timedelta(),
    )


def test_load_beyond_limit_is_a_bounded_count(monkeypatch):
    for module in ("bounded_count", "queue"):
        monkeypatch.setattr(f"django_dbqueue.models.{module}.LIMIT", 10)
    Job.objects.bulk_create([Job(task="t", queue="mail") for n in range(20)])

    load = Queue.objects.load("mail")

    assert type(load.ready) is BoundedCount
    assert load.ready == 10


def test_idle_lane_scan_is_one_query(django_assert_num_queries):
    connection.ensure_connection()
    with django_assert_num_queries(1):
        assert Job.objects.lanes() == []


def test_unknown_queue_is_refused_where_jobs_or_a_pause_would_be_lost_in_it(settings):
    """The jobs waited for ever, and the misspelt queue looked paused while the real one ran on."""
    default = settings.TASKS["default"]
    settings.TASKS = {"default": {**default, "QUEUES": ["default", "real_time"]}}
    tasks.add.enqueue(1)

    with pytest.raises(ValueError, match=r"'real-time' is in no QUEUES.* Did you mean 'real_time'"):
        Job.objects.all().move("real-time")
    with pytest.raises(ValueError, match=r"'zzz' is in no QUEUES.* QUEUES has default, real_time"):
        Queue.objects.named("zzz").pause()
    assert not Queue.objects.filter(name="zzz").exists()

    Queue.objects.create(name="former")
    assert Queue.objects.named("former", "real_time").pause() == 2
    assert Job.objects.all().move("real_time") == 1
