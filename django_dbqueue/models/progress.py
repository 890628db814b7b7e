from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..core.progress_value import LONGEST_NOTE, ProgressValue
from ..core.transactions import writing
from .claimed_job import ClaimedJob
from .enums import Fence, State
from .expressions import Now
from .job import Job
from .locking import by_primary_key, lock
from .primary import PrimaryQuerySet


class Recorded(NamedTuple):
    """Attempts whose progress was written, and attempts whose job was lost."""

    written: set[Fence]
    lost: set[Fence]


class ProgressQuerySet(PrimaryQuerySet["Progress"]):
    """Progress of jobs, written by their workers."""

    def record(self, notes: Sequence[tuple[ClaimedJob, ProgressValue]]) -> Recorded:
        """Write the progress of running jobs that their process still owns (see Fence).

        A job that another transaction has locked is skipped: neither written nor lost.
        """
        with writing(self.db):
            jobs = Job.objects.using(self.db).filter(pk__in=[job.pk for job, _ in notes])
            rows = by_primary_key(jobs.order_by("pk"))
            wanted, free = {job.fence for job, _ in notes}, _running(lock(rows))
            self.write([(job, noted) for job, noted in notes if job.fence in free])
            lost = wanted - free - _running(rows) if wanted - free else set()
        return Recorded(wanted & free, lost)

    def write(self, notes: Iterable[tuple[Job, ProgressValue]]) -> None:
        """Upsert the latest progress of each job.

        The caller owns the jobs and has locked their rows.
        """
        self.upsert(
            ("job", "attempt", *ProgressValue._fields),
            [(job.pk, job.attempt, *noted) for job, noted in notes],
            key=("job",),
            fields=("attempt", *ProgressValue._fields, "updated_at"),
        )


def _running(rows: models.QuerySet[Job]) -> set[Fence]:
    found = rows.values_list("pk", "attempt", "process_id", "state")
    return {
        (pk, attempt, process) for pk, attempt, process, state in found if state == State.RUNNING
    }


class Progress(models.Model):
    """Progress of a job's last attempt. A separate row, so that the job's row is not rewritten."""

    job = models.OneToOneField(
        Job,
        verbose_name=_("job"),
        on_delete=models.CASCADE,
        db_constraint=False,
        primary_key=True,
        related_name="progress",
    )
    attempt = models.PositiveIntegerField(_("attempt"))
    done = models.FloatField(_("done"))
    total = models.FloatField(_("total"), null=True, blank=True)
    note = models.CharField(_("note"), max_length=LONGEST_NOTE, blank=True)
    updated_at = models.DateTimeField(_("updated at"), db_default=Now())

    objects = ProgressQuerySet.as_manager()

    class Meta:
        verbose_name = _("progress")
        verbose_name_plural = _("progress")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.job_id} #{self.attempt}"

    @property
    def value(self) -> ProgressValue:
        return ProgressValue.of(self.done, self.total, self.note)


def progress_of(job: Job) -> Progress | None:
    """Return the progress of the job's last attempt; no query if it was loaded with the job."""
    found: Progress | None = getattr(job, "progress", None)
    return found if found and found.attempt == job.attempt else None
