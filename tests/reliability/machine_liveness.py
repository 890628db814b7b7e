"""Liveness: a startable job starts within one dispatcher round and one claim of each worker."""

from __future__ import annotations

from typing import Any

from django.db import connection, transaction
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from django_dbqueue.compat import task_backends
from django_dbqueue.models import Batch, Job, Process, Semaphore, Slot
from django_dbqueue.models.enums import FINISHED, WAITING
from django_dbqueue.models.expressions import Now
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.worker.claimer import Claimer

from .. import direct
from ..conftest import all_claimed
from .machine_actors import LARGE, QUEUES, SERVED, LockHolder, State, actors, ends
from .machine_batches import OUTSIDE_CALLS, Batches
from .machine_keys import INTERRUPT
from .machine_limits import BANK, CLAIM_WAITERS, Limits, _keys, accounts, limited

# Columns that decide whether a job starts, and where it waits.
OF_A_WAIT = [
    "pk",
    "state",
    "attempt",
    "queue",
    "task",
    "priority",
    "run_after",
    "blocked_by",
    "limits",
]
# One rule for all operations without parameters, which would otherwise be most steps.
MAINTENANCE = [
    "dispatch",
    "dispatch",
    "sweep",
    "finish_batches_concurrently",
    "prune_members",
    "recover_silent",
    "retry",
]
BLOCK_HEAD = {
    "actor": actors,
    "full": st.sampled_from(BANK),
    "heads": st.sampled_from(BANK),
    "idle": st.sampled_from(["account", "queue", "worker"]),
    "ends": ends,
}
DISCARD_FIRST = {
    "actor": actors,
    "kind": limited,
    "account": accounts,
    "is_known": st.booleans(),
}
# Sequences of several steps, which random choice seldom produces.
SITUATIONS = {
    "enqueue_members_from_outside": OUTSIDE_CALLS,
    "block_head_of_waiters": BLOCK_HEAD,
    "discard_first_of_line": DISCARD_FIRST,
    "interrupt_stopped_or_rerun_jobs": INTERRUPT,
    "claim_waiters_concurrently": CLAIM_WAITERS,
}
if connection.vendor != "sqlite":
    SITUATIONS["work_with_locked_jobs"] = {
        "actor": actors,
        "first": st.integers(0, 2),
        "ends": ends,
    }
situations = [
    st.tuples(st.just(name), st.fixed_dictionaries(how)) for name, how in SITUATIONS.items()
]


