from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import chain
from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Sum
from django.utils.text import format_lazy
from django.utils.timezone import is_aware, now
from django.utils.translation import gettext_lazy as _

from ..core.counts import NUMBERS, TIMES, Counts, Times
from .document import DocumentField
from .expressions import Now, StrictOnSQLite
from .failure import Failure
from .identifier import IdentifierField
from .job import SPAN
from .primary import PrimaryQuerySet

# The columns of counts.
COLUMNS = (
    *NUMBERS,
    *(f"{name}_{part}" for name in TIMES for part in ("sum", "longest", "buckets")),
)


# How long statistics by minute are kept, in seconds.
MINUTES_KEPT = 2 * 86_400.0


class Period(models.TextChoices):
    """How long the time is that a row counts."""

    HOUR = "hour", _("Hour")
    MINUTE = "minute", _("Minute")


def start_of(period: str, time: datetime) -> datetime:
    """Return the start of the time's hour or minute, in UTC; in local time without ``USE_TZ``."""
    # Most times are in UTC already.
    utc = time if time.tzinfo in (timezone.utc, None) else time.astimezone(timezone.utc)
    minute = utc.minute if period == Period.MINUTE else 0
    return utc.replace(minute=minute, second=0, microsecond=0)


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


# The columns of a number of failed attempts.
_OCCURRENCE = ("start", "task", "queue", "release", "number")


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
    release = IdentifierField(_("release"), max_length=100, db_default="")
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


class CountedTime(models.Model):
    """What all counts have: an hour or a minute, a queue, a task, and a release."""

    period = models.CharField(_("period"), max_length=6, choices=Period.choices)
    start = models.DateTimeField(_("start"))
    queue = IdentifierField(_("queue"), max_length=100)
    task = IdentifierField(_("task"), max_length=255)
    release = IdentifierField(_("release"), max_length=100, blank=True, default="", db_default="")

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.task} in {self.queue}, {self.start:%Y-%m-%d %H:%M}"


class StatisticQuerySet(PrimaryQuerySet["Statistic"]):
    """Statistics, by hour and by minute."""

    def per_hour(
        self,
        since: datetime,
        *,
        task: str | None = None,
        queue: str | None = None,
        release: str | None = None,
    ) -> dict[datetime, Counts]:
        """Return the counts of each hour that has some, in order, from the hour of ``since`` on.

        They are of all tasks, queues and releases, or of these. Those of the last seconds may be
        missing. Raises ValueError for a time that does not fit ``USE_TZ``, and for names that are
        not text.
        """
        return self._per(Period.HOUR, since, task=task, queue=queue, release=release)

    def per_minute(
        self,
        since: datetime,
        *,
        task: str | None = None,
        queue: str | None = None,
        release: str | None = None,
    ) -> dict[datetime, Counts]:
        """Return the counts of each minute, as ``per_hour()``. They are kept for two days."""
        return self._per(Period.MINUTE, since, task=task, queue=queue, release=release)

    def per_queue(self, since: datetime) -> dict[str, Counts]:
        """Return the counts of each queue from the minute of ``since`` on.

        From its hour on, if that is more than two days ago. Raises ValueError as ``per_hour()``.
        """
        return self._by("queue", since)

    def per_task(self, since: datetime) -> dict[str, Counts]:
        """Return the counts of each task, as ``per_queue()``."""
        return self._by("task", since)

    def per_queue_and_task(self, since: datetime) -> dict[tuple[str, str], Counts]:
        """Return the counts of each task in each queue, from the hour of ``since`` on."""
        rows = self._since(Period.HOUR, since).order_by()
        found: dict[tuple[str, str], Counts] = {}
        for queue, task, *values in rows.values_list("queue", "task", *COLUMNS).iterator():
            found.setdefault((queue, task), Counts()).merge(counts_of(values))
        return found

    def by_queue(
        self, since: datetime, period: Period = Period.HOUR, queue: str | None = None
    ) -> dict[str, dict[datetime, Counts]]:
        """Return the counts of each queue, or of one, by hour or minute, as ``per_hour()``."""
        rows = self._since(period, since).filter(**({"queue": queue} if queue else {}))
        found: dict[str, dict[datetime, Counts]] = {}
        read = rows.order_by("queue", "start").values_list("queue", "start", *COLUMNS)
        for name, start, *values in read.iterator():
            of_queue = found.setdefault(name, {})
            of_queue.setdefault(start, Counts()).merge(counts_of(values))
        return found

    def _by(self, column: str, since: datetime) -> dict[str, Counts]:
        rows = self._since(Period.MINUTE, since)  # It checks the time, too.
        if now() - since > timedelta(seconds=MINUTES_KEPT):
            rows = self._since(Period.HOUR, since)
        found: dict[str, Counts] = {}
        for name, *values in rows.order_by().values_list(column, *COLUMNS).iterator():
            found.setdefault(name, Counts()).merge(counts_of(values))
        return found

    def _per(self, period: Period, since: datetime, **wanted: str | None) -> dict[datetime, Counts]:
        given = {name: value for name, value in wanted.items() if value is not None}
        for name, value in given.items():
            if not isinstance(value, str) or "\x00" in value:
                hint = " Give its module_path." if name == "task" else ""
                raise ValueError(f"{name} must be a name as text, not {value!r}.{hint}")
        rows = self._since(period, since).filter(**given)
        found: dict[datetime, Counts] = {}
        for start, *values in rows.order_by("start").values_list("start", *COLUMNS).iterator():
            found.setdefault(start, Counts()).merge(counts_of(values))
        return found

    def mean_run_times(self, tasks: Collection[str], since: datetime) -> dict[str, float]:
        """Return the mean run time of each task's attempts since an hour, in seconds.

        Tasks without an attempt are left out.
        """
        rows = self._since(Period.HOUR, since).filter(task__in=tasks, runs__gt=0).order_by()
        sums = rows.values_list("task").annotate(Sum("run_time_sum"), Sum("runs"))
        return {task: seconds / runs for task, seconds, runs in sums}

    def deploys(self, since: datetime, period: Period = Period.HOUR) -> dict[datetime, list[str]]:
        """Return the releases that began to run jobs, by the hour or minute in which they did.

        A release begins if it ran nothing in the last hour or minute before that had any attempt.
        The first one after ``since`` is not a deploy.
        """
        rows = self._since(period, since).filter(runs__gt=0).order_by("start", "release")
        running: dict[datetime, list[str]] = {}
        for start, release in rows.values_list("start", "release").distinct():
            running.setdefault(start, []).append(release)
        before = chain([[]], running.values())
        found = {
            start: [each for each in releases if each and each not in known]
            for (start, releases), known in zip(running.items(), before, strict=False)
            if known
        }
        return {start: releases for start, releases in found.items() if releases}

    def _since(self, period: Period, since: datetime) -> StatisticQuerySet:
        if not isinstance(since, datetime) or is_aware(since) != settings.USE_TZ:
            raise ValueError(f"since must fit USE_TZ, as timezone.now() does, not {since!r}.")
        try:
            return self.filter(period=period, start__gte=start_of(period, since))
        except OverflowError:
            raise ValueError(f"since={since!r} is before the first year in UTC.") from None


