from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import models, transaction
from django.db.models import Exists, F, OuterRef
from django.utils.translation import gettext_lazy as _

from ..errors import ErrorReport
from .counts import LIMIT, Many
from .expressions import Now, after, lock
from .failure import Failure
from .job import Job
from .jobs import JobQuerySet
from .states import FINISHED, State


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """How an attempt ended, and what becomes of its job: the next state, and after which wait in seconds.

    ``erase``: nothing of the job is kept.
    """

    execution: Execution
    state: State
    wait: float = 0.0
    result: Any = None
    error: ErrorReport | None = None
    erase: bool = False

    @classmethod
    def of(
        cls,
        job: Job,
        outcome: Execution.Outcome,
        state: State,
        *,
        started_at: datetime | None = None,
        wait: float = 0.0,
        result: Any = None,
        error: ErrorReport | None = None,
        erase: bool = False,
    ) -> Settlement:
        """The end, now, of the attempt that a claimed job is in."""
        execution = Execution(
            job=job,
            attempt=job.attempt,
            outcome=outcome,
            process=job.process.name if job.process else "",
            claimed_at=job.claimed_at,
            started_at=started_at or job.claimed_at,
            finished_at=job.now(),
        )
        if error:
            execution.error_type, execution.message, execution.traceback = error.type[:255], error.message, error.traceback
        return cls(execution=execution, state=state, wait=wait, result=result, error=error, erase=erase)

    @property
    def is_failure(self) -> bool:
        """Whether it counts as a failed attempt, and belongs to a group of failures."""
        return self.execution.outcome in FAILURES

    @property
    def fence(self) -> tuple[UUID, int]:
        return self.execution.job_id, self.execution.attempt

    @property
    def change(self) -> tuple[Any, ...]:
        """What its job's row changes to; equal for jobs that one statement can settle."""
        return self.state, self.wait, self.is_failure


class Settled(NamedTuple):
    """The outcomes that were written, those whose job somebody else held, and those whose job was lost meanwhile."""

    written: list[Settlement]
    held: list[Settlement]
    lost: list[Settlement]


class ExecutionQuerySet(models.QuerySet["Execution"]):
    def settle(self, outcomes: Sequence[Settlement]) -> Settled:
        """Record how attempts ended, in one transaction: their jobs move on, and each gets its execution.

        Only who owns a job may settle it: (id, attempt) is the fence.
        """
        with transaction.atomic(using=self.db):
            jobs = Job.objects.using(self.db)
            ids = [outcome.execution.job_id for outcome in outcomes]
            # Found by key alone: with the state in the WHERE, PostgreSQL may walk the index of running jobs, and under a
            # long transaction all its dead entries (60 s instead of 3 for 100,000 jobs).
            rows = jobs.filter(pk__in=ids).order_by("pk").values_list("pk", "attempt", "state")
            seen = {pk: (pk, attempt) for pk, attempt, state in lock(rows) if state == State.RUNNING}
            settled = Settled([o for o in outcomes if seen.get(o.fence[0]) == o.fence], [], [])
            kept = [outcome for outcome in settled.written if not outcome.erase]
            _move_on(jobs, kept)
            self._record(kept)
            if len(kept) < len(settled.written):
                jobs.erase([outcome.fence[0] for outcome in settled.written if outcome.erase])
            if len(settled.written) < len(outcomes):
                self._sort_out(rows, [o for o in outcomes if seen.get(o.fence[0]) != o.fence], settled)
        return settled

    def failed_jobs(self, failures: Iterable[Any]) -> JobQuerySet:
        """The jobs that are failed now, and were failed by one of these failures the last time."""
        last = self.filter(job=OuterRef("pk"), attempt=OuterRef("attempt"), failure__in=failures)
        return Job.objects.using(self._db).failed().filter(Exists(last))  # type: ignore[attr-defined]

    def count_failed_jobs(self, failures: Iterable[Any]) -> dict[int, int]:
        """How many jobs are failed now by each of these failures; at least so many, where there are very many in all."""
        last = self.filter(failure__in=failures, job__state=State.FAILED, attempt=F("job__attempt"))
        found = Counter(last.values_list("failure_id", flat=True)[: LIMIT + 1])
        number = Many if found.total() > LIMIT else int
        return {failure: number(found[failure]) for failure in failures}

    def last_of_each(self) -> ExecutionQuerySet:
        """For a subquery in a query of jobs: each one's last attempt."""
        return self.filter(job=OuterRef("pk")).order_by("-attempt")[:1]

    def newest_of(self, failure: Failure, limit: int) -> list[Execution]:
        """The attempts that failed so most recently, with their jobs, those that were deleted left out."""
        return list(self.filter(failure=failure).select_related("job").order_by("-pk")[:limit])

    def _record(self, outcomes: list[Settlement]) -> None:
        failures = Failure.objects.using(self.db)
        failed = {o.error.fingerprint: o.error for o in outcomes if o.error and o.is_failure}
        groups = failures.identify(failed) if failed else {}
        for outcome in outcomes:
            alike = outcome.error.fingerprint if outcome.error and outcome.is_failure else None
            outcome.execution.failure_id = groups.get(alike) if alike else None
        self.bulk_create([outcome.execution for outcome in outcomes])
        if groups:
            failures.record([o.execution.failure_id for o in outcomes if o.execution.failure_id])

    def _sort_out(self, rows: Any, outcomes: Iterable[Settlement], settled: Settled) -> None:
        """What was not ours to lock is held by somebody and still ours, or written before by a COMMIT of unknown end, or lost."""
        current = {pk: (pk, attempt, state) for pk, attempt, state in rows}
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


def _move_on(jobs: models.QuerySet[Job], outcomes: list[Settlement]) -> None:
    alike = defaultdict(list)
    for outcome in outcomes:
        alike[outcome.change].append(outcome.execution.job_id)
    for (state, wait, failed), ids in alike.items():
        changes: dict[str, Any] = {"state": state, "process": None}
        if failed:
            changes["failures"] = F("failures") + 1
        if state in FINISHED:
            changes["finished_at"] = Now()
        else:
            changes["run_after"] = after(wait)
        jobs.filter(pk__in=ids).update(**changes)
    results = [Job(pk=o.execution.job_id, result=o.result) for o in outcomes if o.result is not None]
    jobs.bulk_update(results, ["result"])


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
        # It raised what its task is called off for, or an operator stopped it.
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
    outcome = models.CharField(_("outcome"), max_length=20, choices=Outcome.choices)
    process = models.CharField(_("process"), max_length=200)
    claimed_at = models.DateTimeField(_("claimed at"))
    started_at = models.DateTimeField(_("started at"))
    finished_at = models.DateTimeField(_("finished at"))
    error_type = models.CharField(_("error"), max_length=255, blank=True)
    message = models.TextField(_("message"), blank=True)
    traceback = models.TextField(_("traceback"), blank=True)
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
