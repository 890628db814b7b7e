"""Liveness of limits: a job with free slots and a worker with room runs within one sweep."""

from __future__ import annotations

import os
import random
from itertools import chain

import pytest

from django_dbqueue import Rate, limit, task
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.engine.settle import keeps_none
from django_dbqueue.models import (
    ClaimedJob,
    Execution,
    Job,
    Process,
    Queue,
    Semaphore,
    Slot,
    TaskState,
)
from django_dbqueue.models.enums import Lane, State

from .. import direct
from ..conftest import a_process
from ..tasks import add, charge, row

pytestmark = pytest.mark.django_db(transaction=True)
Outcome = Execution.Outcome
# Two limits, as in the docs: one per account, and one for the bank of all accounts.
LIMITS = (limit(1, key=lambda a: a), limit(4, group="bank"))
statement = task(concurrency=LIMITS)(add.func)


def settle(*jobs, keeps_slot=keeps_none):
    return direct.settle(
        [AttemptResult.of(job, Outcome.SUCCESSFUL, State.SUCCESSFUL) for job in jobs], keeps_slot
    )


def running():
    return Job.objects.running().count()


@pytest.mark.parametrize("limits", [LIMITS, LIMITS[::-1]])
def test_jobs_of_busy_account_do_not_block_waiters_of_group(claim, limits):
    of_bank = task(concurrency=limits)(add.func)
    of_bank.enqueue_many([(account, 0) for account in range(4)])
    first = claim()
    # When these are claimed the bank is full, so they wait on the bank, not on their account.
    Job.objects.bulk_create(
        Job(
            task=job.task,
            queue="default",
            args=[9, 0],
            limits=[_of_account(each, 9) for each in job.limits],
        )
        for job in [first[0]] * 50
    )
    of_bank.enqueue_many([(account, 1) for account in range(20, 26)])
    assert claim() == []

    settle(*first)
    claim()

    assert running() == 4


def _of_account(limit, account):
    return {**limit, "key": limit["key"].replace("=0", f"={account}")}


def test_slot_unusable_by_first_waiter_goes_to_next_in_same_claim(claim):
    statement.enqueue(1, 0)
    (busy,) = claim()
    statement.enqueue_many([(n, 0) for n in range(10, 13)])
    rest = claim()
    statement.enqueue_many([(1, 1), (30, 0)])
    # Waiters of the bank, as if claimed while it was full.
    Job.objects.exclude(state=State.RUNNING).update(state=State.BLOCKED, blocked_by='"bank"')

    settle(rest[0])
    claim()

    assert running() == 4
    assert Job.objects.get(state=State.BLOCKED).blocked_by != '"bank"'
    settle(busy)
    assert len(claim()) == 1


one_at_a_time = task(concurrency=limit(1, group="one"))(add.func)
paused_task = task(concurrency=limit(1, group="one"))(row.func)


def pause_queue():
    Queue.objects.named("elsewhere").pause()


def pause_task():
    TaskState.objects.named(row.module_path).pause()


def leave_unserved():
    Process.objects.update(details={"queues": "default"})


@pytest.mark.parametrize("hold", [pause_queue, pause_task, leave_unserved])
def test_unserved_jobs_do_not_block_other_waiters(claim, hold):
    hold()
    blockers = (
        paused_task.using(queue_name="elsewhere")
        if hold is pause_task
        else one_at_a_time.using(queue_name="elsewhere")
    )
    one_at_a_time.enqueue(0, 0)
    (first,) = claim()
    blockers.enqueue_many([("x",)] * 12 if hold is pause_task else [(1, 1)] * 12)
    one_at_a_time.enqueue(0, 1)

    assert "default" in settle(first).unblocked

    assert len(direct.claim(Lane("default", 0), first.process, 10)) == 1


@pytest.mark.parametrize("hold", [pause_queue, leave_unserved])
def test_unserved_jobs_use_no_start_times_of_a_rate(claim, hold):
    hold()
    of_rate = task(rate=Rate(1, per=1, group="calls"))(add.func)
    of_rate.enqueue(0, 0)
    claim()
    of_rate.using(queue_name="elsewhere").enqueue_many([(1, 1)] * 12)
    last = of_rate.enqueue(0, 1)

    direct.reserve_times()

    assert Job.objects.get(pk=last.id).state == State.SCHEDULED


def test_unused_rate_of_job_that_waits_for_its_account_goes_to_others(claim):
    account = limit(1, key=lambda a: a, group="account")
    task(concurrency=account)(add.func).enqueue(1, 0)
    claim()
    task(concurrency=account, rate=Rate(20, group="bank"))(add.func).enqueue_many(
        [(number, 0) for number in range(1, 5)]
    )
    assert claim() == []

    direct.reserve_times()

    assert Job.objects.scheduled().count() == 3


def test_jobs_behind_first_of_new_rate_get_start_times_at_its_claim(claim):
    task(rate=Rate(5, group="calls"))(add.func).enqueue_many([(n, 0) for n in range(4)])

    assert len(claim()) == 1

    assert Job.objects.scheduled().count() == 3


def test_jobs_of_busy_workers_do_not_block_other_waiters(claim):
    one_at_a_time.enqueue(0, 0)
    (first,) = claim()
    one_at_a_time.using(queue_name="busy").enqueue_many([(1, 1)] * 12)
    one_at_a_time.enqueue(0, 1)
    settle(first)

    direct.sweep(100)

    assert len(direct.claim(Lane("default", 0), first.process, 10)) == 1


