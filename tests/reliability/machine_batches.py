"""Pipelines go on exactly with the attempts that were accepted; what follows a batch comes once, when all of it has ended."""

from __future__ import annotations

from collections import defaultdict
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from django_dbqueue import batch, pipeline
from django_dbqueue.exceptions import BatchFinished
from django_dbqueue.models import Batch, Job
from django_dbqueue.models.states import FINISHED, UNSUCCESSFUL

from .. import tasks
from .machine_actors import actors, ends, queues
from .machine_jobs import Jobs

WALK = pipeline(tasks.grind, tasks.charge.using(queue_name="mail"), tasks.pour)
AFTER = {tasks.sum_up.module_path: "on_finish", tasks.rejoice.module_path: "on_success"}
members = st.lists(st.sampled_from([tasks.add, tasks.charge, WALK]), max_size=3)


class Walks(Jobs):
    @rule(queue=queues, number=st.integers(1, 3))
    def enqueue_what_walks(self, queue, number):
        first = tasks.grind.using(queue_name=queue)
        walk = pipeline(first, *WALK.stages[1:])
        self._asked(*walk.enqueue_many([(1,)] * number), stage=0)


class Batches(Jobs):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[UUID] = []
        self.finished: set[UUID] = set()
        # By batch: what followed it.
        self.followed: defaultdict[str, dict[str, str]] = defaultdict(dict)

    @rule(members=members, actor=actors)
    def open_a_batch(self, members, actor):
        with batch(on_finish=tasks.sum_up, on_success=tasks.rejoice) as opened:
            self.batches.append(opened.id)
            for what in members:
                self._asked(what.enqueue(1), stage=0 if what is WALK else None)
            self.claim(actor, 5)
            assert not Batch.objects.finish([opened.id]), "it finished before all of it was enqueued"

    @precondition(lambda self: self.batches)
    @rule(actor=actors, number=st.integers(0, 9))
    def add_to_a_batch(self, actor, number):
        self._learn_of_added(self.actors[actor].begin(_add, self._a_batch(number)))

    @precondition(lambda self: self.batches)
    @rule(actor=actors, number=st.integers(0, 9), ends=ends)
    def add_to_a_batch_while_its_jobs_end(self, actor, number, ends):
        others = [each for each in self.actors if each.number != actor]
        asked = [self._ask_settle(each, 4, ends) for each in others]
        adding = self.actors[actor].begin(_add, self._a_batch(number))
        for each in asked:
            self._told(*each)
        self._learn_of_added(adding)

    @precondition(lambda self: self.batches)
    @rule(number=st.integers(0, 9))
    def discard_a_batch(self, number):
        self._call_off(Batch.objects.get(pk=self._a_batch(number)).jobs().waiting())

    @rule()
    def finish_batches_together(self):
        for each in [actor.begin(Batch.objects.finish) for actor in self.actors]:
            each.result(30)
        assert not Batch.objects.due().exists()

    @invariant()
    def what_follows_a_batch_comes_when_all_of_it_has_ended(self):
        self._look()
        finished = set(Batch.objects.filter(finished_at__isnull=False).values_list("pk", flat=True))
        for pk in finished - self.finished:
            jobs = Job.objects.filter(batch=pk)
            assert not jobs.exclude(state__in=FINISHED).exists(), "it finished before its jobs had"
            well = {} if jobs.filter(state__in=UNSUCCESSFUL).exists() else {"on_success"}
            assert set(self.followed[str(pk)]) == {"on_finish", *well}
        self.finished = finished
        assert set(map(UUID, self.followed)) <= finished, "something followed before it had finished"

    def _look(self):
        super()._look()
        rows = Job.objects.filter(task__in=AFTER).values_list("pk", "task", "args")
        for pk, task, (of,) in [(str(pk), task, args) for pk, task, args in rows]:
            assert self.followed[of].setdefault(AFTER[task], pk) == pk, "it followed twice"
            self.enqueued.add(pk)
            self.wanted[pk] = None, [of]

    def _a_batch(self, number):
        return self.batches[-1 - number % len(self.batches)]

    def _learn_of_added(self, adding):
        self._asked(*adding.result(30))


def _add(pk: UUID):
    """Returns the results; none if the batch has finished."""
    try:
        with batch.of(pk):
            return [tasks.add.enqueue(1)]
    except BatchFinished:
        return []
