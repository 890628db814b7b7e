"""A machine that does to the queue whatever can be done to it, in any order and two things at a time.

After each step it compares the rows with what the actors were told: who got which attempt of which job, and whose outcome of
it was accepted.
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connections
from django.db.models import F
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from django_dbqueue.compat import task_backends
from django_dbqueue.models import Execution, Failure, Job, Process, Queue, Settlement, Stack
from django_dbqueue.models.execution import FAILURES
from django_dbqueue.models.expressions import after
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.claimer import Claimer
from django_dbqueue.runtime.connection import prepare
from django_dbqueue.selector import QueueSelector

from .. import tasks

ACTORS = 3
QUEUES = ["default", "mail"]
actors = st.integers(0, ACTORS - 1)
queues = st.sampled_from(QUEUES)
Outcome, State = Execution.Outcome, Job.State
ENDS = [
    (Outcome.SUCCESSFUL, State.SUCCESSFUL, 0.0),
    (Outcome.FAILED, State.READY, 0.0),
    (Outcome.FAILED, State.SCHEDULED, 60.0),
    (Outcome.FAILED, State.FAILED, 0.0),
    (Outcome.TIMED_OUT, State.FAILED, 0.0),
    (Outcome.INTERRUPTED, State.READY, 0.0),
    (Outcome.INTERRUPTED, State.SCHEDULED, 60.0),  # As a job that snoozes.
    (Outcome.DISCARDED, State.DISCARDED, 0.0),
]


class Actor:
    """A worker: a process row, a connection of its own, and the jobs that it believes to be its own."""

    def __init__(self, number: int) -> None:
        self.thread = ThreadPoolExecutor(1, f"actor-{number}")
        self.call(prepare, "default", 10.0)
        self.number, self.incarnation = number, 0
        self.sign_on()

    def sign_on(self) -> None:
        """A new identity, as after a restart; what the old one held, it may still try to settle."""
        self.incarnation += 1
        name = f"worker {self.number}.{self.incarnation}"
        self.process = Process(name=name, kind="worker", hostname="h", pid=self.number + 1, expires_at=after(3600))
        self.call(self.process.save)
        self.claimer = Claimer("default", self.process, QueueSelector(("*",)))
        self.claimer.FRESH = -1.0
        self.held: list[Job] = []
        self.late: list[Job] = getattr(self, "late", [])

    def begin(self, function, *args):
        return self.thread.submit(function, *args)

    def call(self, function, *args):
        return self.begin(function, *args).result(30)

    def close(self) -> None:
        self.call(connections.close_all)
        self.thread.shutdown()


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        for model in (Execution, Stack, Job, Process, Failure, Queue):
            model.objects.all()._raw_delete("default")
        self.actors = [Actor(number) for number in range(ACTORS)]
        self.enqueued: set = set()
        self.gone: set = set()
        # By (job, attempt): which process was given it, and how it ended.
        self.given: dict = {}
        self.ended: dict = {}
        self.paused: set[str] = set()
        self.retried: set[str] = set()

    def teardown(self) -> None:
        for actor in self.actors:
            actor.close()

    # What a project does.

    @rule(queue=queues, priority=st.sampled_from([-1, 0, 1]), number=st.integers(1, 4), wait=st.sampled_from([None, 60]))
    def enqueue(self, queue, priority, number, wait):
        task = tasks.add.using(queue_name=queue, priority=priority, run_after=wait and timedelta(seconds=wait))
        self.enqueued |= {each.id for each in task.enqueue_many([(1,)] * number)}

    @rule(queue=queues)
    def enqueue_what_must_not_run_twice(self, queue):
        self.enqueued.add(tasks.transfer.using(queue_name=queue).enqueue("x").id)

    # What workers do, alone or two at a time.

    @rule(actor=actors, limit=st.integers(1, 5))
    def claim(self, actor, limit):
        self._got(self.actors[actor], self._ask_claim(self.actors[actor], limit).result(30))

    @rule(limit=st.integers(1, 5))
    def claim_together(self, limit):
        asked = [(actor, self._ask_claim(actor, limit)) for actor in self.actors]
        for actor, future in asked:
            self._got(actor, future.result(30))

    @rule(actor=actors, number=st.integers(1, 4), ends=st.lists(st.sampled_from(ENDS), min_size=4, max_size=4))
    def settle(self, actor, number, ends):
        self._told(*self._ask_settle(self.actors[actor], number, ends))

    @rule(actor=actors)
    def begin(self, actor):
        actor = self.actors[actor]
        for job in actor.held[:1]:
            began = actor.call(Job.objects.begin, job)
            assert began == (self.given.get(self._current(job)) == actor.process.name and self._runs(job))

    @rule(actor=actors)
    def save_metadata(self, actor):
        for job in [*self.actors[actor].held[:1], *self.actors[actor].late[:1]]:
            job.metadata = {"by": self.actors[actor].process.name}
            owns = self._runs(job) and self._current(job) == (str(job.pk), job.attempt)
            assert self.actors[actor].call(Job.objects.save_metadata, job) == owns

    @rule(actor=actors, number=st.integers(1, 3))
    def release(self, actor, number):
        actor = self.actors[actor]
        jobs, actor.held = actor.held[:number], actor.held[number:]
        owned = [job for job in jobs if self._runs(job) and self._current(job) == (str(job.pk), job.attempt)]
        assert actor.call(Job.objects.release, jobs) == len(owned)
        for job in owned:
            self.ended[str(job.pk), job.attempt] = "released"

    # What goes wrong.

    @rule(actor=actors, blameless=st.booleans(), unbegun=st.booleans())
    def kill(self, actor, blameless, unbegun):
        """Its supervisor recovers its jobs at once; it was not really dead, and its outcomes come late."""
        actor = self.actors[actor]
        ids = frozenset(job.pk for job in actor.held[:1]) if unbegun else frozenset()
        self._recover(actor, recovery.Death(how="was killed", blameless=blameless, unbegun=ids))

    @rule(actor=actors, number=st.integers(1, 4), ends=st.lists(st.sampled_from(ENDS), min_size=4, max_size=4))
    def settle_while_it_is_recovered(self, actor, number, ends):
        actor = self.actors[actor]
        settling = self._ask_settle(actor, number, ends)
        self._recover(actor, recovery.Death(how="was killed"), then=settling)

    @rule(actor=actors, ends=st.lists(st.sampled_from(ENDS), min_size=4, max_size=4))
    def settle_late(self, actor, ends):
        actor = self.actors[actor]
        outcomes = [_settlement(job, end) for job, end in zip(actor.late, ends, strict=False)]
        before = self._rows()
        settled = actor.call(Execution.objects.settle, outcomes)
        assert [o.fence for o in settled.written if self.ended.get((str(o.fence[0]), o.fence[1])) is None] == []
        assert self._rows() == before
        actor.late = actor.late[4:]

    @rule(actor=actors, other=actors, ends=st.lists(st.sampled_from(ENDS), min_size=4, max_size=4))
    def take_over(self, actor, other, ends):
        """What was recovered, and what another runs by now, its first owner tries to begin, note, release and settle."""
        if not self.actors[actor].held:
            self.claim(actor, 5)
        self.kill(actor, False, False)
        Job.objects.filter(state=State.SCHEDULED).update(run_after=after(-1))
        self.dispatch()
        self.claim(other, 50)
        late, call, before = self.actors[actor].late, self.actors[actor].call, self._rows()
        assert call(Job.objects.release, late) == 0
        assert not any(call(verb, job) for job in late for verb in (Job.objects.begin, Job.objects.save_metadata))
        assert self._rows() == before
        self.settle_late(actor, ends)

    @rule(seconds=st.sampled_from([-120, 30, 120, 7200]))
    def step_the_clock(self, seconds):
        """As seen from the rows: all times that are stored lie so much further back."""
        step = timedelta(seconds=seconds)
        Job.objects.update(run_after=F("run_after") - step, enqueued_at=F("enqueued_at") - step)
        Process.objects.update(expires_at=F("expires_at") - step)

    @rule()
    def recover_the_silent(self):
        silent = set(Process.objects.silent().values_list("name", flat=True))
        recovery.recover(task_backends["default"], Process.objects.silent(), recovery.Death(how="was silent"))
        self._learn_of_recovered(silent)

    # What operators and dispatchers do.

    @rule()
    def dispatch(self):
        Job.objects.dispatch()

    @rule()
    def retry(self):
        self.retried |= {str(pk) for pk in Job.objects.retriable().values_list("pk", flat=True)}
        Job.objects.all().retry()

    @rule(queue=queues)
    def discard(self, queue):
        Job.objects.filter(queue=queue).discard()

    @rule(queue=queues)
    def stop(self, queue):
        Job.objects.filter(queue=queue).stop()

    @rule(queue=queues)
    def pause_or_resume(self, queue):
        Queue.objects.know([queue])
        rows = Queue.objects.filter(name=queue)
        (rows.resume if queue in self.paused else rows.pause)()
        self.paused ^= {queue}

    @precondition(lambda self: self.enqueued)
    @rule(state=st.sampled_from([State.SUCCESSFUL, State.FAILED]))
    def prune(self, state):
        Job.objects.filter(state=state).update(finished_at=after(-1000))
        before = {str(pk) for pk in Job.objects.filter(state=state).values_list("pk", flat=True)}
        while Job.objects.prune([state], 500, 2):
            pass
        self.gone |= before

    # What always holds.

    @invariant()
    def nothing_is_lost(self):
        assert {str(pk) for pk in Job.objects.values_list("pk", flat=True)} == self.enqueued - self.gone

    @invariant()
    def each_row_is_as_its_owner_was_told(self):
        for pk, attempt, state, process, failures, finished in Job.objects.values_list(
            "pk", "attempt", "state", "process__name", "failures", "finished_at"
        ):
            fence = str(pk), attempt
            assert (state == State.RUNNING) == (process is not None)
            assert (state in (State.SUCCESSFUL, State.FAILED, State.DISCARDED)) == (finished is not None)
            assert failures <= attempt
            if state == State.RUNNING:
                assert self.given[fence] == process and fence not in self.ended
            elif attempt:
                assert fence in self.ended, (fence, state)

    @invariant()
    def each_attempt_is_recorded_once_and_as_it_ended(self):
        recorded = {
            (str(job), attempt): outcome for job, attempt, outcome in Execution.objects.values_list("job", "attempt", "outcome")
        }
        expected = {f: end for f, end in self.ended.items() if end != "released" and f[0] not in self.gone}
        assert {f: end for f, end in recorded.items() if f in expected} == expected
        for fence, outcome in recorded.items():
            assert fence in expected or (self.ended.get(fence) == "released" and outcome == Outcome.LOST)

    @invariant()
    def each_failed_attempt_counts(self):
        failed = Counter(str(job) for job in Execution.objects.filter(outcome__in=FAILURES).values_list("job", flat=True))
        for pk, failures in Job.objects.values_list("pk", "failures"):
            late = Execution.objects.filter(job=pk, message__startswith="It ended (").count()
            assert str(pk) in self.retried or failures == failed[str(pk)] - late

    # How.

    def _ask_claim(self, actor, limit):
        return actor.begin(actor.claimer.claim, limit)

    def _got(self, actor, jobs):
        for job in jobs:
            fence = str(job.pk), job.attempt
            assert fence not in self.given, "an attempt was given twice"
            assert job.queue not in self.paused
            self.given[fence] = actor.process.name
        actor.held += jobs

    def _ask_settle(self, actor, number, ends):
        jobs, actor.held = actor.held[:number], actor.held[number:]
        outcomes = [_settlement(job, end) for job, end in zip(jobs, ends, strict=False)]
        return actor, outcomes, actor.begin(Execution.objects.settle, outcomes)

    def _told(self, actor, outcomes, future):
        settled = future.result(30)
        assert len(settled.written) + len(settled.held) + len(settled.lost) == len(outcomes)
        for outcome in settled.written:
            fence = str(outcome.fence[0]), outcome.fence[1]
            assert self.ended.setdefault(fence, outcome.execution.outcome) == outcome.execution.outcome
        for outcome in settled.lost:
            assert (str(outcome.fence[0]), outcome.fence[1]) in self.ended
        actor.held = [o.execution.job for o in settled.held] + actor.held

    def _recover(self, actor, death, then=None):
        dead = Process.objects.filter(pk=actor.process.pk)
        name = actor.process.name
        recovery.recover(task_backends["default"], dead, death)
        if then:
            settled = then[2].result(30)
            for outcome in settled.written:
                self.ended[str(outcome.fence[0]), outcome.fence[1]] = outcome.execution.outcome
            actor.late += [o.execution.job for o in settled.held]
        self._learn_of_recovered({name})
        actor.late += actor.held
        actor.sign_on()

    def _learn_of_recovered(self, names):
        """Of an attempt that its owner does not know to have ended, the rows tell how: it was recorded, or released."""
        while Job.objects.orphaned().exists():  # Somebody held their rows at that moment.
            recovery.recover(task_backends["default"], Process.objects.none(), recovery.Death(how="is gone"))
        outcomes = {(str(j), a): o for j, a, o in Execution.objects.values_list("job", "attempt", "outcome")}
        for fence, name in self.given.items():
            if name in names and fence not in self.ended:
                self.ended[fence] = outcomes.get(fence, "released")
        for actor in self.actors:
            if actor.process.name in names:
                actor.late += actor.held
                actor.sign_on()

    def _current(self, job):
        return str(job.pk), Job.objects.values_list("attempt", flat=True).filter(pk=job.pk).first()

    def _runs(self, job):
        return Job.objects.running().filter(pk=job.pk).exists()

    def _rows(self):
        return list(Job.objects.order_by("pk").values_list("pk", "attempt", "state", "process", "failures", "result"))


def _settlement(job, end):
    outcome, state, wait = end
    return Settlement.of(job, outcome, state, wait=wait, result="x" if outcome == Outcome.SUCCESSFUL else None)


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(600)
def test_whatever_is_done_in_whatever_order(settings_of_the_machine):
    run_state_machine_as_test(Machine, settings=settings_of_the_machine)


@pytest.fixture
def settings_of_the_machine():
    examples = int(os.environ.get("DBQUEUE_EXAMPLES", 30))
    return settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],  # To shrink what failed would take the database many minutes.
    )
