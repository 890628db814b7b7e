from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from django.db import connections, models
from django.db.models import Count, F, Min
from django.utils.translation import gettext_lazy as _

from ..core.uuid7 import uuid7
from .primary import PrimaryQuerySet
from .states import State


class SlotQuerySet(PrimaryQuerySet["Slot"]):
    def taken(self) -> SlotQuerySet:
        """Filter slots whose attempt runs. Left-over rows count for nothing, so no slot leaks."""
        return self.filter(job__state=State.RUNNING, job__attempt=F("attempt"))

    def count_by_key(self, keys: Iterable[str]) -> Counter[str]:
        return Counter({key: number for key, number, _smallest in self._by_key(keys)})

    def look(self, semaphores: Mapping[str, Any]) -> None:
        """Set ``taken`` and ``smallest`` of these semaphores, by key."""
        for key, number, smallest in self._by_key(semaphores):
            semaphores[key].taken, semaphores[key].smallest = number, smallest

    def _by_key(self, keys: Iterable[str]) -> Iterable[tuple[str, int, int | None]]:
        rows: Any = self.taken().filter(semaphore__in=list(keys)).order_by().values_list("semaphore")
        return rows.annotate(number=Count("series", distinct=True), smallest=Min("most"))  # type: ignore[no-any-return]

    def take(self, jobs: Iterable[Any]) -> None:
        """Take one slot of each semaphore of each job, for the attempt that begins now."""
        wanted = [(job, limit) for job in jobs for limit in job.limits if "most" in limit]
        rows = [
            Slot(semaphore_id=limit["key"], job=job, attempt=job.attempt + 1, series=job.series, most=limit["most"])
            for job, limit in wanted
        ]
        unique = None if connections[self.db].vendor == "mysql" else ["semaphore", "job"]
        self.bulk_create(rows, update_conflicts=True, update_fields=["attempt", "series", "most"], unique_fields=unique)


class Slot(models.Model):
    """The place of a running attempt at a semaphore. It counts only while the attempt runs.

    Jobs of one series, which one process runs one after the other, share one place.
    """

    semaphore = models.ForeignKey(
        "dbqueue.Semaphore",
        verbose_name=_("semaphore"),
        on_delete=models.CASCADE,
        db_constraint=False,
        db_index=False,
        related_name="slots",
    )
    job = models.ForeignKey(
        "dbqueue.Job", verbose_name=_("job"), on_delete=models.CASCADE, db_constraint=False, related_name="slots"
    )
    attempt = models.PositiveIntegerField(_("attempt"))
    series = models.UUIDField(_("series"), default=uuid7)
    most = models.PositiveIntegerField(_("most at a time"), null=True, help_text=_("As its job has it."))

    objects = SlotQuerySet.as_manager()

    class Meta:
        verbose_name = _("slot")
        verbose_name_plural = _("slots")
        default_permissions = ()
        constraints = [models.UniqueConstraint(name="dbqueue_slot_once", fields=["semaphore", "job"])]

    def __str__(self) -> str:
        return f"{self.semaphore_id}: {self.job_id} #{self.attempt}"
