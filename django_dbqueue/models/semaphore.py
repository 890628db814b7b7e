from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..limits import RATE
from .identifier import IdentifierField
from .semaphores import AHEAD, SemaphoreQuerySet

# A job may start so much before its time, in seconds: what finds and claims due jobs is not more precise.
EARLY = 0.1


class Semaphore(models.Model):
    """What limits jobs that share a key: how many run at a time (``most``), or how often one starts (``every``).

    earliest: when the next one may start, by the rate. booked: from when on times are still free.
    """

    key = IdentifierField(_("key"), max_length=460, primary_key=True)
    most = models.PositiveIntegerField(_("most at a time"), null=True)
    every = models.DurationField(_("one every"), null=True)
    burst = models.PositiveIntegerField(_("burst"), default=1)
    earliest = models.DateTimeField(_("earliest start"), null=True)
    booked = models.DateTimeField(_("booked until"), null=True, db_index=True)

    objects = SemaphoreQuerySet.as_manager()

    # Of a locked row: whether it is to be stored.
    is_changed = False

    class Meta:
        # What operators call it: of each key, how many at a time, or in a time.
        verbose_name = _("limit")
        verbose_name_plural = _("limits")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.key.removeprefix(RATE))

    def adopt(self, limit: dict[str, Any]) -> None:
        """What the newest job says of it holds."""
        every = timedelta(seconds=limit["every"]) if "every" in limit else None
        said = limit.get("most"), every, limit.get("burst", 1)
        if (self.most, self.every, self.burst) != said:
            self.most, self.every, self.burst = said
            self.is_changed = True

    def is_free(self, taken: int) -> bool:
        if self.most is not None:
            return taken < self.most
        now = self.db_now  # type: ignore[attr-defined]
        return self.earliest is None or self.earliest - now <= self._slack + timedelta(seconds=EARLY)

    def use(self) -> None:
        if self.every:
            now = self.db_now  # type: ignore[attr-defined]
            self.earliest = max(self.earliest or now, now) + self.every
            self.booked = max(self.booked or self.earliest, self.earliest - self._slack)
            self.is_changed = True

    def free_times(self) -> list[datetime]:
        """The next times at which a job may start, as far as they are given out now."""
        now = self.db_now  # type: ignore[attr-defined]
        assert self.every and self.earliest and self.booked
        start = max(self.booked, self.earliest - self._slack, now)
        number = max(0, int((timedelta(seconds=AHEAD) - (start - now)) / self.every) + 1)
        # A dispatcher is not asked to be quicker than it can be.
        together = max(1, int(timedelta(seconds=EARLY / 2) / self.every))
        return [start + self.every * (n - n % together) for n in range(min(number, 10_000))]

    @property
    def _slack(self) -> timedelta:
        return (self.every or timedelta()) * (self.burst - 1)
