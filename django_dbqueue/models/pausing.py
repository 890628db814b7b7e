"""Pause queues and tasks, until a given time or until they are resumed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Cast
from django.utils.timezone import is_aware
from django.utils.translation import gettext_lazy as _

from ..core.time_values import LONGEST_WAIT
from .expressions import Now, now_plus
from .primary import PrimaryQuerySet

if TYPE_CHECKING:
    from typing import Self

M = TypeVar("M", bound="Pausable")

# In the database's time, so that a pause ends without any process running.
PAUSED = Q(paused_at__isnull=False) & (Q(resume_at__isnull=True) | Q(resume_at__gt=Now()))
ENDLESS = Q(paused_at__isnull=False) & Q(resume_at__isnull=True)


class PausableQuerySet(PrimaryQuerySet[M]):
    """Rows that operators pause and resume."""

    def named(self, *names: str) -> Self:
        """Filter by name, and insert missing rows first. Raises ValueError for an invalid name."""
        for name in names:
            self.model.check_name(name)
        self.ensure_rows(names)
        return self.filter(name__in=names)

    def ensure_rows(self, names: Iterable[str]) -> None:
        """Insert missing rows for these names, so that operators can see and pause them."""
        new = set(names) - set(self.filter(name__in=list(names)).values_list("name", flat=True))
        self.bulk_create([self.model(name=name) for name in sorted(new)], ignore_conflicts=True)

    def seen(self) -> Any:
        """Annotate with the database's time as ``seen_at``, for is_paused()."""
        return self.annotate(seen_at=Now())

    def paused(self) -> Self:
        """Filter rows that are paused now."""
        return self.filter(PAUSED)

    def names_of_paused(self) -> list[str]:
        """Return the names whose jobs may not be claimed now."""
        return list(self.paused().values_list("name", flat=True))

    def pausable(self) -> Self:
        """Exclude rows that are paused until they are resumed."""
        return self.exclude(ENDLESS)

    def pause(self, until: datetime | timedelta | None = None) -> int:
        """Stop claims until a time (aware, or a timedelta from now), or until resume().

        For rows that are already paused, the new end replaces the old one. Return the number of
        rows affected: 0 if the time has passed. Raises ValueError for an invalid time.
        """
        ends = _end(until)
        rows = self.annotate(ends=ends).filter(ends__gt=Now()) if until else self.pausable()
        # In this order: MySQL sets one column after the other, and ``paused_at`` depends on
        # ``resume_at``.
        since = Case(When(PAUSED, then=F("paused_at")), default=Now())
        return int(rows.update(paused_at=since, resume_at=ends))

    def resume(self) -> int:
        """Let workers claim again, within a second. Return the number of rows that were paused."""
        return int(self.paused().update(paused_at=None, resume_at=None))


class Pausable(models.Model):
    """A name, and whether its jobs may be claimed."""

    paused_at = models.DateTimeField(_("paused at"), null=True, blank=True)
    resume_at = models.DateTimeField(_("resumes at"), null=True, blank=True)

    class Meta:
        abstract = True

    def is_paused(self, now: datetime) -> bool:
        """Return True if paused at this moment of the database's time."""
        return self.paused_at is not None and (self.resume_at is None or self.resume_at > now)

    @classmethod
    def check_name(cls, name: object) -> None:
        """Raise ValueError for an invalid name."""
        raise NotImplementedError


def _end(until: datetime | timedelta | None) -> models.Expression | None:
    match until:
        case None:
            return None
        case timedelta() if timedelta() < until < LONGEST_WAIT:
            return now_plus(until)
        case datetime() if is_aware(until):
            return Cast(Value(until), models.DateTimeField())
    raise ValueError(
        f"until={until!r}: give an aware datetime, or a timedelta from now, "
        f"above 0 and up to {LONGEST_WAIT.days:,} days."
    )
