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
# The numbers of a limit, as stored with a job: ``max_running``, or ``interval`` (in seconds) and
# ``burst``.
StoredLimit = dict[str, Json]


class SemaphoreQuerySet(PrimaryQuerySet["Semaphore"]):
    def waiting(self) -> SemaphoreQuerySet:
        """Filter semaphores that jobs wait for."""
        # Not Exists(): PostgreSQL may turn it into a join with all waiting jobs of a semaphore.
        blocked = Job.objects.using(self.db).filter(state=State.BLOCKED, blocked_by=OuterRef("pk"))
        first = blocked.order_by("-priority", "id").values("pk")[:1]
        return self.alias(first=Subquery(first)).filter(first__isnull=False)


class Semaphore(models.Model):
    """Limit on jobs that share a key: ``max_running`` at a time, or one start per ``interval``.

    Each job carries its own numbers. ``max_running`` comes from the job claimed last, ``interval``
    and ``burst`` from the job started last.

    interval: a timedelta here; in a job's stored limit, a number of seconds.
    earliest: when the rate allows the next start.
    booked: start times from here on are still free.
    """

    key = IdentifierField(_("key"), max_length=LONGEST_KEY, primary_key=True)
    max_running = models.PositiveIntegerField(_("maximum at a time"), null=True)
    interval = models.DurationField(_("interval"), null=True)
    burst = models.PositiveIntegerField(_("burst"), default=1)
    earliest = models.DateTimeField(_("earliest start"), null=True)
    booked = models.DateTimeField(_("reserved until"), null=True, db_index=True)

    objects = SemaphoreQuerySet.as_manager()

    # Of a locked row: the number of taken slots, and the smallest ``max_running`` of their jobs.
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
        """Adopt the limit of a claimed job. The numbers of a rate change only when a job starts.

        A new rate has them from the first claimed job. If that may not start, others may.
        """
        if "max_running" in limit:
            if self.max_running != limit["max_running"]:
                self.max_running, self.is_changed = limit["max_running"], True
        elif self.booked is None:
            self._set_rate(limit)
            self.earliest = self.booked = self._now
            self.is_changed = True

    @property
    def free(self) -> int:
        """Number of further jobs that may run, with the limit of the job claimed last."""
        return self.free_for({"max_running": self.max_running or 0})

    def free_for(self, limit: StoredLimit) -> int:
        """Return the number of further jobs with this limit that may run."""
        max_running: int = limit["max_running"]
        return min(max_running, self.smallest or max_running) - self.taken

    def is_free(self, limit: StoredLimit) -> bool:
        """Return True if its own limit and those of earlier jobs allow a job to start."""
        if "max_running" in limit:
            return self.free_for(limit) > 0
        if self.earliest is None or self.interval is None:
            return True
        interval = timedelta(seconds=limit["interval"])
        now = self._now
        earliest = self.earliest + max(timedelta(), interval - self.interval)
        slack = interval * (min(limit.get("burst", 1), self.burst) - 1)
        return bool(earliest - now <= slack + timedelta(seconds=EARLY_SECONDS))

    def use(self, limit: StoredLimit) -> None:
        if "max_running" in limit:
            self.taken += 1
            self.smallest = min(limit["max_running"], self.smallest or limit["max_running"])
        else:
            now = self._now
            self._set_rate(limit)
            self.earliest = max(self.earliest or now, now) + timedelta(seconds=limit["interval"])
            self.booked = max(self.booked or self.earliest, self.earliest - self._slack)
            self.is_changed = True

    def give_back(self, earliest: datetime) -> None:
        """Undo the last ``use()`` of a rate, after which ``earliest`` was this."""
        if self.interval and self.earliest == earliest:
            self.earliest, self.is_changed = earliest - self.interval, True

    @property
    def is_ahead(self) -> bool:
        """True if times are later than the last start and the reservations since can explain."""
        if not self.interval or not self.earliest or not self.booked:
            return False
        latest_booked = (
            self._now
            + timedelta(seconds=RESERVED_AHEAD_SECONDS + EARLY_SECONDS)
            + 2 * self.interval
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
        return now + (self.interval or timedelta()) * self.burst + timedelta(seconds=EARLY_SECONDS)

    @property
    def is_behind(self) -> bool:
        """True if sweeps, every two seconds, have not reserved the start times of the next ones."""
        ahead = timedelta(seconds=RESERVED_AHEAD_SECONDS / 2)
        return bool(self.booked and self.booked < self._now + ahead)

    def free_times(self) -> list[datetime]:
        """Return the next free start times that may be reserved now."""
        now = self._now
        assert self.interval and self.earliest and self.booked
        start = max(self.booked, self.earliest - self._slack, now)
        number = max(
            0, int((timedelta(seconds=RESERVED_AHEAD_SECONDS) - (start - now)) / self.interval) + 1
        )
        # Several jobs share a start time where the rate is faster than a dispatcher can be.
        together = max(1, int(timedelta(seconds=EARLY_SECONDS / 2) / self.interval))
        return [start + self.interval * (n - n % together) for n in range(min(number, 10_000))]

    def _set_rate(self, limit: StoredLimit) -> None:
        self.interval, self.burst = timedelta(seconds=limit["interval"]), limit.get("burst", 1)

    @property
    def _slack(self) -> timedelta:
        return (self.interval or timedelta()) * (self.burst - 1)

    @property
    def _now(self) -> datetime:
        """The database's time, with which a locked row is annotated."""
        return self.db_now  # type: ignore[attr-defined, no-any-return]
