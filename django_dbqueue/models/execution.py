from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import models, transaction
from django.utils.translation import gettext_lazy as _

from ..errors import ErrorReport
from .asked import AskedExecutions
from .bulk import insert
from .expressions import lock
from .failure import Failure
from .job import Job
from .noted import Noted
from .progress import Progress
from .semaphore import Semaphore
from .states import State

# Of the earlier runs of a key's job, so many attempts are kept at least, and twice as many at most.
KEPT = 100


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """How an attempt ended, and what becomes of its job: the next state, and after which wait in seconds, or at which time.

    erase: nothing of the job is kept.
    then: how the job is at the next stage of its pipeline. children: the new jobs that it has become.
    """

    execution: Execution
    state: State
    wait: float | datetime = 0.0
    result: Any = None
    error: ErrorReport | None = None
    erase: bool = False
    then: Job | None = None
    children: Sequence[Job] = ()
    noted: Noted | None = None

    @classmethod
    def of(
        cls,
        job: Job,
        outcome: Execution.Outcome,
        state: State,
        *,
        started_at: datetime | None = None,
        wait: float | datetime = 0.0,
        result: Any = None,
        error: ErrorReport | None = None,
        **rest: Any,
    ) -> Settlement:
        """The end, now, of the attempt that a claimed job is in."""
        execution = Execution(
            job=job,
            attempt=job.attempt,
            stage=job.stage,
            outcome=outcome,
            process=job.process.name if job.process else "",
            claimed_at=job.claimed_at,
            started_at=started_at or job.claimed_at,
            finished_at=job.now(),
        )
        if error:
            execution.error_type, execution.message, execution.traceback = error.type[:255], error.message, error.traceback
        return cls(execution=execution, state=state, wait=wait, result=result, error=error, **rest)

    @property
    def new(self) -> list[Job]:
        """What is to run after it: the job at its next stage, or the new jobs that it has become."""
        return [self.then, *self.children] if self.then else list(self.children)

    @property
    def is_failure(self) -> bool:
        """Whether it counts as a failed attempt, and belongs to a group of failures."""
        return self.execution.outcome in FAILURES

    @property
    def fence(self) -> tuple[UUID, int]:
        return self.execution.job_id, self.execution.attempt


class Settled(NamedTuple):
    """The outcomes that were written, those whose job somebody else held, and those whose job was lost meanwhile.

    unblocked: the queues of jobs that had waited for a slot, and are ready.
    """

    written: list[Settlement]
    held: list[Settlement]
    lost: list[Settlement]
    unblocked: list[str]


