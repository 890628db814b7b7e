"""Pipelines and batches: stages follow accepted attempts, one callback the last job."""

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
from django_dbqueue.models.expressions import now_plus

from .. import direct, tasks
from .machine_actors import ENDS, actors, ends, queues
from .machine_keys import KINDS, Keys, _row, _stage, keyed_calls

PIPELINE = pipeline(tasks.grind, tasks.charge.using(queue_name="mail"), tasks.pour)
AFTER = {tasks.sum_up.module_path: "on_finish", tasks.rejoice.module_path: "on_success"}
# How the opener's block ends. An opener that dies leaves the batch open.
openers = st.sampled_from(["ends", "ends", "raises", "dies"])
MEMBERS = {"plain": tasks.add, "limited": tasks.charge, "pipeline": PIPELINE}
members = st.lists(st.sampled_from(list(MEMBERS)), max_size=3)
# The order of an outside enqueue, the member's run and its end.
SEQUENCES = [["enqueue"], ["run", "enqueue", "end"], ["run", "end", "enqueue"]]
last_ends = st.sampled_from([end for end in ENDS if end.state in FINISHED])
OUTSIDE_CALLS = {
    "kinds": st.permutations(list(KINDS)),
    "sequences": st.permutations(SEQUENCES).map(lambda sequences: sequences[:2]),
    "keyed_call": keyed_calls,
    "call": keyed_calls,
    "actor": actors,
    "end": last_ends,
}


class Pipelines(Keys):
    @rule(queue=queues, number=st.integers(1, 3))
    def enqueue_pipelines(self, queue, number):
        first = tasks.grind.using(queue_name=queue)
        pipeline_task = pipeline(first, *PIPELINE.stages[1:])
        self._record_enqueued(*pipeline_task.enqueue_many([(1,)] * number), stage=0)