class Liveness(Limits, Batches):
    def __init__(self) -> None:
        super().__init__()
        self.lock_holder = LockHolder()
        self.checked: Any = None

    def teardown(self) -> None:
        super().teardown()
        self.lock_holder.close()

    @initialize(situations=st.tuples(*situations).flatmap(st.permutations))
    def run_each_situation(self, situations):
        """Run each situation once: random choice alone does not guarantee that all occur."""
        for situation in situations:
            self.run_situation(situation)
            # The next situation may hide what this one has left.
            self._read_rows()
            self.startable_jobs_start_within_a_sweep()

    @rule(situation=st.one_of(situations))
    def run_situation(self, situation):
        name, how = situation
        getattr(self, name)(**how)
        self._after_concurrent_settle()

    @rule(name=st.sampled_from(MAINTENANCE))
    def do_maintenance(self, name):
        getattr(self, name)()

    @invariant()
    def startable_jobs_start_within_a_sweep(self):
        """Try it in a transaction, and roll back, after steps that have changed something.

        A sweep and a claim take slots, and release none: a job that cannot start before them
        cannot start after them. So each is tried for the jobs that need it.
        """
        semaphores, endable = _semaphores(), self._endable_batches()
        if (state := self._state(semaphores, endable)) == self.checked:
            return
        self.checked = state
        how = self._smallest_limits(semaphores), self.jobs[0].db_now if self.jobs else None
        startable = self._startable(self.jobs, semaphores, *how)
        if not startable and not endable:
            return
        states = {job.state for job in startable}
        with transaction.atomic():
            while State.SCHEDULED in states and direct.dispatch():
                pass
            if State.BLOCKED in states:
                self.sweep()
            if endable:
                direct.finish_batches()
            # One worker that serves all queues: others would hide what it leaves.
            actor = max(self.actors, key=lambda actor: "*" in actor.queues)
            all_claimed(Claimer("default", actor.process, actor.selector), 1000)
            rows = Job.objects.filter(pk__in=[job.pk for job in startable])
            left = self._startable(rows, _semaphores(), *how)
            assert not left, f"{left[0].task} {left[0].args} is {left[0].state}, and can run"
            assert not Batch.objects.filter(pk__in=endable, finished_at=None).exists(), (
                "all jobs of the batch have ended, and it is not finished"
            )
            transaction.set_rollback(True)

    def block_head_of_waiters(self, actor, full, heads, idle, ends):
        """Fill the bank: jobs that cannot run wait before one that can."""
        queue = {"account": "default", "queue": "mail", "worker": "Mail"}[idle]
        if idle == "queue" and queue not in self.paused:
            self.pause_or_resume(queue)
        for each in self.actors if idle == "worker" else ():
            self._release(each, len(each.held))
            self.deploy(each.number, SERVED[1])
        for account in "wxyz":
            self.enqueue_limited(full, account, "default", 1, False)
        self.claim(actor, 50)
        for number in range(9):
            self.enqueue_limited(
                heads, "busy" if idle == "account" else f"head {number}", queue, 1, False
            )
        self.enqueue_limited(BANK[0], "can run", "default", 1, False)
        for end in ends:
            self.claim(actor, 50)
            self.actors[actor].held.sort(key=lambda job: '"bank"' not in _keys(job))
            self.settle(actor, 1, [end])

    def discard_first_of_line(self, actor, kind, account, is_known):
        """Discard the jobs that would have taken the slots for which others wait."""
        if is_known:  # The limit has its row.
            self.enqueue_limited(kind, account, "default", 1, False)
            self.claim(actor, 50)
        self.enqueue_limited(kind, account, "default", 4, True)
        self._discard(Job.objects.ready().filter(limits__isnull=False))
        if is_known:
            self._release(self.actors[actor], len(self.actors[actor].held))
            self._discard(Job.objects.ready().filter(limits__isnull=False))

    def work_with_locked_jobs(self, actor, first, ends):
        """Give each actor jobs with locked rows, and others."""
        for _ in self.actors:
            self.enqueue("default", 0, 4, None, None)
        for each in self.actors:
            self.claim(each.number, 4)
        self.work_while_jobs_are_locked(actor, first, ends)

    @precondition(lambda self: connection.vendor != "sqlite")
    @rule(actor=actors, first=st.integers(0, 2), ends=ends)
    def work_while_jobs_are_locked(self, actor, first, ends):
        """Work on unlocked rows does not wait for locked ones, however long the locks last."""
        dies, *live = [*self.actors[actor:], *self.actors[:actor]]
        locked = frozenset(list(Job.objects.order_by("pk").values_list("pk", flat=True))[first::3])
        with self.lock_holder.holding(Job.objects.filter(pk__in=locked)):
            for each in live:
                self._record_settled(*self._start_settle(each, 4, ends), locked=locked)
                self._release(each, 2, locked)
            began = _sweep()
            for each in live:
                jobs = self._start_claim(each, 50).result(30)
                assert not locked & {job.pk for job in jobs}
                self._record_claimed(each, jobs)
            assert (
                set(Job.objects.due().filter(run_after__lt=began).values_list("pk", flat=True))
                <= locked
            )
            left = list(Job.objects.ready().filter(limits__isnull=True).exclude(pk__in=locked))
            # A claim ends at a job that is too large for the rest of its limit.
            if not any(isinstance(job.args[0], str) and len(job.args[0]) == LARGE for job in left):
                served = {queue for queue in QUEUES if any(each.serves(queue) for each in live)}
                assert not [job for job in left if self._is_startable(job, served)], (
                    "the job is ready, and no worker claims it"
                )
            name, dead = dies.process.name, Process.objects.filter(pk=dies.process.pk)
            dies.call(
                recovery.recover,
                task_backends["default"],
                dead,
                recovery.ExitReason(how="was killed"),
                list,
            )
            assert set(Job.objects.orphaned().values_list("pk", flat=True)) <= locked, (
                "the job is lost, and not recovered"
            )
        self._record_recovered({name})
        self.refused.clear()

    @precondition(lambda self: connection.vendor != "sqlite")
    @rule(
        actor=actors, ends=ends, limit=st.integers(1, 5), rows=st.sampled_from([Semaphore, Batch])
    )
    def work_after_unlock(self, actor, ends, limit, rows):
        """Operations on locked rows wait for them, and then complete."""
        with self.lock_holder.holding(rows.objects.all()):
            futures = [
                self._start_settle(each, 4, ends) for each in self.actors if each.number != actor
            ]
            claiming = self._start_claim(self.actors[actor], limit)
        for each in futures:
            self._record_settled(*each)
        self._record_claimed(self.actors[actor], claiming.result(30))
        self._after_concurrent_settle()

    def _state(self, semaphores, endable):
        """Return all that decides which jobs start."""
        jobs = [tuple(getattr(job, name) for name in OF_A_WAIT) for job in self.jobs]
        served = [actor.queues for actor in self.actors]
        return sorted(jobs), semaphores, endable, served, set(self.paused), self.restricted

    def _smallest_limits(self, semaphores):
        """Return the smallest limit of each key, of its jobs and of its semaphore."""
        numbers = {key: most for key, (most, *_) in semaphores.items() if most is not None}
        for job in self.jobs:
            for each in job.limits or () if job.state not in FINISHED else ():
                if "max_running" in each:
                    numbers[each["key"]] = min(
                        each["max_running"], numbers.get(each["key"], each["max_running"])
                    )
        return numbers

    def _startable(self, jobs, semaphores, numbers, now):
        """Return the waiting jobs that a dispatcher or a worker has to take now."""
        served = {queue for queue in QUEUES if any(each.serves(queue) for each in self.actors)}
        taken = Slot.objects.count_by_key(numbers) if numbers else {}

        def has_room(limit: dict[str, Any]) -> bool:
            key = limit["key"]
            if "max_running" in limit:
                return taken[key] < numbers[key]
            _most, *times = semaphores.get(key, [None])
            return all(time is None or time <= now for time in times)

        def can_run(job: Any) -> bool:
            if job.state == State.SCHEDULED:
                return job.run_after < now
            return self._is_startable(job, served) and all(map(has_room, job.limits or ()))

        return [job for job in jobs if job.state in WAITING and can_run(job)]


def _semaphores() -> dict[str, tuple[Any, ...]]:
    """Return the limit of each semaphore, and the times of its rate."""
    rows = Semaphore.objects.values_list("pk", "max_running", "booked", "earliest")
    return {key: tuple(row) for key, *row in rows}


def _sweep() -> Any:
    """Run one round of a dispatcher. Return its start: lost jobs are due again within seconds."""
    began = Process.objects.values_list(Now(), flat=True)[0]
    while direct.dispatch():
        pass
    direct.reserve_times()
    direct.sweep(1000)
    direct.unblock_orphans(1000)
    direct.finish_batches()
    return began