class ExecutionQuerySet(AskedExecutions):
    def settle(self, outcomes: Sequence[Settlement]) -> Settled:
        """Record how attempts ended, in one transaction: their jobs move on, and each gets its execution.

        Only who owns a job may settle it: (id, attempt) is the fence.
        """
        with transaction.atomic(using=self.db):
            jobs = Job.objects.using(self.db)
            ids = [outcome.execution.job_id for outcome in outcomes]
            # Found by key alone: with the state in the WHERE, PostgreSQL may walk the index of running jobs, and under a
            # long transaction all its dead entries (60 s instead of 3 for 100,000 jobs).
            rows = jobs.filter(pk__in=ids).order_by("pk").values_list("pk", "attempt", "state", "asked_again")
            running = [row for row in lock(rows) if row[2] == State.RUNNING]
            seen = {pk: (pk, attempt) for pk, attempt, _state, _again in running}
            again = {pk for pk, _attempt, _state, again in running if again}
            settled = Settled([o for o in outcomes if seen.get(o.fence[0]) == o.fence], [], [], [])
            erased = [outcome.fence[0] for outcome in settled.written if outcome.erase and outcome.fence[0] not in again]
            kept = [outcome for outcome in settled.written if outcome.fence[0] not in erased]
            jobs.move_on(kept, again)
            self._record(kept)
            Progress.objects.using(self.db).write([(o.execution.job, o.noted) for o in kept if o.noted])
            jobs.erase(erased)
            self._forget_runs(outcome.execution for outcome in kept)
            left = [outcome.execution.job for outcome in settled.written]
            settled.unblocked.extend(Semaphore.objects.using(self.db).leave(left))
            if len(settled.written) < len(outcomes):
                self._sort_out(rows, [o for o in outcomes if seen.get(o.fence[0]) != o.fence], settled)
        return settled

    def of_this_run(self, job: Job) -> ExecutionQuerySet:
        """A job's attempts since it was enqueued, or asked for again by its key; oldest first, without what they logged."""
        return self.filter(job=job, attempt__gt=job.attempts_before).order_by("attempt").defer("log")

    def of_this_stage(self, job: Job) -> ExecutionQuerySet:
        """Those of them at the stage that it is at; of a job without a pipeline, all."""
        return self.of_this_run(job).filter(stage=job.stage) if job.pipeline else self.of_this_run(job)

    def _forget_runs(self, executions: Iterable[Execution]) -> None:
        """A key's job may run without end: of its earlier runs, only the newest attempts are kept."""
        for each in executions:
            if each.job.key and each.attempt % KEPT == 0:
                oldest = min(each.attempt - KEPT, each.job.attempts_before)
                self.filter(job=each.job_id, attempt__lte=oldest)._raw_delete(self.db)

    def _record(self, outcomes: list[Settlement]) -> None:
        failures = Failure.objects.using(self.db)
        failed = {o.error.fingerprint: o.error for o in outcomes if o.error and o.is_failure}
        groups = failures.identify(failed) if failed else {}
        for outcome in outcomes:
            alike = outcome.error.fingerprint if outcome.error and outcome.is_failure else None
            outcome.execution.failure_id = groups.get(alike) if alike else None
        insert(self, [outcome.execution for outcome in outcomes])
        if groups:
            failures.record([o.execution.failure_id for o in outcomes if o.execution.failure_id])

    def _sort_out(self, rows: Any, outcomes: Iterable[Settlement], settled: Settled) -> None:
        """What was not ours to lock is held by somebody and still ours, or written before by a COMMIT of unknown end, or lost."""
        current = {pk: (pk, attempt, state) for pk, attempt, state, _again in rows}
        known = {
            (job, attempt): (process, outcome)
            for job, attempt, process, outcome in self.filter(job__in=list(current)).values_list(
                "job", "attempt", "process", "outcome"
            )
        }
        for outcome in outcomes:
            if current.get(outcome.fence[0]) == (*outcome.fence, State.RUNNING):
                settled.held.append(outcome)
            elif known.get(outcome.fence) == (outcome.execution.process, outcome.execution.outcome):
                settled.written.append(outcome)
            else:
                settled.lost.append(outcome)
        unknown = [o for o in settled.lost if o.fence not in known and o.fence[0] in current]
        self.bulk_create([_dropped(outcome.execution) for outcome in unknown], ignore_conflicts=True)


def _dropped(execution: Execution) -> Execution:
    """What is recorded of an attempt that ended after its job had gone to somebody else."""
    execution.message = f"It ended ({execution.outcome}) when its job belonged to somebody else; that outcome was dropped."
    execution.outcome = Execution.Outcome.LOST
    return execution


class Execution(models.Model):
    """One attempt to run a job: written once, when it has ended, and never changed."""

    class Outcome(models.TextChoices):
        SUCCESSFUL = "successful", _("Successful")
        FAILED = "failed", _("Failed")
        # It ran longer than it may.
        TIMED_OUT = "timed_out", _("Timed out")
        # Its process died.
        LOST = "lost", _("Lost")
        # Its process was told to stop, and gave it back.
        INTERRUPTED = "interrupted", _("Interrupted")
        # It asked to be run again later.
        SNOOZED = "snoozed", _("Snoozed")
        # It raised what its task is called off for, an operator stopped it, or it had expired.
        DISCARDED = "discarded", _("Discarded")

    job = models.ForeignKey(
        Job,
        verbose_name=_("job"),
        on_delete=models.CASCADE,
        db_constraint=False,
        db_index=False,
        related_name="executions",
    )
    attempt = models.PositiveIntegerField(_("attempt"))
    stage = models.PositiveSmallIntegerField(_("stage"), null=True, blank=True)
    outcome = models.CharField(_("outcome"), max_length=20, choices=Outcome.choices)
    process = models.CharField(_("process"), max_length=200)
    claimed_at = models.DateTimeField(_("claimed at"))
    started_at = models.DateTimeField(_("started at"))
    finished_at = models.DateTimeField(_("finished at"))
    error_type = models.CharField(_("error"), max_length=255, blank=True)
    message = models.TextField(_("message"), blank=True)
    traceback = models.TextField(_("traceback"), blank=True)
    log = models.TextField(_("log"), blank=True)
    failure = models.ForeignKey(
        Failure,
        verbose_name=_("failure"),
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        db_constraint=False,
        related_name="executions",
    )

    objects = ExecutionQuerySet.as_manager()

    class Meta:
        verbose_name = _("execution")
        verbose_name_plural = _("executions")
        default_permissions = ()
        constraints = [models.UniqueConstraint(name="dbqueue_execution_once", fields=["job", "attempt"])]

    def __str__(self) -> str:
        return f"{self.job_id} #{self.attempt}"


FAILURES = (Execution.Outcome.FAILED, Execution.Outcome.TIMED_OUT, Execution.Outcome.LOST)
