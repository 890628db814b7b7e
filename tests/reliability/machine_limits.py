"""Limits: no key exceeds its limit, and no job waits for a free slot."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from django_dbqueue import Rate, limit, task
from django_dbqueue.models import Slot

from .. import direct, tasks
from .machine_actors import State, actors, queues
from .machine_jobs import Jobs

# A limit and a rate with similar names; the rate allows two starts at a time.
audit = task(
    concurrency=limit(1, group="rate bank"), rate=Rate(2, per=3600, group="bank", burst=2)
)(tasks.audit.func)
LIMITED = {
    "two of an account": (tasks.charge, 1),
    "one": (tasks.one_at_a_time, 0),
    "one of an account, and two": (tasks.report, 1),
    "one, or none": (tasks.scan, 0),
    "one of an account, and three of its bank": (tasks.withdraw, 1),
    "two of the same bank": (tasks.deposit, 1),
    "one of a name, and two an hour of the same": (audit, 0),
}
BANK = ["one of an account, and three of its bank", "two of the same bank"]
# Accounts that a collation may take for equal.
accounts = st.sampled_from(["a", "a", "A", "a ", "\u00e1", "a\u0301"])
limited = st.sampled_from(list(LIMITED))
# Kinds of jobs that are claimed in succession and share waiters.
waiter_kinds = st.one_of(st.tuples(limited), st.permutations(BANK))
CLAIM_WAITERS = {"kinds": waiter_kinds, "account": accounts, "limit": st.integers(1, 3)}


class Limits(Jobs):
    def __init__(self) -> None:
        super().__init__()
        # By (job, attempt): the slot group of the claim, and its limits.
        self.under: dict[tuple[str, int], tuple[Any, list[dict[str, Any]]]] = {}
        self.claims = 0
        self.refused: list[Any] = []

    @rule(
        kind=limited,
        account=accounts,
        queue=queues,
        number=st.integers(1, 4),
        together=st.booleans(),
    )
    def enqueue_limited(self, kind, account, queue, number, together):
        """Enqueue at once, or one by one: then no call sees waiters, and all jobs are ready."""
        task, arity = LIMITED[kind]
        calls = [(account,) * arity] * number
        using = task.using(queue_name=queue)
        self._record_enqueued(
            *(using.enqueue_many(calls) if together else [using.enqueue(*call) for call in calls])
        )

    def claim_waiters_concurrently(self, kinds, account, limit):
        for kind in kinds:
            self.enqueue_limited(kind, account, "default", 3, False)
        self.claim_concurrently(limit)

    def sweep(self):
        direct.reserve_times()
        direct.sweep(1000)
        direct.unblock_orphans(1000)

    @rule(actor=actors, limit=st.integers(1, 5))
    def sweep_and_prune_during_claim(self, actor, limit):
        claiming = self._start_claim(self.actors[actor], limit)
        sweeping = self.actors[actor - 1].submit(direct.sweep, 1000)
        pruning = self.actors[actor - 2].submit(direct.prune_semaphores, 1000)
        sweeping.result(30), pruning.result(30)
        self._record_claimed(self.actors[actor], claiming.result(30))

    @invariant()
    def no_limit_is_exceeded(self):
        running, most = self._running()
        for key, number in running.items():
            assert number <= most[key], f"{key}: {number} jobs run, the limit is {most[key]}"
        keys = {key for job in self.jobs for key in _keys(job)}
        assert Slot.objects.count_by_key(keys | running.keys()) == running, (
            "the taken slots differ from those of the running jobs"
        )
        for job in self.refused:
            full = [
                each["key"] for each in job.limits if running[each["key"]] == each["max_running"]
            ]
            assert full, "the job was discarded though a slot was free"
        self.refused.clear()

    @invariant()
    def blocked_jobs_name_their_limit(self):
        for job in self.jobs:
            assert job.state != State.BLOCKED or job.blocked_by in _keys(job)

    def _record_claimed(self, actor, jobs):
        super()._record_claimed(actor, jobs)
        self.claims += 1
        for job in jobs:
            slot_group = self.claims, job.slot_group
            self.under[str(job.pk), job.attempt] = (
                slot_group,
                [] if job.not_to_run else job.limits or [],
            )
        self.refused += [job for job in jobs if job.not_to_run]

    def _after_concurrent_settle(self):
        self.refused.clear()

    def _running(self):
        """Return by key the number of running jobs, and the smallest limit of them.

        Jobs of one slot group run one after the other, and count as one.
        """
        fences = {(str(job.pk), job.attempt) for job in self.jobs if job.state == State.RUNNING}
        claimed = [self.under[fence] for fence in fences & self.under.keys()]
        held = {
            (each["key"], slot_group): each["max_running"]
            for slot_group, limits in claimed
            for each in limits
            if "max_running" in each
        }
        running, most = Counter(key for key, _group in held), dict[str, int]()
        for (key, _group), number in held.items():
            most[key] = min(number, most.get(key, number))
        return running, most


def _keys(job: Any) -> list[str]:
    return [limit["key"] for limit in job.limits or ()]
