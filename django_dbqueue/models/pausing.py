"""What can be paused, for a while or until it is resumed: a queue, a task."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.db import models
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Cast
from django.utils.timezone import is_aware
from django.utils.translation import gettext_lazy as _

from ..core.time_values import LONGEST_WAIT
from .expressions import Now, after
from .primary import PrimaryQuerySet

M = TypeVar("M", bound="Pausable")

# By the database's time: nothing has to run for a pause to end.
PAUSED = Q(paused_at__isnull=False) & (Q(resume_at__isnull=True) | Q(resume_at__gt=Now()))
ENDLESS = Q(paused_at__isnull=False) & Q(resume_at__isnull=True)


class PausableQuerySet(PrimaryQuerySet[M]):
    def named(self, *names: str) -> Any:
        """Those with these names, whether or not anything was seen of them before. Raises ValueError for what is no name."""
        for name in names:
            self.model.check_name(name)
        self.know(names)
        return self.filter(name__in=names)

    def know(self, names: Iterable[str]) -> None:
        """Have a row for each of the names, so that operators see it and can pause it."""
        new = set(names) - set(self.filter(name__in=list(names)).values_list("name", flat=True))
        self.bulk_create([self.model(name=name) for name in sorted(new)], ignore_conflicts=True)

    def seen(self) -> Any:
        """With the database's time in ``seen_at``, to tell who is paused."""
        return self.annotate(seen_at=Now())

    def paused(self) -> Any:
        return self.filter(PAUSED)

    def pausable(self) -> Any:
        """All but those that are paused until they are resumed."""
        return self.exclude(ENDLESS)

    def pause(self, until: datetime | timedelta | None = None) -> int:
        """No worker claims from them until that time (aware, or a timedelta from now), or until they are resumed.

        For those that are paused already, the new end counts. Returns for how many this makes a difference: none, if that
        time is over. Raises ValueError for a time that is none.
        """
        ends = _end(until)
        rows: Any = self.annotate(ends=ends).filter(ends__gt=Now()) if until else self.pausable()
        # In this order: MySQL sets one column after the other, and the first depends on the second.
        return rows.update(paused_at=Case(When(PAUSED, then=F("paused_at")), default=Now()), resume_at=ends)  # type: ignore[no-any-return]

    def resume(self) -> int:
        """Workers claim from them again, within a second. Returns how many were paused."""
        return self.paused().update(paused_at=None, resume_at=None)  # type: ignore[no-any-return]


class Pausable(models.Model):
    """A name, and whether jobs may be claimed that have it."""

    paused_at = models.DateTimeField(_("paused at"), null=True, blank=True)
    resume_at = models.DateTimeField(_("resumes at"), null=True, blank=True)

    class Meta:
        abstract = True

    def is_paused(self, now: datetime) -> bool:
        """Whether it is paused at that moment of the database's time."""
        return self.paused_at is not None and (self.resume_at is None or self.resume_at > now)

    @classmethod
    def check_name(cls, name: Any) -> None:
        """Raises ValueError for what cannot be its name."""
        raise NotImplementedError


def _end(until: datetime | timedelta | None) -> Any:
    match until:
        case None:
            return None
        case timedelta() if timedelta() < until < LONGEST_WAIT:
            return after(until)
        case datetime() if is_aware(until):
            return Cast(Value(until), models.DateTimeField())
    raise ValueError(
        f"until={until!r}: give an aware datetime, or a timedelta from now, above 0 and up to {LONGEST_WAIT.days:,} days."
    )
