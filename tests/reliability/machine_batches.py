"""Pipelines go on exactly with the attempts that were accepted; what follows a batch comes once, when all of it has ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from django_dbqueue import batch, pipeline
from django_dbqueue.exceptions import BatchFinished
from django_dbqueue.models import Batch, Job
from django_dbqueue.models.enums import FINISHED, UNSUCCESSFUL, State
from django_dbqueue.models.expressions import after

from .. import direct, tasks
from .machine_actors import ENDS, actors, ends, queues
from .machine_keys import KINDS, Keys, _row, _stage, wishes

WALK = pipeline(tasks.grind, tasks.charge.using(queue_name="mail"), tasks.pour)
AFTER = {tasks.sum_up.module_path: "on_finish", tasks.rejoice.module_path: "on_success"}
# How the block of a batch's opener ends. One that dies in it leaves it open.
openers = st.sampled_from(["ends", "ends", "raises", "dies"])
MEMBERS = {"plain": tasks.add, "limited": tasks.charge, "walks": WALK}
members = st.lists(st.sampled_from(list(MEMBERS)), max_size=3)
# What becomes of a member that another asks for.
FATES = [["ask"], ["run", "ask", "end"], ["run", "end", "ask"]]
last_ends = st.sampled_from([end for end in ENDS if end.state in FINISHED])
ASK_FROM_OUTSIDE = {
    "kinds": st.permutations(list(KINDS)),
    "fates": st.permutations(FATES).map(lambda fates: fates[:2]),
    "wish": wishes,
    "call": wishes,
    "actor": actors,
    "end": last_ends,
}


class Walks(Keys):
    @rule(queue=queues, number=st.integers(1, 3))
    def enqueue_what_walks(self, queue, number):
        first = tasks.grind.using(queue_name=queue)
        walk = pipeline(first, *WALK.stages[1:])
        self._asked(*walk.enqueue_many([(1,)] * number), stage=0)


class Batches(Keys):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[UUID] = []
        self.left_open: list[UUID] = []
        # Of batches whose opener has raised: nothing follows. Those that are to have no on_success, whatever their rows say.
        self.called_off_batches: set[UUID] = set()
        self.spoiled: set[UUID] = set()
        self.finished: set[UUID] = set()
        # By batch and job: the attempt that the job was at when it was asked for in it, until the run that was meant has ended.
        self.pending: dict[tuple[UUID, str], int] = {}
        # By batch: all jobs that were asked for in it.
        self.members: defaultdict[UUID, set[str]] = defaultdict(set)
        # By batch: what followed it.
        self.followed: defaultdict[str, dict[str, str]] = defaultdict(dict)

    @rule(members=members, wish=st.none() | wishes, actor=actors, ends=ends, how=openers)
    def open_a_batch(self, members, wish, actor, ends, how):
        """Inside its block, a member adds to it, and all that is there by then ends: it is not finished."""
        opened = batch(on_finish=tasks.sum_up, on_success=tasks.rejoice)
        try:
            with opened if how != "dies" else _dies(opened):
                self.batches.append(opened.id)
                for what in members:
                    self._joined(
                        opened.id, MEMBERS[what].enqueue(1), stage=0 if what == "walks" else None
                    )
                if wish:
                    self._ask_in(opened.id, wish)
                self._learn_of_added(opened.id, self.actors[actor].begin(_add, opened.id))
                self._learn_of_added(opened.id, self.actors[actor - 1].begin(_add, opened.id, True))
                self.claim(actor, 5)
                self.settle(actor, 4, ends)
                self._settled_beside_a_claim()
                assert not direct.finish_batches([opened.id]), (
                    "it finished before all of it was enqueued"
                )
                if how == "raises":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            self.called_off_batches.add(opened.id)
            self.not_to_run |= {
                str(pk)
                for pk in Job.objects.filter(batch=opened.id, state=State.DISCARDED).values_list(
                    "pk", flat=True
                )
            }
        if how == "dies":
            self.left_open.append(opened.id)

    def ask_from_outside_for_members(self, kinds, fates, wish, call, actor, end):
        for kind, fate in zip(kinds, fates, strict=False):
            self._ask_from_outside_for_a_member(wish._replace(kind=kind), call, actor, end, fate)

    def _ask_from_outside_for_a_member(self, wish, call, actor, end, fate):
        """What others ask of it is no matter of its batch, which waits for the run that it asked for, and counts its failure."""
        with batch(on_finish=tasks.sum_up, on_success=tasks.rejoice) as opened:
            self.batches.append(opened.id)
            self._ask_in(opened.id, wish._replace(wait=None))
            job = None
            for what in fate:
                if what == "ask":
                    # Of the block that this thread is in, the actor's knows nothing.
                    self.ask(actor - 1, call._replace(kind=wish.kind, key=wish.key))
                elif what == "run":
                    self.claim(actor, 50)
                    job = self._held(actor, wish)
                elif job:
                    settling = self._ask_settle(self.actors[actor], 1, [end])
                    self._told(*settling, locked=frozenset())
                    asked_at = self.pending.get((opened.id, str(job.pk)), job.attempt)
                    if asked_at < job.attempt and settling[1][0].state in UNSUCCESSFUL:
                        self.spoiled.add(opened.id)

    @precondition(lambda self: self.left_open)
    @rule()
    def give_up_openers(self):
        """They have added nothing for long. What they have left may not be the whole."""
        Batch.objects.filter(pk__in=self.left_open).update(opened_until=after(-1))
        assert set(direct.seal_abandoned()) == set(self.left_open)
        self.spoiled.update(self.left_open)
        self.left_open.clear()

    @precondition(lambda self: self.batches)
    @rule(actor=actors, number=st.integers(0, 9))
    def add_to_a_batch(self, actor, number):
        pk = self._a_batch(number)
        self._learn_of_added(pk, self.actors[actor].begin(_add, pk))

    @precondition(lambda self: self.batches)
    @rule(number=st.integers(0, 9), wish=wishes)
    def ask_in_a_batch(self, number, wish):
        pk = self._a_batch(number)
        try:
            with batch.of(pk):
                self._ask_in(pk, wish)
        except BatchFinished:
            assert pk in set(Batch.objects.exclude(finished_at=None).values_list("pk", flat=True))

    @precondition(lambda self: self.batches)
    @rule(actor=actors, number=st.integers(0, 9), ends=ends)
    def add_to_a_batch_while_its_jobs_end(self, actor, number, ends):
        others = [each for each in self.actors if each.number != actor]
        asked = [self._ask_settle(each, 4, ends) for each in others]
        pk = self._a_batch(number)
        adding = self.actors[actor].begin(_add, pk)
        for each in asked:
            self._told(*each)
        self._learn_of_added(pk, adding)

    @precondition(lambda self: self.batches)
    @rule(number=st.integers(0, 9))
    def discard_a_batch(self, number):
        self._call_off(Batch.objects.get(pk=self._a_batch(number)).jobs().waiting())

    def finish_batches_together(self):
        for each in [actor.begin(direct.finish_batches) for actor in self.actors]:
            each.result(30)
        assert not Batch.objects.due().exists()

    def prune_members(self):
        """Those of batches that have not finished may have failed before they go."""
        unfinished = Batch.objects.filter(finished_at=None).values("pk")
        rows = Job.objects.filter(state=State.FAILED, batch__in=unfinished)
        self.spoiled.update(rows.values_list("batch", flat=True))
        self.prune(State.FAILED)

    @invariant()
    def what_follows_a_batch_comes_when_all_of_it_has_ended(self):
        self._end_runs()
        finished = set(Batch.objects.filter(finished_at__isnull=False).values_list("pk", flat=True))
        for pk in finished - self.finished:
            states = {job.state for job in self.jobs if job.batch_id == pk}
            assert states <= set(FINISHED), "it finished before its jobs had"
            assert pk not in self.left_open, "it finished though its opener may add to it"
            followed = set(self.followed[str(pk)])
            if pk in self.called_off_batches:
                assert not followed
            elif pk in self.spoiled or states & set(UNSUCCESSFUL):
                assert followed == {"on_finish"}
            elif any(job in self.of_keys for job in self.members[pk]):
                # A run that has failed may have lost its row to the next one.
                assert "on_finish" in followed
            else:
                assert followed == {"on_finish", "on_success"}
        assert not (early := {(pk, job) for pk, job in self.pending if pk in finished}), (
            f"it finished before its jobs had: {early}"
        )
        self.finished = finished
        assert set(map(UUID, self.followed)) <= finished, (
            "something followed before it had finished"
        )

    def _may_end(self):
        """Batches that wait for nothing."""
        waiting = {
            str(pk) for pk in Job.objects.exclude(state__in=FINISHED).values_list("pk", flat=True)
        }
        return {
            pk for pk in self.batches if pk not in self.left_open and not self.members[pk] & waiting
        }

    def _end_runs(self):
        over = {str(job.pk) for job in self.jobs if job.state in FINISHED} | self.gone
        ended = {fence for fence, end in self.ended.items() if end != "released"}
        last = defaultdict(int)
        for pk, attempt in ended - self.goes_on:
            last[pk] = max(last[pk], attempt)
        self.pending = {
            key: at for key, at in self.pending.items() if key[1] not in over and last[key[1]] <= at
        }

    def _look(self):
        super()._look()
        rows = Job.objects.filter(task__in=AFTER).values_list("pk", "task", "args")
        for pk, task, (of,) in [(str(pk), task, args) for pk, task, args in rows]:
            assert self.followed[of].setdefault(AFTER[task], pk) == pk, "it followed twice"
            self.enqueued.add(pk)
            self.wanted[pk] = None, [of]

    def _a_batch(self, number):
        return self.batches[-1 - number % len(self.batches)]

    def _accepted(self, outcome):
        super()._accepted(outcome)
        for members in self.members.values():
            if str(outcome.fence[0]) in members:
                members.update(str(child.pk) for child in outcome.children)

    def _ask_in(self, pk, wish):
        before = _row(wish)
        task, args = self._call(wish, before)
        result = task.enqueue(*args)
        self._answered(wish, before, result)
        if result.enqueued != "ignored":
            self._joined(pk, result, stage=_stage(wish))

    def _joined(self, pk, result, stage=None):
        self._asked(result, stage=stage)
        self.members[pk].add(result.id)
        self.pending[pk, result.id] = Job.objects.values_list("attempt", flat=True).get(
            pk=result.id
        )

    def _learn_of_added(self, pk, adding):
        """One that was called off at once, as its block has raised, is no member."""
        for result in adding.result(30):
            if Job.objects.filter(pk=result.id, batch=pk).exists():
                self._joined(pk, result)
            else:
                self._asked(result)
                self.not_to_run.add(result.id)


def _add(pk: UUID, and_raise: bool = False):
    """As a member does. Returns the results; none if the batch has finished."""
    results: list[Any] = []
    try:
        with batch.of(pk):
            results.append(tasks.add.enqueue(1))
            if and_raise:
                raise ZeroDivisionError
    except (BatchFinished, ZeroDivisionError):
        pass
    return results


@contextmanager
def _dies(opened: batch) -> Iterator[None]:
    """Nothing of what its process would have done at the end of the block is done."""
    opened.__enter__()
    yield
    opened._pop()
