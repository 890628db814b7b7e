"""Runs that a batch waits for beside its own rows, and its failures that left the job's row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from django.db import models

from .primary import PrimaryQuerySet
from .states import UNSUCCESSFUL


class EndedRun(NamedTuple):
    """A run whose outcome the job's row is about to lose.

    batch: the batch that the row leaves, if any.
    attempt: shares of later attempts belong to the next run; None if all shares end.
    """

    job: UUID
    state: str
    batch: UUID | None = None
    attempt: int | None = None


class BatchShareQuerySet(PrimaryQuerySet["BatchShare"]):
    """Queryset of batch shares.

    Rows are only inserted, or changed under the lock of their job. They need no lock of a batch,
    which enqueuers hold.
    """

    def let_go(self, runs: Sequence[EndedRun]) -> None:
        """Keep the failures of ended runs, and end the shares of these runs."""
        ended = {run.job: run for run in runs}
        pending = self.filter(job__in=list(ended), has_failed=False).values_list("pk", "job", "attempt")
        over = [(pk, ended[job]) for pk, job, attempt in pending if attempt <= (ended[job].attempt or attempt)]
        if failed := [pk for pk, run in over if run.state in UNSUCCESSFUL]:
            self.filter(pk__in=failed).update(has_failed=True)
        if successful := [pk for pk, run in over if run.state not in UNSUCCESSFUL]:
            self.filter(pk__in=successful)._raw_delete(self.db)
        left = [(run.job, batch) for run in runs if (batch := run.batch) and run.state in UNSUCCESSFUL]
        self.bulk_create([BatchShare(batch_id=batch, job=job, has_failed=True) for job, batch in left])


class BatchShare(models.Model):
    """A batch's share in the run of a job that has left the batch.

    The batch waits for a job that now belongs to another batch or to none; or a job that belonged
    to it has failed.
    """

    batch = models.ForeignKey("dbqueue.Batch", on_delete=models.CASCADE, db_constraint=False, related_name="+")
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
