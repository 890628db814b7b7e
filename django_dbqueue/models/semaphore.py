from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..limits import LONGEST_KEY, RATE
from .identifier import IdentifierField
from .semaphores import AHEAD, SemaphoreQuerySet

# A job may start so much before its time, in seconds: what finds and claims due jobs is not more precise.
EARLY = 0.1


class Semaphore(models.Model):
    """What limits jobs that share a key: how many run at a time (``most``), or how often one starts (``every``).

    Each job carries its own numbers. ``most`` is that of the job claimed last, ``every`` and ``burst`` of the one started last.
    earliest: when the next one may start, by the rate. booked: from when on times are still free.
    """

    key = IdentifierField(_("key"), max_length=LONGEST_KEY, primary_key=True)
    most = models.PositiveIntegerField(_("most at a time"), null=True)
    every = models.DurationField(_("one every"), null=True)
    burst = models.PositiveIntegerField(_("burst"), default=1)
    earliest = models.DateTimeField(_("earliest start"), null=True)
    booked = models.DateTimeField(_("booked until"), null=True, db_index=True)

    objects = SemaphoreQuerySet.as_manager()

    # Of a locked row: how many slots are taken, and the smallest ``most`` of the jobs that have them.
    taken = 0
    smallest: int | None = None
    # Whether it is to be stored.
    is_changed = False

    class Meta:
        # What operators call it: of each key, how many at a time, or in a time.
        verbose_name = _("limit")
        verbose_name_plural = _("limits")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.key).removeprefix(RATE)

    def adopt(self, limit: dict[str, Any]) -> None:
        """What a job that is claimed says of it holds: of a rate, once one has started."""
        if "most" in limit and self.most != limit["most"]:
            self.most, self.is_changed = limit["most"], True

    @property
    def free(self) -> int:
        """How many more jobs may run that allow as many as the one claimed last."""
        return self.free_for({"most": self.most or 0})

    def free_for(self, limit: dict[str, Any]) -> int:
        """How many more jobs with this limit may run."""
        most: int = limit["most"]
        return min(most, self.smallest or most) - self.taken

    def is_free(self, limit: dict[str, Any]) -> bool:
        """Whether a job with this limit may start: by its own numbers, and by those of the jobs before it."""
        if "most" in limit:
            return self.free_for(limit) > 0
        if self.earliest is None or self.every is None:
            return True
        every = timedelta(seconds=limit["every"])
        now: datetime = self.db_now  # type: ignore[attr-defined]
        earliest = self.earliest + max(timedelta(), every - self.every)
        slack = every * (min(limit.get("burst", 1), self.burst) - 1)
        return bool(earliest - now <= slack + timedelta(seconds=EARLY))

    def use(self, limit: dict[str, Any]) -> None:
        if "most" in limit:
            self.taken += 1
            self.smallest = min(limit["most"], self.smallest or limit["most"])
        else:
            now = self.db_now  # type: ignore[attr-defined]
            self.every, self.burst = timedelta(seconds=limit["every"]), limit.get("burst", 1)
            self.earliest = max(self.earliest or now, now) + self.every
            self.booked = max(self.booked or self.earliest, self.earliest - self._slack)
            self.is_changed = True

    @property
    def is_ahead(self) -> bool:
        """Whether a rate's times are later than its last start, and the times given out since, can have put them."""
        if not self.every or not self.earliest or not self.booked:
            return False
        latest_booked = self.db_now + timedelta(seconds=AHEAD + EARLY) + 2 * self.every  # type: ignore[attr-defined]
        return bool(self.earliest > self._latest or self.booked > latest_booked)

    def come_back(self) -> bool:
        """Have a rate's times be as after a start now at most, if they are ahead. Returns whether they were."""
        if is_ahead := self.is_ahead:
            assert self.earliest
            self.earliest = min(self.earliest, self._latest)
            self.booked = self.earliest - self._slack
        return is_ahead

    @property
    def _latest(self) -> datetime:
        now: datetime = self.db_now  # type: ignore[attr-defined]
        return now + (self.every or timedelta()) * self.burst + timedelta(seconds=EARLY)

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
