"""Runs that a batch waits for beside its own rows, and its failures that left the job's row."""

from __future__ import annotations

from django.db import models

from .primary import PrimaryQuerySet


class BatchShareQuerySet(PrimaryQuerySet["BatchShare"]):
    """Shares, read from the primary."""


class BatchShare(models.Model):
    """A batch's share in the run of a job that has left the batch.

    The batch waits for a job that now belongs to another batch or to none; or a job that belonged
    to it has failed. Rows are only inserted, or changed under the lock of their job: they need no
    lock of a batch, which enqueuers hold.
    """

    batch = models.ForeignKey(
        "dbqueue.Batch", on_delete=models.CASCADE, db_constraint=False, related_name="+"
    )
    # No foreign key: the share outlives the job.
    job = models.UUIDField(db_index=True)
    # The attempt of the awaited run that was current or next when the share was written.
    attempt = models.PositiveIntegerField(default=0)
    has_failed = models.BooleanField(default=False)

    objects = BatchShareQuerySet.as_manager()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.job} #{self.attempt}"