class Batches(Keys):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[UUID] = []
        self.left_open: list[UUID] = []
        # Batches whose opener has raised get no callback; spoiled ones get no on_success.
        self.discarded_batches: set[UUID] = set()
        self.spoiled: set[UUID] = set()
        self.finished: set[UUID] = set()
        # By batch and job: the job's attempt when it joined, until a later run has ended.
        self.pending: dict[tuple[UUID, str], int] = {}
        # By batch: all member jobs.
        self.members: defaultdict[UUID, set[str]] = defaultdict(set)
        # By batch: its callback jobs.
        self.followed: defaultdict[str, dict[str, str]] = defaultdict(dict)

    @rule(members=members, keyed_call=st.none() | keyed_calls, actor=actors, ends=ends, how=openers)
    def open_batch(self, members, keyed_call, actor, ends, how):
        """The batch does not finish inside the opener's block, even if all of its jobs end."""
        opened = batch(on_finish=tasks.sum_up, on_success=tasks.rejoice)
        try:
            with opened if how != "dies" else _dies(opened):
                self.batches.append(opened.id)
                for kind in members:
                    self._record_member(
                        opened.id, MEMBERS[kind].enqueue(1), stage=0 if kind == "pipeline" else None
                    )
                joined = self._enqueue_in_batch(opened.id, keyed_call) if keyed_call else None
                self._record_added(opened.id, self.actors[actor].submit(_add, opened.id))
                self._record_added(opened.id, self.actors[actor - 1].submit(_add, opened.id, True))
                self.claim(actor, 5)
                self.settle(actor, 4, ends)
                self._after_concurrent_settle()
                assert not direct.finish_batches([opened.id]), (
                    "the batch finished before its block has ended"
                )
                if how == "raises":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            self.discarded_batches.add(opened.id)
            if joined and joined.enqueued == "merged":
                # The job was there before the block, and leaves its batch.
                self.pending.pop((opened.id, joined.id), None)
                self.members[opened.id].discard(joined.id)
            self.not_to_run |= {
                str(pk)
                for pk in Job.objects.filter(batch=opened.id, state=State.DISCARDED).values_list(
                    "pk", flat=True
                )
            }
        if how == "dies":
            self.left_open.append(opened.id)

    def enqueue_members_from_outside(self, kinds, sequences, keyed_call, call, actor, end):
        for kind, sequence in zip(kinds, sequences, strict=False):
            self._enqueue_member_from_outside(
                keyed_call._replace(kind=kind), call, actor, end, sequence
            )

    def _enqueue_member_from_outside(self, keyed_call, call, actor, end, sequence):
        """A batch waits for its own run of a keyed job, and ignores outside calls."""
        with batch(on_finish=tasks.sum_up, on_success=tasks.rejoice) as opened:
            self.batches.append(opened.id)
            self._enqueue_in_batch(opened.id, keyed_call._replace(wait=None))
            job = None
            for action in sequence:
                if action == "enqueue":
                    # The actor's thread is not inside this thread's batch block.
                    self.enqueue_key(
                        actor - 1, call._replace(kind=keyed_call.kind, key=keyed_call.key)
                    )
                elif action == "run":
                    self.claim(actor, 50)
                    job = self._held(actor, keyed_call)
                elif job:
                    settling = self._start_settle(self.actors[actor], 1, [end])
                    self._record_settled(*settling, locked=frozenset())
                    called_at = self.pending.get((opened.id, str(job.pk)), job.attempt)
                    if called_at < job.attempt and settling[1][0].state in UNSUCCESSFUL:
                        self.spoiled.add(opened.id)

    @precondition(lambda self: self.left_open)
    @rule()
    def seal_abandoned_batches(self):
        """Seal batches of openers that were silent for long. Such a batch may be incomplete."""
        Batch.objects.filter(pk__in=self.left_open).update(opened_until=now_plus(-1))
        assert set(direct.seal_abandoned()) == set(self.left_open)
        self.spoiled.update(self.left_open)
        self.left_open.clear()

    @precondition(lambda self: self.batches)
    @rule(actor=actors, number=st.integers(0, 9))
    def add_to_batch(self, actor, number):
        pk = self._pick_batch(number)
        self._record_added(pk, self.actors[actor].submit(_add, pk))

    @precondition(lambda self: self.batches)
    @rule(number=st.integers(0, 9), keyed_call=keyed_calls)
    def enqueue_key_in_batch(self, number, keyed_call):
        pk = self._pick_batch(number)
        try:
            with batch.of(pk):
                self._enqueue_in_batch(pk, keyed_call)
        except BatchFinished:
            assert pk in set(Batch.objects.exclude(finished_at=None).values_list("pk", flat=True))

    @precondition(lambda self: self.batches)
    @rule(actor=actors, number=st.integers(0, 9), ends=ends)
    def add_to_batch_during_settle(self, actor, number, ends):
        others = [each for each in self.actors if each.number != actor]
        futures = [self._start_settle(each, 4, ends) for each in others]
        pk = self._pick_batch(number)
        adding = self.actors[actor].submit(_add, pk)
        for each in futures:
            self._record_settled(*each)
        self._record_added(pk, adding)

    @precondition(lambda self: self.batches)
    @rule(number=st.integers(0, 9))
    def discard_batch(self, number):
        found = Batch.objects.get(pk=self._pick_batch(number))
        waiting = found.jobs().waiting().discardable()
        self.not_to_run |= {str(pk) for pk in waiting.values_list("pk", flat=True)}
        for job in found.jobs().running().filter(rerun_requested=True):
            self._record_rerun_discarded(str(job.pk), job.attempt)
        found.discard()

    def finish_batches_concurrently(self):
        for each in [actor.submit(direct.finish_batches) for actor in self.actors]:
            each.result(30)
        assert not Batch.objects.due().exists()

    def prune_members(self):
        """Prune failed jobs; failures in unfinished batches count before they are deleted."""
        unfinished = Batch.objects.filter(finished_at=None).values("pk")
        rows = Job.objects.filter(state=State.FAILED, batch__in=unfinished)
        self.spoiled.update(rows.values_list("batch", flat=True))
        self.prune(State.FAILED)

    @invariant()
    def batch_callbacks_follow_the_last_end(self):
        self._drop_ended_runs()
        finished = set(Batch.objects.filter(finished_at__isnull=False).values_list("pk", flat=True))
        for pk in finished - self.finished:
            states = {job.state for job in self.jobs if job.batch_id == pk}
            assert states <= set(FINISHED), "the batch finished before its jobs had ended"
            assert pk not in self.left_open, "the batch finished while its opener may add to it"
            followed = set(self.followed[str(pk)])
            if pk in self.discarded_batches:
                assert not followed
            elif pk in self.spoiled or states & set(UNSUCCESSFUL):
                assert followed == {"on_finish"}
            elif any(job in self.of_keys for job in self.members[pk]):
                # A failed run may have lost its row to the next run.
                assert "on_finish" in followed
            else:
                assert followed == {"on_finish", "on_success"}
        assert not (early := {(pk, job) for pk, job in self.pending if pk in finished}), (
            f"the batch finished before its jobs had ended: {early}"
        )
        self.finished = finished
        assert set(map(UUID, self.followed)) <= finished, (
            "a callback was enqueued before its batch had finished"
        )

    def _endable_batches(self):
        """Return unfinished batches in which no job is left to run."""
        unfinished = set(self.batches) - set(self.left_open) - self.finished
        waiting = {str(job.pk) for job in self.jobs if job.state not in FINISHED}
        return {pk for pk in unfinished if not self.members[pk] & waiting}

    def _drop_ended_runs(self):
        over = {str(job.pk) for job in self.jobs if job.state in FINISHED} | self.gone
        ended = {fence for fence, end in self.ended.items() if end != "released"}
        last = defaultdict(int)
        for pk, attempt in ended - self.continued:
            last[pk] = max(last[pk], attempt)
        # A released attempt ends its run too, if the key was enqueued meanwhile.
        before = {str(job.pk): job.attempts_before for job in self.jobs}
        self.pending = {
            key: at
            for key, at in self.pending.items()
            if key[1] not in over and max(last[key[1]], before.get(key[1], 0)) <= at
        }

    def _record_new_jobs(self):
        super()._record_new_jobs()
        rows = Job.objects.filter(task__in=AFTER).values_list("pk", "task", "args")
        for pk, task, (of,) in [(str(pk), task, args) for pk, task, args in rows]:
            assert self.followed[of].setdefault(AFTER[task], pk) == pk, (
                "a callback was enqueued twice"
            )
            self.enqueued.add(pk)
            self.wanted[pk] = None, [of]

    def _pick_batch(self, number):
        return self.batches[-1 - number % len(self.batches)]

    def _record_accepted(self, outcome):
        super()._record_accepted(outcome)
        for members in self.members.values():
            if str(outcome.fence[0]) in members:
                members.update(str(child.pk) for child in outcome.children)

    def _enqueue_in_batch(self, pk, keyed_call):
        before = _row(keyed_call)
        task, args = self._call(keyed_call, before)
        result = task.enqueue(*args)
        self._record_call(keyed_call, before, result)
        if result.enqueued != "ignored":
            self._record_member(pk, result, stage=_stage(keyed_call))
        return result

    def _record_member(self, pk, result, stage=None):
        self._record_enqueued(result, stage=stage)
        self.members[pk].add(result.id)
        self.pending[pk, result.id] = Job.objects.values_list("attempt", flat=True).get(
            pk=result.id
        )

    def _record_rerun_discarded(self, job, attempt):
        """The attempt goes on, and a retry of it has the arguments of the discarded call."""
        self.called[job, attempt] = self.wanted[job]
        for key in [key for key, at in self.pending.items() if key[1] == job and at >= attempt]:
            self.spoiled.add(key[0])
            del self.pending[key]

    def _record_added(self, pk, adding):
        """A job that was discarded at once, because its block has raised, is not a member."""
        for result in adding.result(30):
            if Job.objects.filter(pk=result.id, batch=pk).exists():
                self._record_member(pk, result)
            else:
                self._record_enqueued(result)
                self.not_to_run.add(result.id)


def _add(pk: UUID, and_raise: bool = False):
    """Add a job as a member does. Return the results, or none if the batch has finished."""
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
    """Leave the block without its exit, as if the process had died."""
    opened.__enter__()
    yield
    opened._pop()