# Random operations


QUEUES = ["a", "b", "c"]


def _could_run(served, paused_queues, paused_tasks):
    """Return blocked jobs that a worker serves and whose limits all have free slots."""
    jobs = list(Job.objects.filter(state=State.BLOCKED))
    numbers = Slot.objects.count_by_key({each["key"] for job in jobs for each in job.limits})
    return [
        job
        for job in jobs
        if job.queue in served
        and job.queue not in paused_queues
        and job.task not in paused_tasks
        and all(numbers[each["key"]] < each["max_running"] for each in job.limits)
    ]


def _tasks():
    bank = limit(3, group="bank")
    return [
        task(concurrency=(limit(1, key=lambda a: a), bank))(add.func),
        task(concurrency=(bank, limit(2, group="region", key=lambda account: account)))(
            charge.func
        ),
        task(
            concurrency=(
                limit(2, group="region", key=lambda name: str(name)),
                limit(1, group="desk"),
            )
        )(row.func),
        task(concurrency=limit(2, group="desk", key=lambda a: str(a)))(add.func),
    ]


def _call(which, random):
    return {
        0: (random.randint(1, 3), 0),
        1: (random.randint(1, 2),),
        2: (str(random.randint(1, 2)),),
        3: (random.randint(1, 2), 0),
    }[which]


@pytest.mark.parametrize("seed", range(int(os.environ.get("DBQUEUE_SEEDS", "12"))))
def test_sweep_starts_a_job_while_one_can_run(seed):
    """Run random operations, then alternate sweeps and claims until no blocked job can run."""
    chance, tasks = random.Random(seed), _tasks()
    workers = {
        a_process(f"worker {n}", details={"queues": ",".join(queues)}): queues
        for n, queues in enumerate([["a"], ["b"], ["a", "b"]])
    }
    paused_queues, paused_tasks = set(), set()
    own: list[Job] = []

    def claim(worker, limit):
        lanes = [
            Lane(queue, priority)
            for queue in workers[worker]
            for priority in (1, 0)
            if queue not in paused_queues
        ]
        wanted = ClaimedJob.objects.exclude(task__in=paused_tasks)
        group_size = chance.choice([1, 1, 2])
        claims = [
            direct.claim(lane, worker, limit, lambda job, line: group_size, jobs=wanted)
            for lane in lanes
        ]
        found = list(chain.from_iterable(claims))
        ends = [job for job in found if job.not_to_run]
        own.extend(found)
        if ends:
            own[:] = [job for job in own if job not in ends]
            settle(*ends)

    for _step in range(60):
        act = chance.choice(
            [
                "enqueue",
                "enqueue",
                "claim",
                "claim",
                "claim behind",
                "settle",
                "settle",
                "pause",
                "resume",
                "release",
                "discard",
            ]
        )
        if act == "enqueue":
            which = chance.randrange(len(tasks))
            at = tasks[which].using(
                queue_name=chance.choice(QUEUES), priority=chance.choice([0, 0, 1])
            )
            at.enqueue_many([_call(which, chance) for _ in range(chance.randint(1, 6))])
        elif act == "claim":
            claim(chance.choice(list(workers)), chance.randint(1, 5))
        elif act == "claim behind":
            if members := [job for job in own if job.slot_group and len(job.limits) == 1]:
                member = chance.choice(members)
                served = ClaimedJob.objects.exclude(queue__in=paused_queues)
                own += direct.claim_behind(
                    member,
                    member.process,
                    chance.randint(1, 3),
                    lambda job, line: 3,
                    jobs=served.exclude(task__in=paused_tasks),
                )
        elif act in ("settle", "release") and own:
            ends = [
                own.pop(chance.randrange(len(own)))
                for _ in range(min(len(own), chance.randint(1, 3)))
            ]
            if act == "settle":
                # A worker settles the jobs of one slot group in turn.
                groups = {job.slot_group for job in own} - {None}
                settle(*ends, keeps_slot=lambda job, groups=groups: job.slot_group in groups)
            else:
                direct.release(ends)
        elif act == "pause":
            if chance.random() < 0.5:
                paused_queues = {chance.choice(QUEUES)}
                Queue.objects.named(*QUEUES).resume()
                Queue.objects.named(*paused_queues).pause()
            else:
                paused_tasks = {chance.choice(tasks).module_path}
                TaskState.objects.named(*paused_tasks).pause()
        elif act == "resume":
            paused_queues, paused_tasks = set(), set()
            Queue.objects.all().resume()
            TaskState.objects.all().resume()
        elif act == "discard" and chance.random() < 0.3:
            Job.objects.ready().discard()
    paused_tasks = set(TaskState.objects.paused().values_list("name", flat=True))

    for worker in workers:
        claim(worker, 100)
    while _could_run({"a", "b"}, paused_queues, paused_tasks):
        before = running()
        direct.unblock_orphans(100)
        direct.sweep(100)
        for worker in workers:
            claim(worker, 100)
        assert running() > before
    for key in Semaphore.objects.exclude(max_running=None).values_list("key", flat=True):
        holders = {
            slot.slot_group: slot.max_running for slot in Slot.objects.taken().filter(semaphore=key)
        }
        assert len(holders) <= min(holders.values(), default=0)
