from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from django.conf import settings
from django.db import models
from django.utils.text import format_lazy
from django.utils.timezone import is_aware
from django.utils.translation import gettext_lazy as _

from ..core.counts import NUMBERS, TIMES, Counts, Times
from .document import DocumentField
from .expressions import Now, StrictOnSQLite
from .identifier import IdentifierField
from .job import SPAN
from .primary import PrimaryQuerySet

# The columns of counts.
COLUMNS = (
    *NUMBERS,
    *(f"{name}_{part}" for name in TIMES for part in ("sum", "longest", "buckets")),
)


def hour_of(time: datetime) -> datetime:
    """Return the start of the time's hour, in UTC; in local time under ``USE_TZ = False``."""
    # Most times are in UTC already.
    utc = time if time.tzinfo in (timezone.utc, None) else time.astimezone(timezone.utc)
    return utc.replace(minute=0, second=0, microsecond=0)


def values_of(counts: Counts) -> list[object]:
    """Return the values of COLUMNS for these counts."""
    numbers: list[object] = [getattr(counts, name) for name in NUMBERS]
    times = [
        (each.sum, each.longest, each.as_json()) for each in (counts.run_time, counts.wait_time)
    ]
    return [*numbers, *times[0], *times[1]]


def counts_of(values: Iterable[Any]) -> Counts:
    """Return the counts with these values of COLUMNS."""
    enqueued, runs, failures, retries, *times = values
    return Counts(
        enqueued=enqueued,
        runs=runs,
        failures=failures,
        retries=retries,
        run_time=Times.from_json(*times[:3]),
        wait_time=Times.from_json(*times[3:]),
    )


class StatisticDeltaQuerySet(PrimaryQuerySet["StatisticDelta"]):
    """Deltas."""


class StatisticDelta(models.Model):
    """Counts of one transaction, which wrote them with what it counted.

    A dispatcher adds them to the statistics. Until then, transactions that count the same task do
    not wait for each other. ``counts`` is one document: a row of many columns and constraints
    would take the statement that enqueues a job 60 µs more.
    """

    at = models.DateTimeField(_("time"), db_default=Now())
    queue = IdentifierField(_("queue"), max_length=100)
    task = IdentifierField(_("task"), max_length=255)
    counts = DocumentField(_("counts"))

    objects = StatisticDeltaQuerySet.as_manager()

    class Meta:
        default_permissions = ()
        constraints = [
            models.CheckConstraint(
                name="dbqueue_statisticdelta_at", condition=models.Q(at__range=SPAN)
            ),
            StrictOnSQLite(name="dbqueue_statisticdelta_types"),
        ]

    def __str__(self) -> str:
        return f"{self.task} in {self.queue}, {self.at:%Y-%m-%d %H:%M:%S}"


class StatisticQuerySet(PrimaryQuerySet["Statistic"]):
    """Statistics, by hour."""

    def per_hour(
        self, since: datetime, *, task: str | None = None, queue: str | None = None
    ) -> dict[datetime, Counts]:
        """Return the counts of each hour that has some, in order, from the hour of ``since`` on.

        They are of all tasks and queues, or of this task and this queue. Those of the last seconds
        may be missing. Raises ValueError for a time that does not fit ``USE_TZ``.
        """
        if is_aware(since) != settings.USE_TZ:
            raise ValueError(f"since must fit USE_TZ, as timezone.now() does, not {since!r}.")
        wanted = {"task": task, "queue": queue}
        rows = self.filter(
            hour__gte=hour_of(since), **{k: v for k, v in wanted.items() if v is not None}
        )
        hours: dict[datetime, Counts] = {}
        for hour, *values in rows.order_by("hour").values_list("hour", *COLUMNS).iterator():
            hours.setdefault(hour, Counts()).merge(counts_of(values))
        return hours


class Statistic(models.Model):
    """Counts of one hour, queue and task: see ``Counts``. Times are in seconds."""

    hour = models.DateTimeField(_("hour"))
    queue = IdentifierField(_("queue"), max_length=100)
    task = IdentifierField(_("task"), max_length=255)
    enqueued = models.PositiveBigIntegerField(_("enqueued"), db_default=0)
    runs = models.PositiveBigIntegerField(_("runs"), db_default=0)
    failures = models.PositiveBigIntegerField(_("failures"), db_default=0)
    retries = models.PositiveBigIntegerField(_("retries"), db_default=0)
    run_time_sum = models.FloatField(_("sum of run times"), db_default=0.0)
    run_time_longest = models.FloatField(_("longest run time"), db_default=0.0)
    run_time_buckets = DocumentField(_("histogram of run times"), null=True)
    wait_time_sum = models.FloatField(_("sum of waiting times"), db_default=0.0)
    wait_time_longest = models.FloatField(_("longest waiting time"), db_default=0.0)
    wait_time_buckets = DocumentField(_("histogram of waiting times"), null=True)

    objects = StatisticQuerySet.as_manager()

    class Meta:
        verbose_name = _("statistic")
        verbose_name_plural = _("statistics")
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(name="dbqueue_statistic_once", fields=["hour", "queue", "task"])
        ]

    def __str__(self) -> str:
        return f"{self.task} in {self.queue}, {self.hour:%Y-%m-%d %H:00}"

    @property
    def counts(self) -> Counts:
        """The counts of the row."""
        return counts_of(getattr(self, name) for name in COLUMNS)

    @counts.setter
    def counts(self, counts: Counts) -> None:
        self.__dict__.update(zip(COLUMNS, values_of(counts), strict=True))


class Overview(Statistic):
    """The page that says whether all is well. The permission to view jobs covers it."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("overview")
        # The admin sorts its list of pages by these names: this page is the first.
        verbose_name_plural = format_lazy(" {name}", name=_("Overview"))
