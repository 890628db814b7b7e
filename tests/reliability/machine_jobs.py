"""Operations on any job, in any order and two at a time."""

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
from django_dbqueue.models.expressions import Now, now_plus
from django_dbqueue.runtime import recovery

from .. import direct, tasks
from ..conftest import all_claimed
from .machine_actors import (
    ACTORS,
    LARGE_TEXT,
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
    "rerun_requested",
    "blocked_by",
]
waits = st.sampled_from([None, timedelta(seconds=60)])
# The stage of a job, or None without a pipeline, and its arguments.
Call = tuple[int | None, list[Any]]


class Jobs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        for model in TABLES:
            model.objects.all()._raw_delete("default")
        self.actors = [Actor(number) for number in range(ACTORS)]
        self.enqueued: set = set()
        self.gone: set = set()
        # By (job, attempt): the process that claimed it, and how the attempt ended.
        self.given: dict = {}
        self.ended: dict = {}
        # Paused queues and tasks.
        self.paused: set[str] = set()
        # By queue: the maximum number of running jobs.
        self.restricted: dict[str, int] = {}
        self.retried: set[str] = set()
        self.not_to_run: set[str] = set()
        # Stopped by an operator while running, and not enqueued or retried since.
        self.stopped: set[str] = set()
        # The stage and arguments of each job's latest call, and those of each attempt.
        self.wanted: dict[str, Call] = {}
        self.called: dict[tuple[str, int], Call] = {}
        # By job: the attempt after which failures count.
        self.since: dict[str, int] = {}
        # Jobs with keys; attempts whose run continues by a retry or at the next stage.
        self.of_keys: set[str] = set()
        self.continued: set[tuple[str, int]] = set()
        # By job: the earliest start, by the database's clock.
        self.not_before: dict[str, datetime] = {}

    def teardown(self) -> None:
        # Log here: when Hypothesis replays the steps, a race may not happen again.
        if isinstance(sys.exc_info()[1], Exception):
            logger.error("A run of the state machine failed.", exc_info=True)
        for actor in self.actors:
            actor.close()

    # Operations of a project.

    @rule(
        queue=queues,
        priority=st.sampled_from([-1, 0, 1]),
        number=st.integers(1, 4),
        wait=waits,
        expires=waits,
    )
    def enqueue(self, queue, priority, number, wait, expires):
        task = tasks.add.using(queue_name=queue, priority=priority, run_after=wait, expires=expires)
        self._record_enqueued(*task.enqueue_many([(1,)] * number))

    @rule(queue=queues, number=st.integers(1, 3), large=st.booleans())
    def enqueue_large(self, queue, number, large):
        self._record_enqueued(
            *tasks.add.using(queue_name=queue).enqueue_many([(LARGE_TEXT * large,)] * number)
        )

    @rule(queue=queues)
    def enqueue_on_lost_fail(self, queue):
        self._record_enqueued(tasks.transfer.using(queue_name=queue).enqueue("x"))

    # Operations of workers, alone or two at a time.

    @rule(actor=actors, limit=st.integers(1, 5))
    def claim(self, actor, limit):
        self._record_claimed(
            self.actors[actor], self._start_claim(self.actors[actor], limit).result(30)
        )

    @rule(limit=st.integers(1, 5))
    def claim_concurrently(self, limit):
        futures = [(actor, self._start_claim(actor, limit)) for actor in self.actors]
        for actor, future in futures:
            self._record_claimed(actor, future.result(30))

    @rule(actor=actors, number=st.integers(1, 4), ends=ends)
    def settle(self, actor, number, ends):
        self._record_settled(
            *self._start_settle(self.actors[actor], number, ends), locked=frozenset()
        )

    @rule(actor=actors, limit=st.integers(1, 5), ends=ends)
    def settle_during_claim(self, actor, limit, ends):
        futures = [
            self._start_settle(each, 4, ends) for each in self.actors if each.number != actor
        ]
        claiming = self._start_claim(self.actors[actor], limit)
        for each in futures:
            self._record_settled(*each)
        self._record_claimed(self.actors[actor], claiming.result(30))
        self._after_concurrent_settle()

    @rule(actor=actors)
    def start_job(self, actor):
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
    def record_progress(self, actor):
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
        stored = set(
            Progress.objects.filter(job__in=[fence[0] for fence in owned]).values_list(
                "job", "done"
            )
        )
        assert stored == {fence[:2] for fence in owned}

    @rule(actor=actors, number=st.integers(1, 3))
    def release(self, actor, number):
        self._release(self.actors[actor], number)

    # Faults.

    @rule(actor=actors, innocent=st.booleans(), not_started=st.booleans())
    def kill(self, actor, innocent, not_started):
        """Recover its jobs at once; the worker still runs, and its results come late."""
        actor = self.actors[actor]
        ids = frozenset(job.pk for job in actor.held[:1]) if not_started else frozenset()
        self._recover(
            actor, recovery.ExitReason(how="was killed", innocent=innocent, not_started=ids)
        )

    @rule(actor=actors, number=st.integers(1, 4), ends=ends)
    def settle_during_recovery(self, actor, number, ends):
        actor = self.actors[actor]
        settling = self._start_settle(actor, number, ends)
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
        """The former owner of reclaimed jobs cannot start, record, release or settle them."""
        if not self.actors[actor].held:
            self.claim(actor, 5)
        self.kill(actor, False, False)
        Job.objects.filter(state=State.SCHEDULED).update(run_after=now_plus(-1))
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
    def step_clock(self, seconds):
        """Step the database's clock: move all stored times by the same amount."""
        step = timedelta(seconds=seconds)
        Job.objects.update(run_after=F("run_after") - step, enqueued_at=F("enqueued_at") - step)
        Job.objects.update(expires_at=F("expires_at") - step)
        Process.objects.update(expires_at=F("expires_at") - step)
        Semaphore.objects.update(earliest=F("earliest") - step, booked=F("booked") - step)
        # A job that is ready has had its time, whatever the clock says since.
        ready = {str(pk) for pk in Job.objects.ready().values_list("pk", flat=True)}
        self.not_before = {
            pk: time - step for pk, time in self.not_before.items() if pk not in ready
        }

    def recover_silent(self):
        silent = set(Process.objects.silent().values_list("name", flat=True))
        recovery.recover(
            task_backends["default"],
            Process.objects.silent(),
            recovery.ExitReason(how="was silent"),
            list,
        )
        self._record_recovered(silent)

    # Operations of operators and dispatchers.

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
        """An idle worker ends, and another one with these queues takes its place."""
        actor = self.actors[actor]
        if not actor.held:
            Process.objects.filter(pk=actor.process.pk).erase()
            actor.register(queues)

    @rule(queue=queues)
    def discard(self, queue):
        self._discard(Job.objects.filter(queue=queue))

    @rule(number=st.integers(1, 6))
    def discard_some(self, number):
        ready = Job.objects.ready().order_by("pk").values_list("pk", flat=True)
        self._discard(Job.objects.filter(pk__in=list(ready[:number])))

    @rule(queue=queues)
    def stop(self, queue):
        self._stop(Job.objects.filter(queue=queue))

    @rule(queue=queues)
    def stop_and_retry(self, queue):
        jobs = Job.objects.filter(queue=queue)
        stopped = {str(pk) for pk in jobs.stoppable().values_list("pk", flat=True)}
        self.retried |= stopped
        jobs.stop(then="retry")

    def _stop(self, jobs):
        self.stopped |= {str(pk) for pk in jobs.stoppable().values_list("pk", flat=True)}
        jobs.stop()

    @rule(queue=queues)
    def pause_or_resume(self, queue):
        self._pause_or_resume(Queue.objects.named(queue), queue)

    @rule(task=st.sampled_from([tasks.add, tasks.charge, tasks.withdraw]))
    def pause_or_resume_task(self, task):
        self._pause_or_resume(TaskState.objects.named(task.module_path), task.module_path)

    @precondition(lambda self: self.enqueued)
    @rule(state=st.sampled_from([State.SUCCESSFUL, State.FAILED]))
    def prune(self, state):
        Job.objects.filter(state=state).update(finished_at=now_plus(-1000))
        before = {str(pk) for pk in Job.objects.filter(state=state).values_list("pk", flat=True)}
        while direct.prune_jobs([state], 500, 2):
            pass
        self.gone |= before

    # Invariants.

    def check_invariants(self, *args):
        """Read the rows once for all invariants."""
        self._read_rows()
        super().check_invariants(*args)

    def _read_rows(self):
        self.jobs = list(Job.objects.select_related("process").annotate(db_now=Now()))
        self.executions = list(
            Execution.objects.values_list("job", "attempt", "outcome", "message")
        )
        self.of_keys |= {str(job.pk) for job in self.jobs if job.key}
        self._record_new_jobs()

    @invariant()
    def no_job_is_lost(self):
        assert {str(job.pk) for job in self.jobs} == self.enqueued - self.gone

    @invariant()
    def each_row_matches_its_owner(self):
        for job in self.jobs:
            fence = str(job.pk), job.attempt
            assert (job.state == State.RUNNING) == (job.process is not None)
            assert (job.state in FINISHED) == (job.finished_at is not None)
            assert job.failures <= job.attempt
            if job.state == State.RUNNING:
                assert self.given[fence] == job.process.name and fence not in self.ended
            elif job.attempt:
                assert fence in self.ended, (fence, job.state)
            self._check_row(job, fence)

    @invariant()
    def each_attempt_has_its_execution(self):
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
    def failures_count_failed_attempts(self):
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
    def no_job_starts_before_its_time(self):
        """A ``replace`` with a time waits for it, however the current attempt ends."""
        for job in self.jobs:
            if job.state in WAITING and (time := self.not_before.get(str(job.pk))):
                begins = (
                    min(job.run_after, job.db_now) if job.state == State.READY else job.run_after
                )
                assert begins > time - timedelta(seconds=1), "the job is due before its time"

    # Helpers.

    def _pause_or_resume(self, rows, name):
        (rows.resume if name in self.paused else rows.pause)()
        self.paused ^= {name}

    def _is_startable(self, job, queues):
        """True if the queue is served, has room, and neither it nor the task is paused."""
        if job.queue not in queues or self.paused & {job.queue, job.task}:
            return False
        most = self.restricted.get(job.queue)
        return most is None or most > Job.objects.running().filter(queue=job.queue).count()

    def _record_enqueued(self, *results, stage=None):
        """Record accepted calls of tasks, by the row that each result names."""
        for result in results:
            self.enqueued.add(result.id)
            self.not_to_run.discard(result.id)
            self.stopped.discard(result.id)
            self.wanted[result.id] = (stage, list(result.args))

    def _start_claim(self, actor, limit):
        return actor.submit(all_claimed, actor.claimer, limit)

    def _after_concurrent_settle(self):
        """Hook: a concurrent settlement may have changed the rows that the claim saw."""

    def _record_claimed(self, actor, jobs):
        self._record_new_jobs()
        large = [job.size for job in jobs if job.size]
        assert len(large) <= 1 or sum(large) <= PREFETCHED, "the claim loaded more than its limit"
        for job in jobs:
            fence = str(job.pk), job.attempt
            assert fence not in self.given, "an attempt was claimed twice"
            assert not self.paused & {job.queue, job.task}
            if most := self.restricted.get(job.queue):
                assert Job.objects.running().filter(queue=job.queue).count() <= most
            begins = self.not_before.pop(fence[0], None)
            assert begins is None or begins < job.started_at + timedelta(seconds=1), (
                "the job was claimed before its time"
            )
            assert fence[0] not in self.stopped, "the job runs again after an operator's stop"
            assert (job.stage, job.args) == self.wanted[fence[0]], (
                "the attempt does not have the arguments of the latest call"
            )
            self.given[fence] = actor.process.name
            self.called[fence] = job.stage, job.args
        actor.held += jobs

    def _release(self, actor, number, locked=frozenset()):
        """Release all but the jobs whose rows others have locked."""
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

    def _start_settle(self, actor, number, ends):
        jobs, actor.held = actor.held[:number], actor.held[number:]
        outcomes = [settlement(job, end) for job, end in zip(jobs, ends, strict=False)]
        return actor, outcomes, actor.submit(settle, outcomes)

    def _record_settled(self, actor, outcomes, future, locked=None):
        """Record a settlement. ``locked``: jobs with locked rows, if known."""
        settled = future.result(30)
        assert len(settled.written) + len(settled.locked_elsewhere) + len(settled.lost) == len(
            outcomes
        )
        assert (
            locked is None or {outcome.fence[0] for outcome in settled.locked_elsewhere} <= locked
        ), "a result without a locked row was not settled"
        for outcome in settled.written:
            self._record_accepted(outcome)
        for outcome in settled.lost:
            assert (str(outcome.fence[0]), outcome.fence[1]) in self.ended
        actor.held = [o.job for o in settled.locked_elsewhere] + actor.held

    def _record_accepted(self, outcome):
        """The job goes to its next stage, unless it was enqueued again meanwhile."""
        pk, attempt = fence = str(outcome.fence[0]), outcome.fence[1]
        assert self.ended.setdefault(fence, outcome.outcome) == outcome.outcome
        is_replaced = self.wanted[pk] != self.called[fence]
        # A concurrent call replaces the remaining stages.
        if outcome.state not in FINISHED and not (outcome.then and is_replaced):
            self.continued.add(fence)
        if is_replaced:
            return
        if next_stage := outcome.then:
            self.wanted[pk], self.since[pk] = (next_stage.stage, next_stage.args), attempt
        for child in outcome.children:
            self.enqueued.add(str(child.pk))
            self.wanted[str(child.pk)] = child.stage, child.args

    def _discard(self, jobs):
        self.not_to_run |= {str(pk) for pk in jobs.discardable().values_list("pk", flat=True)}
        jobs.discard()

    def _check_row(self, job, fence):
        """Check that a row has its latest call, and that a finished job has run it."""
        wanted = self.wanted[fence[0]]
        assert (job.stage, job.args) == wanted
        if fence[0] in self.stopped:
            assert job.state in (State.RUNNING, *FINISHED), (
                "the job continues after an operator's stop"
            )
            assert not job.rerun_requested
            return
        if job.state == State.RUNNING:
            assert job.rerun_requested == (wanted != self.called[fence])
        if job.state in FINISHED and not (
            job.state == State.DISCARDED and fence[0] in self.not_to_run
        ):
            assert wanted == self.called[fence], "the job ended before its latest call has run"

    def _record_new_jobs(self):
        """Hook: record jobs that the queue has enqueued itself."""

    def _recover(self, actor, exit_reason, then=None):
        dead = Process.objects.filter(pk=actor.process.pk)
        name = actor.process.name
        recovery.recover(task_backends["default"], dead, exit_reason, list)
        if then:
            settled = then[2].result(30)
            for outcome in settled.written:
                self._record_accepted(outcome)
            actor.late += [o.job for o in settled.locked_elsewhere]
        self._record_recovered({name})
        actor.late += actor.held
        actor.register()

    def _record_recovered(self, names):
        """Learn from the executions how attempts of recovered processes ended."""
        while Job.objects.orphaned().exists():  # Their rows were locked at that moment.
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
                actor.register()

    def _current(self, job):
        return str(job.pk), Job.objects.values_list("attempt", flat=True).filter(pk=job.pk).first()

    def _runs(self, job):
        return Job.objects.running().filter(pk=job.pk).exists()

    def _rows(self):
        return list(Job.objects.order_by("pk").values_list(*OF_A_ROW))