class Statistic(CountedTime):
    """Counts of one hour or minute, queue, task and release: see ``Counts``. Times are in seconds.

    The release is that of the workers, and empty for jobs that were enqueued.
    """

    Period = Period

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
            models.UniqueConstraint(
                name="dbqueue_statistic_once",
                fields=["period", "start", "queue", "task", "release"],
            )
        ]

    @property
    def counts(self) -> Counts:
        """The counts of the row."""
        return counts_of(getattr(self, name) for name in COLUMNS)

    @counts.setter
    def counts(self, counts: Counts) -> None:
        self.__dict__.update(zip(COLUMNS, values_of(counts), strict=True))


@dataclass(slots=True)
class Occurrences:
    """Failed attempts of one failure: by start of the hour or minute, and by what they were of."""

    at: Counter[datetime] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    queues: Counter[str] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)

    @property
    def number(self) -> int:
        """The number of attempts."""
        return self.at.total()


class FailureStatisticQuerySet(PrimaryQuerySet["FailureStatistic"]):
    """Numbers of failed attempts, by hour and by minute."""

    def since(self, period: Period, time: datetime) -> FailureStatisticQuerySet:
        """Filter the hours or minutes from that of a time on."""
        return self.filter(period=period, start__gte=start_of(period, time))

    def by_failure(self, failures: Collection[int]) -> dict[int, Occurrences]:
        """Return what these rows have counted of each of these failures."""
        found = {failure: Occurrences() for failure in failures}
        rows = self.filter(failure__in=found).values_list("failure_id", *_OCCURRENCE)
        for failure, start, task, queue, release, number in rows.iterator():
            of = found[failure]
            of.at[start] += number
            of.tasks[task] += number
            of.queues[queue] += number
            of.releases[release] += number
        return found


class FailureStatistic(CountedTime):
    """The number of attempts that one failure has failed: of one hour or minute, queue and task."""

    failure = models.ForeignKey(
        Failure, on_delete=models.DO_NOTHING, db_constraint=False, db_index=False, related_name="+"
    )
    number = models.PositiveBigIntegerField(_("number"), db_default=0)

    objects = FailureStatisticQuerySet.as_manager()

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                name="dbqueue_failurestatistic_once",
                fields=["failure", "period", "start", "queue", "task", "release"],
            )
        ]
        indexes = [models.Index(name="dbqueue_failurestatistic_old", fields=["period", "start"])]


class Overview(Statistic):
    """The page that says whether all is well. The permission to view jobs covers it."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("overview")
        # The admin sorts its list of pages by these names: this page is the first.
        verbose_name_plural = format_lazy(" {name}", name=_("Overview"))


class DatabaseHealth(Statistic):
    """The page of the database. The permission to view processes covers it."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("database")
        verbose_name_plural = _("database")
