from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from django.db import models, router
from django.db.models import Case, Exists, F, OuterRef, Q, QuerySet, When
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..core.queue_selector import check_name as check_queue
from ..exceptions import InvalidSchedule
from ..recurrence.cron import UTC
from ..recurrence.rule import LONGEST_CRON, Plan, Recurrence, check_name
from .document import DocumentField
from .enums import FINISHED
from .expressions import Now, StrictOnSQLite, now_plus
from .identifier import IdentifierField
from .job import Job
from .primary import PrimaryQuerySet

# Seconds after its last declaration by a dispatcher until a definition counts as removed from all
# code.
UNDECLARED_SECONDS = 120.0
# The times and intervals that Python can read. A row that no scheduler can read, such as one with
# PostgreSQL's infinity, would stop them all.
TIMES = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
INTERVALS = timedelta(days=-10_000), timedelta(days=10_000)
TIMES_OF_A_TASK = ("starts_at", "ends_at", "declared_at", "next_run_at", "last_run_at")
READABLE = Q(
    **{f"{name}__range": TIMES for name in TIMES_OF_A_TASK},
    **{f"{name}__range": INTERVALS for name in ("every", "jitter")},
)
# Fields whose change invalidates ``next_run_at``.
SCHEDULE = ("cron", "timezone", "every", "drift", "starts_at", "ends_at")
CALL = {"task", "command", "args", "kwargs", "queue", "priority"}


class RecurringTaskQuerySet(PrimaryQuerySet["RecurringTask"]):
    """Recurring tasks: which are due, and operators' actions."""

    def enabled(self) -> RecurringTaskQuerySet:
        """Filter tasks that run on their schedule."""
        return self.filter(is_enabled=True)

    def disabled(self) -> RecurringTaskQuerySet:
        """Filter tasks that do not run until ``enable()``."""
        return self.filter(is_enabled=False)

    def enable(self) -> int:
        """Resume runs from the next time on. Return the number of rows that were disabled."""
        return self.disabled().replan(is_enabled=True)

    def disable(self) -> int:
        """Stop runs until enable(). Return the number of rows that were enabled."""
        return self.enabled().replan(is_enabled=False)

    def replan(self, **changes: Any) -> int:
        """Compute the next time again, as after a change of the schedule.

        Rows with drift still wait for their unfinished job. ``changes`` are updated too.
        """
        job = Case(When(Exists(self._unfinished_jobs()), then=F("waits_for")), default=None)
        return self.update(**{**changes, "next_run_at": None, "waits_for": job, "is_over": False})

    def undeclared(self) -> RecurringTaskQuerySet:
        """Filter rows whose code no running dispatcher has."""
        return self.filter(is_from_code=True, declared_at__lt=now_plus(-UNDECLARED_SECONDS))

    def of(self, definitions: Iterable[str]) -> RecurringTaskQuerySet:
        """Filter rows made in the admin, and rows with exactly these definitions in code."""
        return self.filter(Q(is_from_code=False) | Q(definition__in=list(definitions)))

    def upcoming(self) -> RecurringTaskQuerySet:
        """Filter enabled rows, annotated with the database's time as ``seen_at``.

        Unplanned rows come first, then the others in the order of their next time. Rows with drift
        are left out until their last job has ended: their next interval starts then.
        """
        is_free = Q(drift=False) | ~Exists(self._unfinished_jobs())
        rows = self.enabled().filter(is_free, is_over=False).annotate(seen_at=Now())
        return rows.order_by(F("next_run_at").asc(nulls_first=True), "pk")

    def waiting(self) -> RecurringTaskQuerySet:
        """Filter unplanned and due rows."""
        return self.upcoming().filter(Q(next_run_at=None) | Q(next_run_at__lte=Now()))

    def due(self) -> RecurringTaskQuerySet:
        """Filter tasks whose next time has come."""
        return self.upcoming().filter(next_run_at__lte=Now())

    def _unfinished_jobs(self) -> QuerySet[Job]:
        jobs = Job.objects.using(self.db).filter(pk=OuterRef("waits_for"))
        return jobs.exclude(state__in=FINISHED)


