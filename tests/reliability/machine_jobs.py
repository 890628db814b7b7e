"""What can be done to any job, in any order and two things at a time; the machines of keys, limits and so on add to it."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from django_dbqueue.compat import task_backends
from django_dbqueue.core.progress_value import ProgressValue
from django_dbqueue.models import (
    Batch,
    Execution,
    Failure,
    Job,
    Process,
    Progress,
    Queue,
    Semaphore,
    Slot,
    StackTrace,
    TaskState,
)
from django_dbqueue.models.batch_share import BatchShare
from django_dbqueue.models.enums import FAILURES, FINISHED, WAITING
from django_dbqueue.models.expressions import Now, after
from django_dbqueue.runtime import recovery

from .. import direct, tasks
from ..conftest import all_claimed
from .machine_actors import (
    ACTORS,
    LARGE,
    PREFETCHED,
    SERVED,
    Actor,
    Outcome,
    State,
    actors,
    ends,
    queues,
    settle,
    settlement,
)

logger = logging.getLogger(__name__)

TABLES = (
    Execution,
    StackTrace,
    Progress,
    Slot,
    Semaphore,
    Job,
    BatchShare,
    Batch,
    Process,
    Failure,
    Queue,
    TaskState,
)
OF_A_ROW = [
    "pk",
    "attempt",
    "state",
    "process",
    "failures",
    "result",
    "stage",
    "args",
    "version",
    "asked_again",
    "blocked_by",
]
waits = st.sampled_from([None, timedelta(seconds=60)])
# The stage of a job, None without a pipeline, and its arguments.
Call = tuple[int | None, list[Any]]


class Jobs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        for model in TABLES:
            model.objects.all()._raw_delete("default")
        self.actors = [Actor(number) for number in range(ACTORS)]
        self.enqueued: set = set()
        self.gone: set = set()
        # By (job, attempt): which process was given it, and how it ended.
        self.given: dict = {}
        self.ended: dict = {}
        # Queues and tasks.
        self.paused: set[str] = set()
        # By queue: how many of its jobs may run at a time.
        self.restricted: dict[str, int] = {}
        self.retried: set[str] = set()
        self.not_to_run: set[str] = set()
        # Stopped by an operator while they ran, and not asked for or retried since.
        self.stopped: set[str] = set()
        # How each job is to be called, as it was asked for last; how each attempt was called.
        self.wanted: dict[str, Call] = {}
        self.called: dict[tuple[str, int], Call] = {}
        # Since which attempt a job's failures count.
        self.since: dict[str, int] = {}
        # Jobs of keys; attempts after which their run goes on, by a retry or at the next stage.
        self.of_keys: set[str] = set()
        self.goes_on: set[tuple[str, int]] = set()
        # Not to start before, by the database's time.
        self.not_before: dict[str, datetime] = {}

    def teardown(self) -> None:
        # Of a race, which Hypothesis may not meet again as it repeats the steps, it would tell nothing else.
        if isinstance(sys.exc_info()[1], Exception):
            logger.error("A run of the machine has failed.", exc_info=True)
        for actor in self.actors:
            actor.close()

    # What a project does.

    @rule(
        queue=queues,
        priority=st.sampled_from([-1, 0, 1]),
        number=st.integers(1, 4),
        wait=waits,
        expires=waits,
    )
    def enqueue(self, queue, priority, number, wait, expires):
        task = tasks.add.using(queue_name=queue, priority=priority, run_after=wait, expires=expires)
        self._asked(*task.enqueue_many([(1,)] * number))

    @rule(queue=queues, number=st.integers(1, 3), large=st.booleans())
    def enqueue_what_is_large(self, queue, number, large):
        self._asked(
            *tasks.add.using(queue_name=queue).enqueue_many([("x" * LARGE * large,)] * number)
        )

    @rule(queue=queues)
    def enqueue_what_must_not_run_twice(self, queue):
        self._asked(tasks.transfer.using(queue_name=queue).enqueue("x"))

    # What workers do, alone or two at a time.

    @rule(actor=actors, limit=st.integers(1, 5))
    def claim(self, actor, limit):
        self._got(self.actors[actor], self._ask_claim(self.actors[actor], limit).result(30))

    @rule(limit=st.integers(1, 5))
    def claim_together(self, limit):
        asked = [(actor, self._ask_claim(actor, limit)) for actor in self.actors]
        for actor, future in asked:
            self._got(actor, future.result(30))

    @rule(actor=actors, number=st.integers(1, 4), ends=ends)
    def settle(self, actor, number, ends):
        self._told(*self._ask_settle(self.actors[actor], number, ends), locked=frozenset())

    @rule(actor=actors, limit=st.integers(1, 5), ends=ends)
    def settle_together_while_another_claims(self, actor, limit, ends):
        asked = [self._ask_settle(each, 4, ends) for each in self.actors if each.number != actor]
        claiming = self._ask_claim(self.actors[actor], limit)
        for each in asked:
            self._told(*each)
        self._got(self.actors[actor], claiming.result(30))
        self._settled_beside_a_claim()

    @rule(actor=actors)
    def begin(self, actor):
        actor = self.actors[actor]
        for job in actor.held[:1]:
            began = actor.call(direct.mark_started, job)
            assert began == (
                self.given.get(self._current(job)) == actor.process.name and self._runs(job)
            )

    @rule(actor=actors)
    def save_metadata(self, actor):
        for job in [*self.actors[actor].held[:1], *self.actors[actor].late[:1]]:
            job.metadata = {"by": self.actors[actor].process.name}
            owns = self._runs(job) and self._current(job) == (str(job.pk), job.attempt)
            assert self.actors[actor].call(direct.save_metadata, job) == owns

    @rule(actor=actors)
    def note_progress(self, actor):
        actor = self.actors[actor]
        jobs = [*actor.held[:2], *actor.late[:2]]
        fences = {job.fence: (str(job.pk), job.attempt) for job in jobs}
        owned = {
            fence for fence, given in fences.items() if self.given.get(given) == actor.process.name
        }
        owned = {
            fence
            for fence in owned
            if Job.objects.running().filter(pk=fence[0], attempt=fence[1]).exists()
        }
        recorded = actor.call(
            Progress.objects.record, [(job, ProgressValue.of(job.attempt)) for job in jobs]
        )
        assert (recorded.written, recorded.lost) == (owned, set(fences) - owned)
        noted = set(
            Progress.objects.filter(job__in=[fence[0] for fence in owned]).values_list(
                "job", "done"
            )
        )
        assert noted == {fence[:2] for fence in owned}

    @rule(actor=actors, number=st.integers(1, 3))
    def release(self, actor, number):
        self._release(self.actors[actor], number)

    # What goes wrong.

    @rule(actor=actors, blameless=st.booleans(), not_started=st.booleans())
    def kill(self, actor, blameless, not_started):
        """Its supervisor recovers its jobs at once; it was not really dead, and its outcomes come late."""
        actor = self.actors[actor]
        ids = frozenset(job.pk for job in actor.held[:1]) if not_started else frozenset()
        self._recover(
            actor, recovery.ExitReason(how="was killed", blameless=blameless, not_started=ids)
        )

    @rule(actor=actors, number=st.integers(1, 4), ends=ends)
    def settle_while_it_is_recovered(self, actor, number, ends):
        actor = self.actors[actor]
        settling = self._ask_settle(actor, number, ends)
        self._recover(actor, recovery.ExitReason(how="was killed"), then=settling)

    @rule(actor=actors, ends=ends)
    def settle_late(self, actor, ends):
        actor = self.actors[actor]
        outcomes = [settlement(job, end) for job, end in zip(actor.late, ends, strict=False)]
        before = self._rows()
        settled = actor.call(settle, outcomes)
        assert [
            o.fence
            for o in settled.written
            if self.ended.get((str(o.fence[0]), o.fence[1])) is None
        ] == []
        assert self._rows() == before
        actor.late = actor.late[4:]

    @rule(actor=actors, other=actors, ends=ends)
    def take_over(self, actor, other, ends):
        """What was recovered, and what another runs by now, its first owner tries to begin, note, release and settle."""
        if not self.actors[actor].held:
            self.claim(actor, 5)
        self.kill(actor, False, False)
        Job.objects.filter(state=State.SCHEDULED).update(run_after=after(-1))
        self.not_before.clear()
        self.dispatch()
        self.claim(other, 50)
        late, call, before = self.actors[actor].late, self.actors[actor].call, self._rows()
        call(direct.release, late)
        assert (
            call(Progress.objects.record, [(job, ProgressValue.of(1)) for job in late]).written
            == set()
        )
        assert not any(
            call(verb, job) for job in late for verb in (direct.mark_started, direct.save_metadata)
        )
        assert self._rows() == before
        self.settle_late(actor, ends)

    @rule(seconds=st.sampled_from([-120, 30, 120, 7200]))
    def step_the_clock(self, seconds):
        """As seen from the rows: all times that are stored lie so much further back."""
        step = timedelta(seconds=seconds)
        Job.objects.update(run_after=F("run_after") - step, enqueued_at=F("enqueued_at") - step)
        Job.objects.update(expires_at=F("expires_at") - step)
        Process.objects.update(expires_at=F("expires_at") - step)
        Semaphore.objects.update(earliest=F("earliest") - step, booked=F("booked") - step)
        self.not_before = {pk: time - step for pk, time in self.not_before.items()}

    def recover_the_silent(self):
        silent = set(Process.objects.silent().values_list("name", flat=True))
        recovery.recover(
            task_backends["default"],
            Process.objects.silent(),
            recovery.ExitReason(how="was silent"),
            list,
        )
        self._learn_of_recovered(silent)

    # What operators and dispatchers do.

    def dispatch(self):
        direct.dispatch()

    def retry(self):
        retried = {str(pk) for pk in Job.objects.retriable().values_list("pk", flat=True)}
        self.retried |= retried
        self.not_before = {pk: time for pk, time in self.not_before.items() if pk not in retried}
        self.stopped -= retried
        Job.objects.all().retry()

    @rule(queue=queues, priority=st.sampled_from([-1, 0, 1]))
    def reprioritise(self, queue, priority):
        Job.objects.filter(queue=queue).reprioritise(priority)

    @rule(queue=queues, other=queues)
    def move(self, queue, other):
        Job.objects.filter(queue=queue).move(other)

    @rule(queue=queues, limit=st.sampled_from([None, 1, 2]))
    def restrict(self, queue, limit):
        Queue.objects.named(queue).restrict(limit)
        self.restricted = (
            {**self.restricted, queue: limit}
            if limit
            else {k: v for k, v in self.restricted.items() if k != queue}
        )

    @rule(actor=actors, queues=st.sampled_from(SERVED))
    def deploy(self, actor, queues):
        """Its process ends, without anything to give back, and another one serves what it is told to."""
        actor = self.actors[actor]
        if not actor.held:
            Process.objects.filter(pk=actor.process.pk).erase()
            actor.sign_on(queues)

    @rule(queue=queues)
    def discard(self, queue):
        self._call_off(Job.objects.filter(queue=queue))

    @rule(number=st.integers(1, 6))
    def discard_some(self, number):
        ready = Job.objects.ready().order_by("pk").values_list("pk", flat=True)
        self._call_off(Job.objects.filter(pk__in=list(ready[:number])))

    @rule(queue=queues)
    def stop(self, queue):
        self._stop(Job.objects.filter(queue=queue))

    def _stop(self, jobs):
        self.stopped |= {str(pk) for pk in jobs.stoppable().values_list("pk", flat=True)}
        jobs.stop()

    @rule(queue=queues)
    def pause_or_resume(self, queue):
        self._pause_or_resume(Queue.objects.named(queue), queue)

    @rule(task=st.sampled_from([tasks.add, tasks.charge, tasks.withdraw]))
    def pause_or_resume_a_task(self, task):
        self._pause_or_resume(TaskState.objects.named(task.module_path), task.module_path)

    @precondition(lambda self: self.enqueued)
    @rule(state=st.sampled_from([State.SUCCESSFUL, State.FAILED]))
    def prune(self, state):
        Job.objects.filter(state=state).update(finished_at=after(-1000))
        before = {str(pk) for pk in Job.objects.filter(state=state).values_list("pk", flat=True)}
        while direct.prune_jobs([state], 500, 2):
            pass
        self.gone |= before

    # What always holds.

    def check_invariants(self, *args):
        """All of them look at the same rows."""
        self.jobs = list(Job.objects.select_related("process").annotate(db_now=Now()))
        self.executions = list(
            Execution.objects.values_list("job", "attempt", "outcome", "message")
        )
        self._look()
        super().check_invariants(*args)

    @invariant()
    def nothing_is_lost(self):
        assert {str(job.pk) for job in self.jobs} == self.enqueued - self.gone

    @invariant()
    def each_row_is_as_its_owner_was_told(self):
        for job in self.jobs:
            fence = str(job.pk), job.attempt
            assert (job.state == State.RUNNING) == (job.process is not None)
            assert (job.state in FINISHED) == (job.finished_at is not None)
            assert job.failures <= job.attempt
            if job.state == State.RUNNING:
                assert self.given[fence] == job.process.name and fence not in self.ended
            elif job.attempt:
                assert fence in self.ended, (fence, job.state)
            self._check(job, fence)

    @invariant()
    def each_attempt_is_recorded_once_and_as_it_ended(self):
        recorded = {
            (str(job), attempt): outcome for job, attempt, outcome, _message in self.executions
        }
        expected = {
            f: end for f, end in self.ended.items() if end != "released" and f[0] not in self.gone
        }
        assert {f: end for f, end in recorded.items() if f in expected} == expected
        for fence, outcome in recorded.items():
            assert fence in expected or (
                self.ended.get(fence) == "released" and outcome == Outcome.LOST
            )

    @invariant()
    def each_failed_attempt_counts(self):
        failed = [
            row[:2]
            for row in self.executions
            if row[2] in FAILURES and not row[3].startswith("It ended (")
        ]
        fences = [(str(job), attempt) for job, attempt in failed]
        jobs = {str(job.pk): (job.failures, job.attempts_before) for job in self.jobs}
        since = {pk: max(before, self.since.get(pk, 0)) for pk, (_failures, before) in jobs.items()}
        counted = Counter(pk for pk, attempt in fences if pk in jobs and attempt > since[pk])
        for pk, (failures, _before) in jobs.items():
            assert pk in self.retried or failures == counted[pk]

    @invariant()
    def none_starts_before_its_time(self):
        """It is asked for with ``replace`` and a time, and whatever becomes of the attempt at hand, it waits for that."""
        for job in self.jobs:
            if job.state in WAITING and (time := self.not_before.get(str(job.pk))):
                begins = (
                    min(job.run_after, job.db_now) if job.state == State.READY else job.run_after
                )
                assert begins > time - timedelta(seconds=1), "it is to run before its time"

    # How.

    def _pause_or_resume(self, rows, name):
        (rows.resume if name in self.paused else rows.pause)()
        self.paused ^= {name}

    def _may_start(self, job, queues):
        """Whether a job is one of those queues', which are served, and neither is paused, nor has its queue no room."""
        room = (
            self.restricted.get(job.queue, 10**6)
            > Job.objects.running().filter(queue=job.queue).count()
        )
        return job.queue in queues and not self.paused & {job.queue, job.task} and room

    def _asked(self, *results, stage=None):
        """Calls of tasks were accepted, each by the row that its result names."""
        for result in results:
            self.enqueued.add(result.id)
            self.not_to_run.discard(result.id)
            self.stopped.discard(result.id)
            self.wanted[result.id] = (stage, list(result.args))

    def _ask_claim(self, actor, limit):
        return actor.begin(all_claimed, actor.claimer, limit)

    def _settled_beside_a_claim(self):
        """What the claim found may be otherwise by now."""

    def _got(self, actor, jobs):
        self._look()
        large = [job.size for job in jobs if job.size]
        assert len(large) <= 1 or sum(large) <= PREFETCHED, "it has loaded more than it may"
        for job in jobs:
            fence = str(job.pk), job.attempt
            assert fence not in self.given, "an attempt was given twice"
            assert not self.paused & {job.queue, job.task}
            if most := self.restricted.get(job.queue):
                assert Job.objects.running().filter(queue=job.queue).count() <= most
            begins = self.not_before.pop(fence[0], None)
            assert begins is None or begins < job.started_at + timedelta(seconds=1), (
                "it was claimed before its time"
            )
            assert fence[0] not in self.stopped, "it runs again though an operator has stopped it"
            assert (job.stage, job.args) == self.wanted[fence[0]], (
                "it was called otherwise than it was asked for"
            )
            self.given[fence] = actor.process.name
            self.called[fence] = job.stage, job.args
        actor.held += jobs

    def _release(self, actor, number, locked=frozenset()):
        """All but those whose rows others hold."""
        jobs, kept = actor.held[:number], actor.held[number:]
        owned = [
            job
            for job in jobs
            if self._runs(job) and self._current(job) == (str(job.pk), job.attempt)
        ]
        released = [job for job in owned if job.pk not in locked]
        seen = actor.call(direct.release, jobs)
        assert {job.pk for job in released} <= seen and seen.isdisjoint(locked)
        for job in released:
            self.ended[str(job.pk), job.attempt] = "released"
        actor.held = [job for job in owned if job.pk in locked] + kept

    def _ask_settle(self, actor, number, ends):
        jobs, actor.held = actor.held[:number], actor.held[number:]
        outcomes = [settlement(job, end) for job, end in zip(jobs, ends, strict=False)]
        return actor, outcomes, actor.begin(settle, outcomes)

    def _told(self, actor, outcomes, future, locked=None):
        """``locked``: the jobs whose rows others hold, if that is known. All others are settled."""
        settled = future.result(30)
        assert len(settled.written) + len(settled.held) + len(settled.lost) == len(outcomes)
        assert locked is None or {outcome.fence[0] for outcome in settled.held} <= locked, (
            "it has ended, and is not written"
        )
        for outcome in settled.written:
            self._accepted(outcome)
        for outcome in settled.lost:
            assert (str(outcome.fence[0]), outcome.fence[1]) in self.ended
        actor.held = [o.job for o in settled.held] + actor.held

    def _accepted(self, outcome):
        """A job of a pipeline goes where its attempt sent it, but not if it was asked for anew meanwhile."""
        pk, attempt = fence = str(outcome.fence[0]), outcome.fence[1]
        assert self.ended.setdefault(fence, outcome.outcome) == outcome.outcome
        is_replaced = self.wanted[pk] != self.called[fence]
        # A call that came meanwhile takes the place of the stages that are left.
        if outcome.state not in FINISHED and not (outcome.then and is_replaced):
            self.goes_on.add(fence)
        if is_replaced:
            return
        if there := outcome.then:
            self.wanted[pk], self.since[pk] = (there.stage, there.args), attempt
        for child in outcome.children:
            self.enqueued.add(str(child.pk))
            self.wanted[str(child.pk)] = child.stage, child.args

    def _call_off(self, jobs):
        self.not_to_run |= {str(pk) for pk in jobs.discardable().values_list("pk", flat=True)}
        jobs.discard()

    def _check(self, job, fence):
        """That a row is as it was asked for, and that whatever was asked for is done."""
        wanted = self.wanted[fence[0]]
        assert (job.stage, job.args) == wanted
        if fence[0] in self.stopped:
            assert job.state in (State.RUNNING, *FINISHED), (
                "it goes on though an operator has stopped it"
            )
            assert not job.asked_again
            return
        if job.state == State.RUNNING:
            assert job.asked_again == (wanted != self.called[fence])
        if job.state in FINISHED and not (
            job.state == State.DISCARDED and fence[0] in self.not_to_run
        ):
            assert wanted == self.called[fence], (
                "it ended before it was called as it was asked for last"
            )

    def _look(self):
        """Learn of jobs that the queue has enqueued by itself."""

    def _recover(self, actor, death, then=None):
        dead = Process.objects.filter(pk=actor.process.pk)
        name = actor.process.name
        recovery.recover(task_backends["default"], dead, death, list)
        if then:
            settled = then[2].result(30)
            for outcome in settled.written:
                self._accepted(outcome)
            actor.late += [o.job for o in settled.held]
        self._learn_of_recovered({name})
        actor.late += actor.held
        actor.sign_on()

    def _learn_of_recovered(self, names):
        """Of an attempt that its owner does not know to have ended, the rows tell how: it was recorded, or released."""
        while Job.objects.orphaned().exists():  # Somebody held their rows at that moment.
            recovery.recover(
                task_backends["default"],
                Process.objects.none(),
                recovery.ExitReason(how="is gone"),
                list,
            )
        outcomes = {
            (str(j), a): o for j, a, o in Execution.objects.values_list("job", "attempt", "outcome")
        }
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
        return list(Job.objects.order_by("pk").values_list(*OF_A_ROW))
