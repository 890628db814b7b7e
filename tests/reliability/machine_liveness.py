"""What may run runs within a sweep: a round of a dispatcher, and a claim of each worker. Held locks hold up nothing else."""

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
from .machine_actors import LARGE, QUEUES, SERVED, State, Stranger, actors, ends
from .machine_batches import ASK_FROM_OUTSIDE, Batches
from .machine_keys import INTERRUPT
from .machine_limits import BANK, CLAIM_FROM_A_LINE, Limits, _keys

# After so many steps it is looked whether all that may run does.
STEPS = 8
# One rule for all that needs no choice: as one rule each, they would be most of the steps.
CHORES = [
    "dispatch",
    "dispatch",
    "sweep",
    "finish_batches_together",
    "prune_members",
    "recover_the_silent",
    "retry",
]
HEAD_A_LINE = {
    "actor": actors,
    "full": st.sampled_from(BANK),
    "heads": st.sampled_from(BANK),
    "idle": st.sampled_from(["account", "queue", "worker"]),
    "ends": ends,
}
# What takes several steps in one order, which are seldom drawn one by one.
SITUATIONS = {
    "ask_from_outside_for_members": ASK_FROM_OUTSIDE,
    "head_a_line_by_what_cannot_run": HEAD_A_LINE,
    "interrupt_what_was_stopped_or_asked_for_again": INTERRUPT,
    "many_claim_from_one_line": CLAIM_FROM_A_LINE,
}
if connection.vendor != "sqlite":
    SITUATIONS["work_beside_locked_rows"] = {
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
        self.steps = 0
        self.stranger = Stranger()

    def teardown(self) -> None:
        super().teardown()
        self.stranger.close()

    @initialize(situations=st.tuples(*situations).flatmap(st.permutations))
    def begin_with_all_situations(self, situations):
        """What is drawn is far from even: that they come now and then is not enough."""
        for situation in situations:
            self.come_into_a_situation(situation)

    @rule(situation=st.one_of(situations))
    def come_into_a_situation(self, situation):
        name, how = situation
        getattr(self, name)(**how)
        self._settled_beside_a_claim()

    @rule(what=st.sampled_from(CHORES))
    def do_a_chore(self, what):
        getattr(self, what)()

    @invariant()
    def what_may_run_runs_within_a_sweep(self):
        """Tried, and rolled back."""
        self.steps += 1
        if self.steps % STEPS == 0 and (
            self.batches or any(job.state in WAITING for job in self.jobs)
        ):
            numbers = self._smallest_numbers()
            with transaction.atomic():
                began = _sweep()
                for actor in self.actors:
                    all_claimed(Claimer("default", actor.process, actor.selector), 1000)
                self._look_for_idle_slots(began, numbers)
                transaction.set_rollback(True)

    def head_a_line_by_what_cannot_run(self, actor, full, heads, idle, ends):
        """The bank is full, and jobs of one account, of a paused queue or of one without workers wait before one that can run."""
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
        self.steps = -1  # Looked at now.

    def work_beside_locked_rows(self, actor, first, ends):
        """Each actor holds jobs with locked rows, and others."""
        for _ in self.actors:
            self.enqueue("default", 0, 4, None, None)
        for each in self.actors:
            self.claim(each.number, 4)
        self.work_while_others_hold_jobs(actor, first, ends)

    @precondition(lambda self: connection.vendor != "sqlite")
    @rule(actor=actors, first=st.integers(0, 2), ends=ends)
    def work_while_others_hold_jobs(self, actor, first, ends):
        """For how long does not matter: what is done beside does not wait for it."""
        dies, *live = [*self.actors[actor:], *self.actors[:actor]]
        locked = frozenset(list(Job.objects.order_by("pk").values_list("pk", flat=True))[first::3])
        with self.stranger.holding(Job.objects.filter(pk__in=locked)):
            for each in live:
                self._told(*self._ask_settle(each, 4, ends), locked=locked)
                self._release(each, 2, locked)
            began = _sweep()
            for each in live:
                jobs = self._ask_claim(each, 50).result(30)
                assert not locked & {job.pk for job in jobs}
                self._got(each, jobs)
            assert (
                set(Job.objects.due().filter(run_after__lt=began).values_list("pk", flat=True))
                <= locked
            )
            left = list(Job.objects.ready().filter(limits__isnull=True).exclude(pk__in=locked))
            # A claim ends at what is too large to be held beside the rest.
            if not any(isinstance(job.args[0], str) and len(job.args[0]) == LARGE for job in left):
                served = {queue for queue in QUEUES if any(each.serves(queue) for each in live)}
                assert not [job for job in left if self._may_start(job, served)], (
                    "it is ready, and nobody takes it"
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
                "it is lost, and not recovered"
            )
        self._learn_of_recovered({name})
        self.refused.clear()

    @precondition(lambda self: connection.vendor != "sqlite")
    @rule(
        actor=actors, ends=ends, limit=st.integers(1, 5), rows=st.sampled_from([Semaphore, Batch])
    )
    def work_once_others_let_go(self, actor, ends, limit, rows):
        """What needs these rows waits for them, and goes on."""
        with self.stranger.holding(rows.objects.all()):
            asked = [
                self._ask_settle(each, 4, ends) for each in self.actors if each.number != actor
            ]
            claiming = self._ask_claim(self.actors[actor], limit)
        for each in asked:
            self._told(*each)
        self._got(self.actors[actor], claiming.result(30))
        self._settled_beside_a_claim()

    def _smallest_numbers(self):
        """By key, of all limits at hand: where jobs do not agree, the smallest holds, and that of the job claimed last."""
        numbers = dict(Semaphore.objects.exclude(most=None).values_list("pk", "most"))
        for job in self.jobs:
            for each in job.limits or () if job.state not in FINISHED else ():
                if "most" in each:
                    numbers[each["key"]] = min(each["most"], numbers.get(each["key"], each["most"]))
        return numbers

    def _look_for_idle_slots(self, began, numbers):
        rows, served = (
            Job.objects.annotate(db_now=Now()),
            {queue for queue in QUEUES if any(a.serves(queue) for a in self.actors)},
        )
        taken, semaphores = Slot.objects.count_by_key(numbers), Semaphore.objects.in_bulk()

        def has_room(limit: dict[str, Any], job: Any) -> bool:
            key = limit["key"]
            if "most" in limit:
                return taken[key] < numbers[key]
            row = semaphores.get(key)
            return row is None or (
                (row.booked is None or row.booked <= job.db_now)
                and (not row.earliest or row.earliest <= job.db_now)
            )

        for job in rows.filter(state__in=WAITING):
            if job.state == State.SCHEDULED:
                assert job.run_after >= began, "it is due, and not ready"
            elif self._may_start(job, served):
                assert not all(has_room(limit, job) for limit in job.limits or ()), (
                    f"{job.task} {job.args} waits beside a free slot"
                )
        unfinished = set(Batch.objects.filter(finished_at=None).values_list("pk", flat=True))
        assert not self._may_end() & unfinished, "all of its jobs have ended, and it has not"


def _sweep() -> Any:
    """What a dispatcher does in a round. Returns when it has begun: jobs that are lost are due again within seconds."""
    began = Process.objects.values_list(Now(), flat=True)[0]
    while direct.dispatch():
        pass
    direct.reserve_times()
    direct.sweep(1000)
    direct.unblock_orphans(1000)
    direct.finish_batches()
    return began
