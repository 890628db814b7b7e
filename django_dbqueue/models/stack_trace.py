from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

from django.db import models
from django.db.models import Exists, OuterRef, Q
from django.utils.translation import gettext_lazy as _

from .document import DocumentField
from .expressions import Now, now_plus
from .job import Job, JobQuerySet
from .primary import PrimaryQuerySet
from .process import Process


class StackTraceQuerySet(PrimaryQuerySet["StackTrace"]):
    def record(self, job: Job, text: str, sessions: Mapping[str, int]) -> None:
        """Upsert the latest stack trace of a job's attempt, and its database sessions."""
        self.upsert(
            ("job", "attempt", "text", "sessions"),
            [(job.pk, job.attempt, text, dict(sessions))],
            key=("job",),
            fields=("attempt", "text", "sessions", "taken_at"),
        )

    def of(self, jobs: Iterable[Job]) -> dict[UUID, str]:
        """Return the stack traces of the jobs' current attempts, by job."""
        attempts = {job.pk: job.attempt for job in jobs}
        rows = (
            self.filter(job__in=list(attempts)).values_list("job", "attempt", "text")
            if attempts
            else ()
        )
        return {pk: text for pk, attempt, text in rows if attempts[pk] == attempt}


class StackTrace(models.Model):
    """Stack trace of a hanged job, taken when its worker last checked."""

    job = models.OneToOneField(
        Job,
        verbose_name=_("job"),
        on_delete=models.CASCADE,
        db_constraint=False,
        primary_key=True,
        related_name="stack",
    )
    attempt = models.PositiveIntegerField(_("attempt"))
    taken_at = models.DateTimeField(_("taken at"), db_default=Now())
    text = models.TextField(_("stack"))
    # The PostgreSQL sessions of its thread: the process id of each, by alias of the database.
    sessions = DocumentField(default=dict, db_default={})

    objects = StackTraceQuerySet.as_manager()

    class Meta:
        verbose_name = _("stack")
        verbose_name_plural = _("stacks")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.job_id} #{self.attempt}"


class HangedJobQuerySet(JobQuerySet):
    def hanged(self, *, after_seconds: float, by_queue: Mapping[str, float]) -> HangedJobQuerySet:
        """Return the running jobs that hang.

        They run longer than jobs of their queue should, were noticed by their worker, or belong
        to a process without a heartbeat.
        """
        long = Q(started_at__lt=now_plus(-after_seconds)) & ~Q(queue__in=list(by_queue))
        for queue, seconds in by_queue.items():
            long |= Q(queue=queue, started_at__lt=now_plus(-seconds))
        noticed = StackTrace.objects.using(self.db).filter(
            job=OuterRef("pk"), attempt=OuterRef("attempt")
        )
        beating = Process.objects.using(self.db).alive().filter(pk=OuterRef("process_id"))
        return self.filter(state=Job.State.RUNNING).filter(
            long | Exists(noticed) | ~Exists(beating)
        )


class HangedJob(Job):
    """A job on the page of hanged jobs. The permission to view jobs covers it."""

    objects = HangedJobQuerySet.as_manager()  # type: ignore[misc]

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("hanged job")
        verbose_name_plural = _("hanged jobs")
