from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..core.transactions import writing
from .asked import AskedExecutions
from .expressions import Among
from .failure import Failure
from .identifier import IdentifierField
from .job import Job
from .locking import lock
from .progress import Progress
from .semaphore import Semaphore
from .settlement import AttemptResult, Settled
from .states import Outcome, State
from .writing import insert

# Attempts kept of the earlier runs of a keyed job: at least this many, at most twice as many.
KEPT = 100


class ExecutionQuerySet(AskedExecutions):
    def settle(self, outcomes: Sequence[AttemptResult]) -> Settled:
        """Record the outcomes of attempts and advance their jobs, in one transaction.

        Each attempt gets its execution. Only the owner of a job settles it: see Fence. A job that
        an operator has stopped ends here, however its attempt ended.
        """
        with writing(self.db):
            jobs = Job.objects.using(self.db)
            ids = [outcome.fence[0] for outcome in outcomes]
            # Found by primary key alone: with the state in the WHERE, PostgreSQL may scan the index
            # of running jobs and, under a long transaction, all its dead entries (60 s instead of
            # 3 s for 100,000 jobs).
            rows = jobs.filter(Among(ids)).order_by("pk")
            columns = "pk", "attempt", "process_id", "asked_again", "queue", "stop_asked_at"
            running = [row[:-1] for row in lock(rows).values_list(*columns, "state") if row[-1] == State.RUNNING]
            seen = {row[0]: row[:3] for row in running}
            # Re-enqueued jobs, with the queue of that call.
            again = {pk: queue for pk, *_fence, again, queue, _stop in running if again}
            stopped = {row[0] for row in running if row[-1]}
            owned = [outcome for outcome in outcomes if seen.get(outcome.fence[0]) == outcome.fence]
            ends = [o.stopped() if o.continues and o.fence[0] in stopped else o for o in owned]
            settled = Settled(ends, [], [], [], [])
            erased = [outcome.fence[0] for outcome in settled.written if outcome.erase and outcome.fence[0] not in again]
            kept = [outcome for outcome in settled.written if outcome.fence[0] not in erased]
            jobs.apply_outcomes(kept, set(again))
            self._record([outcome for outcome in kept if outcome.recorded])
            Progress.objects.using(self.db).write([(o.job, o.noted) for o in kept if o.noted])
            jobs.erase(erased)
            self._forget_runs(kept)
            left = [outcome.job for outcome in settled.written]
            settled.unblocked.extend(Semaphore.objects.using(self.db).leave(left))
            settled.unblocked.extend(again[job.id] for job in left if job.id in again)
            if len(settled.written) < len(outcomes):
                self._sort_out(rows, [o for o in outcomes if seen.get(o.fence[0]) != o.fence], settled)
        return settled

    def of_this_run(self, job: Job) -> ExecutionQuerySet:
        """Return a job's attempts since it was enqueued, or re-enqueued by its key; oldest first.

        Their logs are not loaded.
        """
        return self.filter(job=job, attempt__gt=job.attempts_before).order_by("attempt").defer("log")

    def of_this_stage(self, job: Job) -> ExecutionQuerySet:
        """Return this run's attempts at the current stage; all, for a job without a pipeline."""
        return self.of_this_run(job).filter(stage=job.stage) if job.pipeline else self.of_this_run(job)

    def _forget_runs(self, outcomes: Iterable[AttemptResult]) -> None:
        """Keep only the newest attempts of the earlier runs of a keyed job.

        Such a job may run without end.
        """
        for outcome in outcomes:
            job, attempt = outcome.job, outcome.fence[1]
            if job.key and attempt % KEPT == 0:
                self.filter(job=job.id, attempt__lte=min(attempt - KEPT, job.attempts_before))._raw_delete(self.db)

    def _record(self, outcomes: Sequence[AttemptResult]) -> None:
        failures = Failure.objects.using(self.db)
        failed = [outcome.error for outcome in outcomes if outcome.error and outcome.is_failure]
        # The first error of each fingerprint represents its group.
        groups = failures.identify({error.fingerprint: error for error in reversed(failed)}) if failed else {}
        insert(self, COLUMNS, [_row(outcome, groups) for outcome in outcomes])
        if failed:
            failures.record([groups[error.fingerprint] for error in failed])

    def _sort_out(self, rows: Any, outcomes: Iterable[AttemptResult], settled: Settled) -> None:
        """Classify the outcomes whose rows were not locked here.

        The row is locked elsewhere and still owned, or the outcome was written before by a COMMIT
        of unknown result, or ownership is lost.
        """
        current = {row[0]: row for row in rows.values_list("pk", "attempt", "process_id", "state")}
        known = {
            (job, attempt): (process, outcome)
            for job, attempt, process, outcome in self.filter(job__in=list(current)).values_list(
                "job", "attempt", "process", "outcome"
            )
        }
        for outcome in outcomes:
            if current.get(outcome.fence[0]) == (*outcome.fence, State.RUNNING):
                settled.held.append(outcome)
            elif known.get(outcome.fence[:2]) == (outcome.process, outcome.outcome):
                settled.written.append(outcome)
            else:
                settled.lost.append(outcome)
        # Attempts whose number runs elsewhere, or will be assigned by the next claim: a failover
        # has lost their own claim.
        given = {row[:2] for row in current.values() if row[-1] == State.RUNNING}
        given |= {o.fence[:2] for o in settled.lost if o.fence[0] in current and current[o.fence[0]][1] < o.fence[1]}
        settled.twice.extend(
            o for o in settled.lost if o.fence[:2] in given or known.get(o.fence[:2], (o.process,))[0] != o.process
        )
        # An attempt of such a number gets its execution there.
        unknown = [o for o in settled.lost if o.fence[0] in current and o.fence[:2] not in given | known.keys()]
        self.bulk_create([_dropped(outcome) for outcome in unknown], ignore_conflicts=True)


# The columns that are written for an attempt.
COLUMNS = [
    *["job", "attempt", "stage", "outcome", "process", "claimed_at", "started_at", "finished_at"],
    *["error_type", "message", "traceback", "log", "failure"],
]


def _row(outcome: AttemptResult, groups: Mapping[str, int]) -> tuple[Any, ...]:
    job, error = outcome.job, outcome.error
    times = job.claimed_at, outcome.started_at, outcome.finished_at
    said = (error.type[:255], error.message, error.traceback) if error else ("", "", "")
    group = groups.get(error.fingerprint) if error and outcome.is_failure else None
    return (*outcome.fence[:2], job.stage, outcome.outcome.value, outcome.process, *times, *said, outcome.log, group)


def _dropped(outcome: AttemptResult) -> Execution:
    """Return the execution of an attempt that ended after its job had passed to another owner."""
    columns = dict(zip(COLUMNS, _row(outcome, {}), strict=True))
    message = f"It ended ({outcome.outcome.value}) when its job belonged to somebody else; that outcome was dropped."
    return Execution(job_id=columns.pop("job"), **{**columns, "outcome": Outcome.LOST, "message": message})


class Execution(models.Model):
    """One attempt to run a job: written once, when it has ended, and never changed."""

    Outcome = Outcome

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
    process = IdentifierField(_("process"), max_length=200)
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
