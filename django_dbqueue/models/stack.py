from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import connections, models
from django.utils.translation import gettext_lazy as _

from .expressions import Now
from .job import Job
from .primary import PrimaryQuerySet


class StackQuerySet(PrimaryQuerySet["Stack"]):
    def record(self, job: Job, text: str) -> None:
        """Upsert the latest stack trace of a job's attempt."""
        unique = None if connections[self.db].vendor == "mysql" else ["job"]
        changed = ["attempt", "text", "taken_at"]
        row = self.model(job=job, attempt=job.attempt, text=text, taken_at=Now())
        self.bulk_create([row], update_conflicts=True, update_fields=changed, unique_fields=unique)

    def of(self, jobs: Iterable[Job]) -> dict[Any, str]:
        """Return the stack traces of the jobs' current attempts, by job."""
        attempts = {job.pk: job.attempt for job in jobs}
        rows = self.filter(job__in=list(attempts)).values_list("job", "attempt", "text") if attempts else ()
        return {pk: text for pk, attempt, text in rows if attempts[pk] == attempt}


class Stack(models.Model):
    """Stack trace of a hanged job, taken when its worker last checked."""

    job = models.OneToOneField(
        Job, verbose_name=_("job"), on_delete=models.CASCADE, db_constraint=False, primary_key=True, related_name="stack"
    )
    attempt = models.PositiveIntegerField(_("attempt"))
    taken_at = models.DateTimeField(_("taken at"), db_default=Now())
    text = models.TextField(_("stack"))

    objects = StackQuerySet.as_manager()

    class Meta:
        verbose_name = _("stack")
        verbose_name_plural = _("stacks")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.job_id} #{self.attempt}"
