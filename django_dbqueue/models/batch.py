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

# The longest that a batch is kept open after its opener has added a job. An opener that died is noticed after it.
OPEN_SECONDS = 3600.0


class BatchQuerySet(PrimaryQuerySet["Batch"]):
    def create_open(self, batch: Batch) -> None:
        """Write a new one, to be filled by its opener."""
        batch.opened_until = after(OPEN_SECONDS)
        self.bulk_create([batch])

    def join(self, pk: Any, *, opens: bool = False) -> None:
        """Hold a batch open while jobs are added to it, until the end of the transaction. Raises BatchFinished.

        ``opens``: by its opener, which has OPEN_SECONDS again until it adds the next one.
        """
        rows = self.filter(pk=pk, finished_at=None).annotate(db_now=Now())
        can_lock = connections[self.db].features.has_select_for_update
        row: Any = (rows.select_for_update() if can_lock else rows).first()
        if row is None:
            raise BatchFinished(f"Batch {pk} has finished: no job can be added to it. Open another.")
        if not opens:
            certify(self.filter(pk=pk), {"finished_at": Now()}, {"finished_at": None})
        # Not each time: in one transaction, very many versions of a row make it slow to find.
        if opens and (row.sealed_at or (row.opened_until - row.db_now).total_seconds() < OPEN_SECONDS / 2):
            rows.update(sealed_at=None, opened_until=after(OPEN_SECONDS))

    def seal(self) -> int:
        """All that opened them has been enqueued: they finish when all of their jobs have."""
        return self.filter(finished_at=None).update(sealed_at=Coalesce(F("sealed_at"), Now()), opened_until=None)

    def seal_abandoned(self, limit: int = 100) -> list[Any]:
        """Seal those whose openers have added nothing for OPEN_SECONDS, nor have ended. Returns their ids.

        An opener that lives takes its batch back with the next job that it adds; or it finds that the batch has finished.
        """
        with writing(self.db):
            expired = self.filter(sealed_at=None, finished_at=None, opened_until__lt=Now())
            ids = lock_first(expired.values_list("pk", flat=True), limit)
            self.filter(pk__in=ids).update(sealed_at=Now())
        return ids

    def open(self) -> BatchQuerySet:
        """Sealed, and not finished."""
        return self.filter(sealed_at__isnull=False, finished_at=None)

    def swept(self) -> BatchQuerySet:
        """Those that a sweep looks at: open ones, and abandoned ones."""
        return self.filter(Q(sealed_at__isnull=False) | Q(opened_until__lt=Now()), finished_at=None)

    def due(self) -> BatchQuerySet:
        """Those of them that wait for no job that is not finished."""
        unfinished = self._jobs().filter(batch=OuterRef("pk"), state__in=UNFINISHED)
        shared = self._shares().filter(self._of_shared(UNFINISHED), batch=OuterRef("pk"), has_failed=False)
        return self.open().exclude(Exists(unfinished)).exclude(Exists(shared))

    def queues(self) -> set[str]:
        """Those of the jobs that will follow them."""
        columns = [each for row in self.values_list("on_finish", "on_success") for each in row if each]
        return {each["queue"] for each in columns}

    def finish(self, ids: Iterable[Any] | None = None, limit: int = 100) -> list[str]:
        """Finish those that are due, once: their callbacks are enqueued in the same transaction. Returns their queues.

        A batch that somebody holds is left to him, or to the next look.
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
            # Raised, it would stop the settling of jobs, and the finishing of other batches.
            logger.error("The database refused what follows batch %s, which stays unfinished: %s", found[0], error)
            return []

    def _finish(self, found: list[Any]) -> list[str]:
        with writing(self.db):
            held = [row.pk for row in lock(self.filter(pk__in=found).order_by("pk"))]
            # Once more, under the lock: a job may have been added before it.
            due = list(self.due().filter(pk__in=held))
            self.filter(pk__in=[row.pk for row in due], finished_at=None).update(finished_at=Now())
            failed = self._jobs().filter(batch__in=due, state__in=UNSUCCESSFUL).order_by()
            unsuccessful = set(failed.values_list("batch", flat=True).distinct())
            # After the jobs: a failure that leaves its job's row comes here in the same transaction.
            shared = self._shares().filter(Q(has_failed=True) | self._of_shared(UNSUCCESSFUL), batch__in=due)
            unsuccessful |= set(shared.values_list("batch", flat=True))
            unsuccessful |= {row.pk for row in due if row.is_abandoned}
            callbacks = [job for row in due for job in row.callbacks(successful=row.pk not in unsuccessful)]
            self._jobs().bulk_create(callbacks)
            for name in ("on_finish", "on_success"):
                self.bulk_update([row for row in due if row.follower(name)], [name])
        return [job.queue for job in callbacks]

    def jobs(self) -> JobQuerySet:
        """All that belong to them."""
        return self._jobs().filter(batch__in=list(self.values_list("pk", flat=True)))  # type: ignore[no-any-return]

    def prune(self, older_than: float) -> None:
        """Forget those that finished so many seconds ago, and have no job any more."""
        has_jobs = Exists(self._jobs().filter(batch=OuterRef("pk")))
        self.filter(finished_at__lt=after(-older_than)).exclude(has_jobs)._raw_delete(self.db)

    def _jobs(self) -> Any:
        return Job.objects.using(self._db)  # type: ignore[attr-defined]

    def _shares(self) -> Any:
        return BatchShare.objects.using(self.db)

    def _of_shared(self, states: Sequence[str]) -> Exists:
        """Whether the job of a share is in one of these states. One that is gone was successful."""
        return Exists(self._jobs().filter(pk=OuterRef("job"), state__in=states))


class Batch(models.Model):
    """Jobs that belong together. When all of them have ended, in whatever way, it has finished."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    description = models.CharField(_("description"), max_length=200, blank=True)
    # Jobs that are enqueued when it has finished, as their columns.
    on_finish = DocumentField(_("on finish"), null=True, blank=True)
    on_success = DocumentField(_("on success"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    # While it is being filled. One that is sealed has it only if its opener was taken for dead.
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
        """The jobs that are to be enqueued when it has finished. It remembers their ids."""
        wanted = [columns for columns in (self.on_finish, self.on_success if successful else None) if columns]
        jobs = [Job.from_columns(columns) for columns in wanted]
        for columns, job in zip(wanted, jobs, strict=True):
            columns["id"] = str(job.pk)
        return jobs

    def follower(self, name: str) -> str | None:
        """The id of the job that was enqueued for ``on_finish`` or ``on_success``, if it has been."""
        return (getattr(self, name) or {}).get("id")

    @property
    def is_abandoned(self) -> bool:
        """Whether it was sealed because its opener added nothing for too long: it may not be the whole."""
        return self.sealed_at is not None and self.opened_until is not None

    def jobs(self) -> Any:
        return Job.objects.using(self._state.db).filter(batch=self.pk)

    def tally(self) -> dict[str, int]:
        """As progress, but each counted up to the limit: Many where there are more. One query, and eight of a large batch."""
        jobs = self.jobs().order_by("state")
        numbers = {state.value: Count("pk", filter=Q(state=state)) for state in State}
        seen = jobs.values("pk", "state")[: LIMIT + 1].aggregate(**numbers)
        if sum(seen.values()) > LIMIT:
            seen = {state.value: count(jobs.filter(state=state), "state") for state in State}
        return {state: number for state, number in seen.items() if number}

    def progress(self) -> Counter[str]:
        """How many of its jobs are in each state."""
        return Counter(dict(self.jobs().order_by().values_list("state").annotate(number=Count("pk"))))

    def discard(self) -> int:
        """Call off those of its jobs that wait. Returns how many."""
        return int(self.jobs().waiting().discard())

    def withdraw(self, ids: Sequence[Any]) -> None:
        """Call off jobs that wait, as if they had not been added: they do not count as members that failed."""
        with writing(self._state.db):
            for start in range(0, len(ids), 1000):
                added = self.jobs().filter(pk__in=ids[start : start + 1000])
                added.waiting().discard()
                added.filter(state=State.DISCARDED).update(batch=None)
