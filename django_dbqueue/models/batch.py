from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from uuid import UUID

from django.db import models
from django.db.models import Count, Exists, OuterRef, Q
from django.utils.translation import gettext_lazy as _

from ..core.transactions import writing
from ..core.uuid7 import uuid7
from .batch_share import BatchShare
from .document import DocumentField
from .enums import UNFINISHED, State
from .expressions import Now
from .job import Job, JobQuerySet
from .primary import PrimaryQuerySet


class BatchQuerySet(PrimaryQuerySet["Batch"]):
    """Batches: which are open, and which may finish."""

    def open(self) -> BatchQuerySet:
        """Return the batches that are sealed and not finished."""
        return self.filter(sealed_at__isnull=False, finished_at=None)

    def swept(self) -> BatchQuerySet:
        """Return the batches that a sweep scans: open and abandoned ones."""
        return self.filter(Q(sealed_at__isnull=False) | Q(opened_until__lt=Now()), finished_at=None)

    def due(self) -> BatchQuerySet:
        """Return the open batches that wait for no unfinished job."""
        unfinished = Job.objects.using(self.db).filter(batch=OuterRef("pk"), state__in=UNFINISHED)
        shared = BatchShare.objects.using(self.db).filter(
            of_shared(self.db, UNFINISHED), batch=OuterRef("pk"), has_failed=False
        )
        return self.open().exclude(Exists(unfinished)).exclude(Exists(shared))

    def queues(self) -> set[str]:
        """Return the queues of the jobs that will follow the batches."""
        columns = [
            each for row in self.values_list("on_finish", "on_success") for each in row if each
        ]
        return {each["queue"] for each in columns}

    def jobs(self) -> JobQuerySet:
        """Return all jobs that belong to the batches."""
        return Job.objects.using(self.db).filter(batch__in=list(self.values_list("pk", flat=True)))


def of_shared(database: str, states: Sequence[str]) -> Exists:
    """Test if the job of a share is in one of these states. A deleted job was successful."""
    return Exists(Job.objects.using(database).filter(pk=OuterRef("job"), state__in=states))


class Batch(models.Model):
    """A group of jobs that belong together.

    The batch has finished when all of them have ended, in whatever way.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    description = models.CharField(_("description"), max_length=200, blank=True)
    # Jobs that are enqueued when the batch has finished, as their columns.
    on_finish = DocumentField(_("on finish"), null=True, blank=True)
    on_success = DocumentField(_("on success"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    # Set while the batch is being filled. A sealed batch has it only if its opener was presumed
    # dead.
    opened_until = models.DateTimeField(_("open until"), null=True, blank=True)
    sealed_at = models.DateTimeField(_("sealed at"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True, db_index=True)

    objects = BatchQuerySet.as_manager()

    class Meta:
        verbose_name = _("batch")
        verbose_name_plural = _("batches")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.description or str(self.pk)

    def callbacks(self, *, successful: bool) -> list[Job]:
        """Return the jobs to enqueue when the batch has finished.

        The batch stores their ids in its columns.
        """
        wanted = [
            columns
            for columns in (self.on_finish, self.on_success if successful else None)
            if columns
        ]
        jobs = [Job.from_columns(columns) for columns in wanted]
        for columns, job in zip(wanted, jobs, strict=True):
            columns["id"] = str(job.pk)
        return jobs

    def follower(self, name: str) -> str | None:
        """Return the id of the job enqueued for ``on_finish`` or ``on_success``, or None."""
        return (getattr(self, name) or {}).get("id")

    @property
    def is_abandoned(self) -> bool:
        """True if the batch was sealed because its opener added nothing for too long.

        An abandoned batch may be incomplete.
        """
        return self.sealed_at is not None and self.opened_until is not None

    def jobs(self) -> JobQuerySet:
        return Job.objects.using(self._state.db).filter(batch=self.pk)

    def progress(self) -> Counter[str]:
        """Count the batch's jobs in each state."""
        return Counter(
            dict(self.jobs().order_by().values_list("state").annotate(number=Count("pk")))
        )

    def discard(self) -> int:
        """Discard the batch's waiting jobs, and requested reruns of its jobs. Returns how many."""
        reruns = self.jobs().take_back_reruns(
            lambda jobs: jobs.running().filter(rerun_requested=True)
        )
        return reruns + int(self.jobs().waiting().discard())

    def leave(self, ids: Sequence[UUID]) -> None:
        """Remove jobs from the batch, as if it had not enqueued them."""
        for start in range(0, len(ids), 1000):
            self.jobs().filter(pk__in=ids[start : start + 1000]).update(batch=None)

    def withdraw(self, ids: Sequence[UUID]) -> None:
        """Discard waiting jobs as if they had not been added.

        They do not count as failed members.
        """
        with writing(self._state.db):
            for start in range(0, len(ids), 1000):
                added = self.jobs().filter(pk__in=ids[start : start + 1000])
                added.waiting().discard()
                added.filter(state=State.DISCARDED).update(batch=None)
