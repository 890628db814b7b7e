from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from django.db import models
from django.db.models import Count, F, Min
from django.utils.translation import gettext_lazy as _

from ..core.uuid7 import uuid7
from .enums import State
from .primary import PrimaryQuerySet


class SlotQuerySet(PrimaryQuerySet["Slot"]):
    def taken(self) -> SlotQuerySet:
        """Filter slots whose attempt runs. Left-over rows count for nothing, so no slot leaks."""
        return self.filter(job__state=State.RUNNING, job__attempt=F("attempt"))

    def count_by_key(self, keys: Iterable[str]) -> Counter[str]:
        return Counter({key: number for key, number, _smallest in self.totals(keys)})

    def totals(self, keys: Iterable[str]) -> Iterable[tuple[str, int, int | None]]:
        """Return each key with taken slots, their number, and their smallest ``max_running``."""
        rows: Any = (
            self.taken().filter(semaphore__in=list(keys)).order_by().values_list("semaphore")
        )
        return rows.annotate(number=Count("slot_group", distinct=True), smallest=Min("max_running"))  # type: ignore[no-any-return]


class Slot(models.Model):
    """The place of a running attempt at a semaphore. It counts only while the attempt runs.

    Jobs of one slot group, which one process runs one after the other, share one place.
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
        "dbqueue.Job",
        verbose_name=_("job"),
        on_delete=models.CASCADE,
        db_constraint=False,
        related_name="slots",
    )
    attempt = models.PositiveIntegerField(_("attempt"))
    slot_group = models.UUIDField(_("slot group"), default=uuid7)
    max_running = models.PositiveIntegerField(
        _("maximum at a time"), null=True, help_text=_("The limit of its job.")
    )

    objects = SlotQuerySet.as_manager()

    class Meta:
        verbose_name = _("slot")
        verbose_name_plural = _("slots")
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(name="dbqueue_slot_once", fields=["semaphore", "job"])
        ]

    def __str__(self) -> str:
        return f"{self.semaphore_id}: {self.job_id} #{self.attempt}"