class RecurringTask(models.Model):
    """A task, or a management command, that is enqueued on a schedule."""

    class Missed(models.TextChoices):
        """Policy for times at which no dispatcher ran."""

        SKIP = "skip", _("Skip")
        ONE = "one", _("Run once")
        ALL = "all", _("Run all")

    name = IdentifierField(_("name"), max_length=255, unique=True)
    task = IdentifierField(
        _("task"),
        max_length=255,
        blank=True,
        default="",
        db_default="",
        help_text=_("Path of the task, such as shop.tasks.report."),
    )
    command = models.CharField(
        _("command"),
        max_length=100,
        blank=True,
        default="",
        db_default="",
        help_text=_("A management command, instead of a task."),
    )
    cron = models.CharField(
        _("cron expression"),
        max_length=LONGEST_CRON,
        blank=True,
        default="",
        db_default="",
        help_text=_("Minute, hour, day of month, month, day of week, such as 0 9 * * mon-fri."),
    )
    timezone = models.CharField(
        _("time zone"),
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text=_("Time zone of the cron expression. Empty: the project's TIME_ZONE."),
    )
    every = models.DurationField(
        _("every"),
        null=True,
        blank=True,
        help_text=_("An interval, instead of a cron expression: 00:05:00 is five minutes."),
    )
    drift = models.BooleanField(
        _("drift"),
        default=False,
        db_default=False,
        help_text=_("Count the interval from the end of a run, not from its scheduled time."),
    )
    args = DocumentField(_("arguments"), default=list, db_default=[], blank=True)
    kwargs = DocumentField(_("keyword arguments"), default=dict, db_default={}, blank=True)
    queue = IdentifierField(
        _("queue"),
        max_length=100,
        blank=True,
        default="",
        db_default="",
        help_text=_("Empty: the queue of the task."),
    )
    priority = models.SmallIntegerField(
        _("priority"), null=True, blank=True, help_text=_("Empty: the priority of the task.")
    )
    missed = models.CharField(
        _("missed runs"),
        max_length=4,
        choices=Missed.choices,
        default=Missed.SKIP,
        db_default=Missed.SKIP,
    )
    most_missed = models.PositiveSmallIntegerField(
        _("maximum missed runs"),
        default=10,
        db_default=10,
        help_text=_("If more runs were missed, the oldest are skipped."),
    )
    jitter = models.DurationField(
        _("jitter"),
        default=timedelta,
        db_default=timedelta(),
        blank=True,
        help_text=_("Maximum random delay of each run."),
    )
    starts_at = models.DateTimeField(_("starts at"), null=True, blank=True)
    ends_at = models.DateTimeField(_("ends at"), null=True, blank=True)
    is_enabled = models.BooleanField(_("enabled"), default=True, db_default=True, editable=False)
    is_from_code = models.BooleanField(
        _("from code"), default=False, db_default=False, editable=False
    )
    # Fingerprint of the declaration in code, and when a dispatcher with that code last ran. For a
    # schedule moved from another queue: its database, queue and primary key there.
    definition = IdentifierField(
        max_length=64, blank=True, default="", db_default="", editable=False
    )
    declared_at = models.DateTimeField(null=True, editable=False)
    next_run_at = models.DateTimeField(_("next run"), null=True, editable=False)
    last_run_at = models.DateTimeField(_("last run"), null=True, editable=False)
    # The job whose end the next interval starts from.
    waits_for = models.UUIDField(null=True, editable=False)
    # True if no time is left before ``ends_at``.
    is_over = models.BooleanField(default=False, db_default=False, editable=False)
    problem = models.TextField(_("problem"), blank=True, default="", db_default="", editable=False)

    objects = RecurringTaskQuerySet.as_manager()

    class Meta:
        verbose_name = _("recurring task")
        verbose_name_plural = _("recurring tasks")
        constraints = [
            models.CheckConstraint(
                name="dbqueue_recurring_calls_one",
                condition=Q(task="") & ~Q(command="") | ~Q(task="") & Q(command=""),
                violation_error_message=_("Give either a task or a command."),
            ),
            models.CheckConstraint(
                name="dbqueue_recurring_by_one",
                condition=Q(cron="", every__isnull=False) | ~Q(cron="") & Q(every__isnull=True),
                violation_error_message=_("Give either a cron expression or an interval."),
            ),
            models.CheckConstraint(
                name="dbqueue_recurring_times",
                condition=READABLE,
                violation_error_message=_("Give intervals below 10,000 days."),
            ),
            StrictOnSQLite(name="dbqueue_recurring_types"),
        ]
        permissions = [
            ("enable_recurringtask", "Can enable and disable recurring tasks"),
            ("run_recurringtask", "Can run recurring tasks now"),
        ]

    def __str__(self) -> str:
        return str(self.name)

    def save(self, *args: Any, update_fields: Iterable[str] | None = None, **kwargs: Any) -> None:
        """Validate the schedule and the call, then save. Raises InvalidSchedule.

        A changed schedule is planned anew, as by ``replan()``.
        Whether the task exists and accepts the arguments is known to the scheduler's process, which
        reports it as the row's problem.
        """
        update_fields = None if update_fields is None else set(update_fields)
        if update_fields is None or {each.name for each in fields(Recurrence)} & update_fields:
            check_name(self.name)
            self.recurrence  # noqa: B018
        if update_fields is None or CALL & update_fields:
            try:
                self._check_call()
            except ValueError as error:
                raise InvalidSchedule(f"{self.name!r}: {error}") from None
        if not self._state.adding and self._is_changed(update_fields, kwargs.get("using")):
            self.next_run_at, self.is_over = None, False
            if update_fields is not None:
                update_fields |= {"next_run_at", "is_over"}
        super().save(*args, update_fields=update_fields, **kwargs)

    def _is_changed(self, update_fields: set[str] | None, using: str | None) -> bool:
        """Return whether the stored row has another schedule than the one to be saved.

        The times of ``H`` follow from the name.
        """
        names = {"name", *SCHEDULE}
        if update_fields is not None and not (names := names & update_fields):
            return False
        database = using or router.db_for_write(type(self), instance=self)
        stored = RecurringTask.objects.using(database).filter(pk=self.pk).values(*names).first()
        return stored is not None and any(getattr(self, name) != stored[name] for name in names)

    def _check_call(self) -> None:
        """Raise ValueError for a call that no task can have."""
        for name in ("task", "command"):
            if not isinstance(given := getattr(self, name), str):
                path = getattr(given, "module_path", "shop.tasks.report")
                raise ValueError(f"{name} is text, such as {path!r}, not {given!r}.")
        if not isinstance(self.args, list | tuple) or not isinstance(self.kwargs, dict):
            raise ValueError(
                f"args must be a list and kwargs a dict, not {self.args!r} and {self.kwargs!r}."
            )
        if self.queue != "":
            check_queue(self.queue)
        if self.priority is not None and (
            type(self.priority) is not int or not -100 <= self.priority <= 100
        ):
            raise ValueError(
                f"priority must be a whole number from -100 to 100, not {self.priority!r}."
            )

    @property
    def recurrence(self) -> Recurrence:
        """The schedule of this row. Raises InvalidSchedule."""
        values: dict[str, Any] = {
            each.name: getattr(self, each.name) for each in fields(Recurrence)
        }
        for name in ("starts_at", "ends_at"):
            values[name] = values[name] and aware(values[name])
        return Recurrence(**values)

    def next_times(
        self, number: int = 5, after: datetime | None = None, until: datetime | None = None
    ) -> list[datetime]:
        """Return the next times in UTC, also while disabled, and none after ``until``.

        Raises InvalidSchedule.
        """
        return self.recurrence.next_times(
            number, aware(after or timezone.now()), self._planned, until and aware(until)
        )

    def time_after(self, moment: datetime) -> datetime | None:
        """Return the first time after a moment; None if none is left before ``ends_at``.

        Raises InvalidSchedule.
        """
        return self.recurrence.time_after(aware(moment))

    def time_from(self, end: datetime) -> datetime | None:
        """With drift: return the time that follows a run's ``end``. Raises InvalidSchedule."""
        return self.recurrence.time_from(aware(end))

    def time_if_ahead(self, now: datetime) -> datetime | None:
        """Return the latest valid next time if the planned one is later, else None.

        Raises InvalidSchedule.
        """
        latest, planned = self.recurrence.latest_time(aware(now), self._planned), self._planned
        return latest if latest and planned and latest < planned else None

    def plan(self, now: datetime) -> Plan:
        """Return the plan for the due time. ``now`` is the database's. Raises InvalidSchedule."""
        return self.recurrence.plan(self._planned or aware(now), aware(now))

    @property
    def _planned(self) -> datetime | None:
        return aware(self.next_run_at) if self.next_run_at else None


def aware(time: datetime) -> datetime:
    """Add the time zone, which times from the database lack under ``USE_TZ = False``."""
    return timezone.make_aware(time) if timezone.is_naive(time) else time
