from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from django.db import DatabaseError, OperationalError, connections, models
from django.db.models import Count, Exists, F, OuterRef, Q
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_lazy as _

from ..core.transactions import writing
from ..core.uuid7 import uuid7
from ..exceptions import BatchFinished
from .batch_share import BatchShare
from .cluster import certify
from .counts import LIMIT, count
from .document import DocumentField
from .expressions import Now, after
from .job import Job
from .jobs import JobQuerySet
from .locking import lock, lock_first
from .primary import PrimaryQuerySet
from .states import UNFINISHED, UNSUCCESSFUL, State

logger = logging.getLogger("django_dbqueue")

# The longest time that a batch stays open after its opener has added a job. A dead opener is
# noticed after it.
OPEN_SECONDS = 3600.0


class BatchQuerySet(PrimaryQuerySet["Batch"]):
    def create_open(self, batch: Batch) -> None:
        """Write a new batch for its opener to fill."""
        batch.opened_until = after(OPEN_SECONDS)
        self.bulk_create([batch])

    def join(self, pk: Any, *, opens: bool = False) -> None:
        """Hold a batch open until the end of the transaction, while jobs are added to it.

        ``opens``: the caller is the opener. It has OPEN_SECONDS again until it adds the next job.

        Raises BatchFinished.
        """
        rows = self.filter(pk=pk, finished_at=None).annotate(db_now=Now())
        can_lock = connections[self.db].features.has_select_for_update
        row: Any = (rows.select_for_update() if can_lock else rows).first()
        if row is None:
            raise BatchFinished(f"Batch {pk} has finished: no job can be added to it. Open another.")
        if not opens:
            certify(self.filter(pk=pk), {"finished_at": Now()}, {"finished_at": None})
        # Not on each call: in one transaction, very many versions of a row make it slow to find.
        if opens and (row.sealed_at or (row.opened_until - row.db_now).total_seconds() < OPEN_SECONDS / 2):
            rows.update(sealed_at=None, opened_until=after(OPEN_SECONDS))

    def seal(self) -> int:
        """Seal batches: their openers have enqueued all jobs.

        A sealed batch finishes when all of its jobs have.
        """
        return self.filter(finished_at=None).update(sealed_at=Coalesce(F("sealed_at"), Now()), opened_until=None)

    def seal_abandoned(self, limit: int = 100) -> list[Any]:
        """Seal batches whose openers have added nothing for OPEN_SECONDS and have not ended.

        Returns their ids. A live opener reopens its batch with the next job that it adds, or
        finds that the batch has finished.
        """
        with writing(self.db):
            expired = self.filter(sealed_at=None, finished_at=None, opened_until__lt=Now())
            ids = lock_first(expired.values_list("pk", flat=True), limit)
            self.filter(pk__in=ids).update(sealed_at=Now())
        return ids

    def open(self) -> BatchQuerySet:
        """Return the batches that are sealed and not finished."""
        return self.filter(sealed_at__isnull=False, finished_at=None)

    def swept(self) -> BatchQuerySet:
        """Return the batches that a sweep scans: open and abandoned ones."""
        return self.filter(Q(sealed_at__isnull=False) | Q(opened_until__lt=Now()), finished_at=None)

    def due(self) -> BatchQuerySet:
        """Return the open batches that wait for no unfinished job."""
        unfinished = self._jobs().filter(batch=OuterRef("pk"), state__in=UNFINISHED)
        shared = self._shares().filter(self._of_shared(UNFINISHED), batch=OuterRef("pk"), has_failed=False)
        return self.open().exclude(Exists(unfinished)).exclude(Exists(shared))

    def queues(self) -> set[str]:
        """Return the queues of the jobs that will follow the batches."""
        columns = [each for row in self.values_list("on_finish", "on_success") for each in row if each]
        return {each["queue"] for each in columns}

    def finish(self, ids: Iterable[Any] | None = None, limit: int = 100) -> list[str]:
        """Finish due batches, each once, and enqueue their callbacks in the same transaction.

        Returns the queues of the callbacks. A batch that another transaction has locked is left
        to that transaction, or to the next scan.
        """
        rows = self.due() if ids is None else self.due().filter(pk__in=list(ids))
        if not (found := list(rows.values_list("pk", flat=True)[:limit])):
            return []
        try:
            return self._finish(found)
        except OperationalError:
            raise
        except DatabaseError as error:
            if connections[self.db].in_atomic_block:
                raise
            if len(found) > 1:
                return [queue for pk in found for queue in self.finish([pk])]
            # If raised, it would stop the settling of jobs and the finishing of other batches.
            logger.error("batch %s: database refused its callbacks; it stays unfinished: %s", found[0], error)
            return []

    def _finish(self, found: list[Any]) -> list[str]:
        with writing(self.db):
            held = [row.pk for row in lock(self.filter(pk__in=found).order_by("pk"))]
            # Checked again under the lock: a job may have been added before it.
            due = list(self.due().filter(pk__in=held))
            self.filter(pk__in=[row.pk for row in due], finished_at=None).update(finished_at=Now())
            failed = self._jobs().filter(batch__in=due, state__in=UNSUCCESSFUL).order_by()
            unsuccessful = set(failed.values_list("batch", flat=True).distinct())
            # Read after the jobs: a failure that leaves its job's row becomes a share in the same
            # transaction.
            shared = self._shares().filter(Q(has_failed=True) | self._of_shared(UNSUCCESSFUL), batch__in=due)
            unsuccessful |= set(shared.values_list("batch", flat=True))
            unsuccessful |= {row.pk for row in due if row.is_abandoned}
            callbacks = [job for row in due for job in row.callbacks(successful=row.pk not in unsuccessful)]
            self._jobs().bulk_create(callbacks)
            for name in ("on_finish", "on_success"):
                self.bulk_update([row for row in due if row.follower(name)], [name])
        return [job.queue for job in callbacks]

    def jobs(self) -> JobQuerySet:
        """Return all jobs that belong to the batches."""
        return self._jobs().filter(batch__in=list(self.values_list("pk", flat=True)))  # type: ignore[no-any-return]

    def prune(self, older_than: float) -> None:
        """Delete batches without jobs that finished over ``older_than`` seconds ago."""
        has_jobs = Exists(self._jobs().filter(batch=OuterRef("pk")))
        self.filter(finished_at__lt=after(-older_than)).exclude(has_jobs)._raw_delete(self.db)

    def _jobs(self) -> Any:
        return Job.objects.using(self._db)  # type: ignore[attr-defined]

    def _shares(self) -> Any:
        return BatchShare.objects.using(self.db)

    def _of_shared(self, states: Sequence[str]) -> Exists:
        """Test if the job of a share is in one of these states. A deleted job was successful."""
        return Exists(self._jobs().filter(pk=OuterRef("job"), state__in=states))


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
    opened_until = models.DateTimeField(_("opened until"), null=True, blank=True)
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
        wanted = [columns for columns in (self.on_finish, self.on_success if successful else None) if columns]
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

    def jobs(self) -> Any:
        return Job.objects.using(self._state.db).filter(batch=self.pk)

    def tally(self) -> dict[str, int]:
        """Count the batch's jobs in each state, each up to the limit; above it, a BoundedCount.

        One query, or eight for a large batch.
        """
        jobs = self.jobs().order_by("state")
        numbers = {state.value: Count("pk", filter=Q(state=state)) for state in State}
        seen = jobs.values("pk", "state")[: LIMIT + 1].aggregate(**numbers)
        if sum(seen.values()) > LIMIT:
            seen = {state.value: count(jobs.filter(state=state), "state") for state in State}
        return {state: number for state, number in seen.items() if number}

    def progress(self) -> Counter[str]:
        """Count the batch's jobs in each state."""
        return Counter(dict(self.jobs().order_by().values_list("state").annotate(number=Count("pk"))))

    def discard(self) -> int:
        """Discard the batch's waiting jobs. Returns how many."""
        return int(self.jobs().waiting().discard())

    def withdraw(self, ids: Sequence[Any]) -> None:
        """Discard waiting jobs as if they had not been added.

        They do not count as failed members.
        """
        with writing(self._state.db):
            for start in range(0, len(ids), 1000):
                added = self.jobs().filter(pk__in=ids[start : start + 1000])
                added.waiting().discard()
                added.filter(state=State.DISCARDED).update(batch=None)
