from __future__ import annotations

from collections.abc import Iterable, Sequence

from django.db import models
from django.db.models import Exists, OuterRef
from django.utils.translation import gettext_lazy as _

from ..exceptions import InvalidTaskPath
from .affected_jobs import AFFECTED, AffectedJobs, count_affected_jobs
from .enums import Outcome, State
from .failure import Failure
from .identifier import IdentifierField
from .job import Job, JobQuerySet
from .primary import PrimaryQuerySet

# The error of an attempt whose worker does not know the task.
UNKNOWN_TASK = f"{InvalidTaskPath.__module__}.{InvalidTaskPath.__qualname__}"


class ExecutionQuerySet(PrimaryQuerySet["Execution"]):
    """Executions: the attempts of a job, and the jobs of a failure."""

    def of_this_run(self, job: Job) -> ExecutionQuerySet:
        """Return a job's attempts since it was enqueued, or re-enqueued by its key; oldest first.

        Their logs are not loaded.
        """
        return (
            self.filter(job=job, attempt__gt=job.attempts_before).order_by("attempt").defer("log")
        )

    def of_this_stage(self, job: Job) -> ExecutionQuerySet:
        """Return this run's attempts at the current stage; all, for a job without a pipeline."""
        return (
            self.of_this_run(job).filter(stage=job.stage) if job.pipeline else self.of_this_run(job)
        )

    def affected_jobs(self, failures: Iterable[Failure]) -> JobQuerySet:
        """Return the jobs whose last attempt in their current run was one of these failures.

        They are failed now, or wait to be retried.
        """
        last = self.filter(job=OuterRef("pk"), attempt=OuterRef("attempt"), failure__in=failures)
        jobs = Job.objects.using(self.db).attempted()
        return jobs.filter(Exists(last), state__in=AFFECTED)

    def count_affected_jobs(self, failures: Sequence[int]) -> dict[int, AffectedJobs]:
        """Count the affected jobs of each of these failures, up to a limit."""
        return count_affected_jobs(self, failures)

    def last_of_each(self) -> models.QuerySet[Execution]:
        """Return each job's last attempt in its current run, for a subquery in a query of jobs."""
        this_run = self.filter(job=OuterRef("pk"), attempt__gt=OuterRef("attempts_before"))
        return this_run.order_by("-attempt")[:1]

    def is_task_unknown(self, job: Job) -> bool:
        """Return whether a job waits to be tried again because no worker has known its task."""
        if job.state != State.SCHEDULED or job.attempt <= job.attempts_before:
            return False
        attempts = self.filter(job=job).order_by("-attempt")
        return attempts.values_list("error_type", flat=True).first() == UNKNOWN_TASK

    def newest_of(self, failure: Failure, limit: int) -> list[Execution]:
        """Return the most recent attempts of this failure, with their jobs.

        Attempts of deleted jobs are left out.
        """
        return list(
            self.filter(failure=failure).select_related("job").defer("log").order_by("-pk")[:limit]
        )


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
    release = IdentifierField(_("release"), max_length=100, blank=True, default="", db_default="")
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
        constraints = [
            models.UniqueConstraint(name="dbqueue_execution_once", fields=["job", "attempt"])
        ]

    def __str__(self) -> str:
        return f"{self.job_id} #{self.attempt}"
