from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from django.db import connections, models, transaction
from django.db.models import Count, Exists, OuterRef, Q
from django.utils.translation import gettext_lazy as _

from ..exceptions import BatchFinished
from ..ids import uuid7
from .counts import LIMIT, count
from .expressions import Now, after, lock
from .job import Job
from .jobs import JobQuerySet
from .primary import PrimaryQuerySet
from .states import UNFINISHED, UNSUCCESSFUL, State


class BatchQuerySet(PrimaryQuerySet["Batch"]):
    def join(self, ids: Iterable[Any]) -> None:
        """Hold batches open while jobs are added to them, until the end of the transaction. Raises BatchFinished."""
        wanted = set(ids)
        rows = self.filter(pk__in=wanted, finished_at=None).order_by("pk")
        can_lock = connections[self.db].features.has_select_for_update
        if gone := wanted - {row.pk for row in (rows.select_for_update() if can_lock else rows)}:
            raise BatchFinished(f"Batch {gone.pop()} has finished: no job can be added to it. Open another.")

    def seal(self) -> int:
        """All that opened them has been enqueued: they finish when all of their jobs have."""
        return self.filter(sealed_at=None).update(sealed_at=Now())

    def open(self) -> BatchQuerySet:
        """Sealed, and not finished."""
        return self.filter(sealed_at__isnull=False, finished_at=None)

    def due(self) -> BatchQuerySet:
        """Those of them without a job that is not finished."""
        unfinished = self._jobs().filter(batch=OuterRef("pk"), state__in=UNFINISHED)
        return self.open().exclude(Exists(unfinished))

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
        with transaction.atomic(using=self.db):
            held = [row.pk for row in lock(self.filter(pk__in=found).order_by("pk"))]
            # Once more, under the lock: a job may have been added before it.
            due = list(self.due().filter(pk__in=held))
            self.filter(pk__in=[row.pk for row in due], finished_at=None).update(finished_at=Now())
            failed = self._jobs().filter(batch__in=due, state__in=UNSUCCESSFUL).order_by()
            unsuccessful = set(failed.values_list("batch", flat=True).distinct())
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


class Batch(models.Model):
    """Jobs that belong together. When all of them have ended, in whatever way, it has finished."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    description = models.CharField(_("description"), max_length=200, blank=True)
    # Jobs that are enqueued when it has finished, as their columns.
    on_finish = models.JSONField(_("on finish"), null=True, blank=True)
    on_success = models.JSONField(_("on success"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"), db_default=Now())
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
