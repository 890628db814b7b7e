from __future__ import annotations

from datetime import datetime, timedelta

from django.db import models
from django.db.models import OuterRef, Subquery
from django.utils.translation import gettext_lazy as _

from ..core.serialization import Json
from ..limits import LONGEST_KEY, RATE
from .enums import State
from .identifier import IdentifierField
from .job import Job
from .primary import PrimaryQuerySet

# Seconds ahead that start times are reserved. Until then, priority decides which job is next.
RESERVED_AHEAD_SECONDS = 5.0
# Seconds that a job may start before its time: finding and claiming due jobs is no more precise.
EARLY_SECONDS = 0.1
# The numbers of a limit, as stored with a job.
StoredLimit = dict[str, Json]


class SemaphoreQuerySet(PrimaryQuerySet["Semaphore"]):
    def waiting(self) -> SemaphoreQuerySet:
        """Filter semaphores that jobs wait for."""
        # Not Exists(): PostgreSQL may turn it into a join with all waiting jobs of a semaphore.
        blocked = Job.objects.using(self.db).filter(state=State.BLOCKED, blocked_by=OuterRef("pk"))
        first = blocked.order_by("-priority", "id").values("pk")[:1]
        return self.alias(first=Subquery(first)).filter(first__isnull=False)


class Semaphore(models.Model):
    """Limit on jobs that share a key: running at a time (``most``), or one start per ``every``.

    Each job carries its own numbers. ``most`` comes from the job claimed last, ``every`` and
    ``burst`` from the job started last.

    earliest: when the rate allows the next start.
    booked: start times from here on are still free.
    """

    key = IdentifierField(_("key"), max_length=LONGEST_KEY, primary_key=True)
    most = models.PositiveIntegerField(_("maximum at a time"), null=True)
    every = models.DurationField(_("interval"), null=True)
    burst = models.PositiveIntegerField(_("burst"), default=1)
    earliest = models.DateTimeField(_("earliest start"), null=True)
    booked = models.DateTimeField(_("reserved until"), null=True, db_index=True)

    objects = SemaphoreQuerySet.as_manager()

    # Of a locked row: the number of taken slots, and the smallest ``most`` of the jobs in them.
    taken = 0
    smallest: int | None = None
    # True if the row has to be saved.
    is_changed = False

    class Meta:
        # The operators' word: for each key, a number of jobs at a time, or in a time.
        verbose_name = _("limit")
        verbose_name_plural = _("limits")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.key).removeprefix(RATE)

    def adopt(self, limit: StoredLimit) -> None:
        """Adopt the limit of a claimed job. The numbers of a rate change only when a job starts."""
        if "most" in limit and self.most != limit["most"]:
            self.most, self.is_changed = limit["most"], True

    @property
    def free(self) -> int:
        """Number of further jobs that may run, with the limit of the job claimed last."""
        return self.free_for({"most": self.most or 0})

    def free_for(self, limit: StoredLimit) -> int:
        """Return the number of further jobs with this limit that may run."""
        most: int = limit["most"]
        return min(most, self.smallest or most) - self.taken

    def is_free(self, limit: StoredLimit) -> bool:
        """Return True if its own limit and those of earlier jobs allow a job to start."""
        if "most" in limit:
            return self.free_for(limit) > 0
        if self.earliest is None or self.every is None:
            return True
        every = timedelta(seconds=limit["every"])
        now = self._now
        earliest = self.earliest + max(timedelta(), every - self.every)
        slack = every * (min(limit.get("burst", 1), self.burst) - 1)
        return bool(earliest - now <= slack + timedelta(seconds=EARLY_SECONDS))

    def use(self, limit: StoredLimit) -> None:
        if "most" in limit:
            self.taken += 1
            self.smallest = min(limit["most"], self.smallest or limit["most"])
        else:
            now = self._now
            self.every, self.burst = timedelta(seconds=limit["every"]), limit.get("burst", 1)
            self.earliest = max(self.earliest or now, now) + self.every
            self.booked = max(self.booked or self.earliest, self.earliest - self._slack)
            self.is_changed = True

    @property
    def is_ahead(self) -> bool:
        """True if times are later than the last start and the reservations since can explain."""
        if not self.every or not self.earliest or not self.booked:
            return False
        latest_booked = (
            self._now + timedelta(seconds=RESERVED_AHEAD_SECONDS + EARLY_SECONDS) + 2 * self.every
        )
        return bool(self.earliest > self._latest or self.booked > latest_booked)

    def come_back(self) -> bool:
        """Reset times that are ahead to those after a start now, at most.

        Return True if they were ahead.
        """
        if is_ahead := self.is_ahead:
            assert self.earliest
            self.earliest = min(self.earliest, self._latest)
            self.booked = self.earliest - self._slack
        return is_ahead

    @property
    def _latest(self) -> datetime:
        now = self._now
        return now + (self.every or timedelta()) * self.burst + timedelta(seconds=EARLY_SECONDS)

    def free_times(self) -> list[datetime]:
        """Return the next free start times that may be reserved now."""
        now = self._now
        assert self.every and self.earliest and self.booked
        start = max(self.booked, self.earliest - self._slack, now)
        number = max(
            0, int((timedelta(seconds=RESERVED_AHEAD_SECONDS) - (start - now)) / self.every) + 1
        )
        # Several jobs share a start time where the rate is faster than a dispatcher can be.
        together = max(1, int(timedelta(seconds=EARLY_SECONDS / 2) / self.every))
        return [start + self.every * (n - n % together) for n in range(min(number, 10_000))]

    @property
    def _slack(self) -> timedelta:
        return (self.every or timedelta()) * (self.burst - 1)

    @property
    def _now(self) -> datetime:
        """The database's time, with which a locked row is annotated."""
        return self.db_now  # type: ignore[attr-defined, no-any-return]
