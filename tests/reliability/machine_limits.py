"""Never more of a key run at a time than its limit allows, and none waits for a slot that is free."""

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

# A limit and a rate whose names could be taken for one; the rate lets two start at a time.
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
# Some that a database may take for one.
accounts = st.sampled_from(["a", "a", "A", "a ", "\u00e1", "a\u0301"])
limited = st.sampled_from(list(LIMITED))
# What is claimed one after the other from one line.
lines = st.one_of(st.tuples(limited), st.permutations(BANK))
CLAIM_FROM_A_LINE = {"whats": lines, "account": accounts, "limit": st.integers(1, 3)}


class Limits(Jobs):
    def __init__(self) -> None:
        super().__init__()
        # By (job, attempt): the slot group in which it was claimed, and under which limits.
        self.under: dict[tuple[str, int], tuple[Any, list[dict[str, Any]]]] = {}
        self.claims = 0
        self.refused: list[Any] = []

    @rule(
        what=limited,
        account=accounts,
        queue=queues,
        number=st.integers(1, 4),
        together=st.booleans(),
    )
    def enqueue_limited(self, what, account, queue, number, together):
        """One by one nobody sees a line, so all are ready."""
        task, arity = LIMITED[what]
        calls = [(account,) * arity] * number
        using = task.using(queue_name=queue)
        self._asked(
            *(using.enqueue_many(calls) if together else [using.enqueue(*call) for call in calls])
        )

    def many_claim_from_one_line(self, whats, account, limit):
        for what in whats:
            self.enqueue_limited(what, account, "default", 3, False)
        self.claim_together(limit)

    def sweep(self):
        direct.reserve_times()
        direct.sweep(1000)
        direct.unblock_orphans(1000)

    @rule(actor=actors, limit=st.integers(1, 5))
    def sweep_and_prune_while_one_claims(self, actor, limit):
        claiming = self._ask_claim(self.actors[actor], limit)
        sweeping = self.actors[actor - 1].begin(direct.sweep, 1000)
        pruning = self.actors[actor - 2].begin(direct.prune_semaphores, 1000)
        sweeping.result(30), pruning.result(30)
        self._got(self.actors[actor], claiming.result(30))

    @invariant()
    def no_limit_is_exceeded(self):
        running, most = self._running()
        for key, number in running.items():
            assert number <= most[key], f"{key}: {number} run, of {most[key]}"
        keys = {key for job in self.jobs for key in _keys(job)}
        assert Slot.objects.count_by_key(keys | running.keys()) == running, (
            "what counts are the slots of those that run"
        )
        for job in self.refused:
            full = [each["key"] for each in job.limits if running[each["key"]] == each["most"]]
            assert full, "it was called off although there was a slot"
        self.refused.clear()

    @invariant()
    def what_is_blocked_says_by_what(self):
        for job in self.jobs:
            assert job.state != State.BLOCKED or job.blocked_by in _keys(job)

    def _got(self, actor, jobs):
        super()._got(actor, jobs)
        self.claims += 1
        for job in jobs:
            slot_group = self.claims, job.slot_group
            self.under[str(job.pk), job.attempt] = (
                slot_group,
                [] if job.not_to_run else job.limits or [],
            )
        self.refused += [job for job in jobs if job.not_to_run]

    def _settled_beside_a_claim(self):
        self.refused.clear()

    def _running(self):
        """How many run at a time of each key, and the smallest number that one of them allows: those of one slot group, which run one
        after the other, count as one.
        """
        fences = {(str(job.pk), job.attempt) for job in self.jobs if job.state == State.RUNNING}
        claimed = [self.under[fence] for fence in fences & self.under.keys()]
        held = {
            (each["key"], slot_group): each["most"]
            for slot_group, limits in claimed
            for each in limits
            if "most" in each
        }
        running, most = Counter(key for key, _series in held), dict[str, int]()
        for (key, _series), number in held.items():
            most[key] = min(number, most.get(key, number))
        return running, most


def _keys(job: Any) -> list[str]:
    return [limit["key"] for limit in job.limits or ()]
