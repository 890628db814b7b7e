from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from django.db import connections, models
from django.db.models import Exists, F, OuterRef, Q
from django.utils.translation import gettext_lazy as _

from .document import DocumentField
from .enums import UNFINISHED
from .expressions import Now
from .identifier import IdentifierField
from .job import Job
from .primary import PrimaryQuerySet

if TYPE_CHECKING:
    from datetime import datetime

# Columns of a job that are stored before it is changed, for an undo.
STORED = (
    "state",
    "queue",
    "priority",
    "run_after",
    "expires_at",
    "attempt",
    "failures",
    "started_at",
    "finished_at",
    "stop_requested_at",
)


class OperationQuerySet(PrimaryQuerySet["Operation"]):
    """Operations: which have not ended, and which can be undone."""

    def unfinished(self) -> OperationQuerySet:
        """Filter operations that have not ended."""
        return self.filter(finished_at=None)

    def stoppable(self) -> OperationQuerySet:
        """Filter operations that have not ended and have no stop request."""
        return self.unfinished().filter(stop_requested_at=None)

    def with_job(self) -> OperationQuerySet:
        """Annotate with ``is_stalled`` and ``is_running``.

        An operation is stalled if it has not ended, and no job goes on with it.
        """
        job = Job.objects.using(self.db).filter(pk=OuterRef("job"))
        return self.annotate(
            is_stalled=~Exists(job.filter(state__in=UNFINISHED)) & Q(finished_at=None),
            is_running=Exists(job.running()),
        )

    def stalled(self) -> OperationQuerySet:
        """Filter operations that have not ended, and that no job goes on with."""
        return self.with_job().filter(is_stalled=True)  # type: ignore[misc]

    def undoable(self) -> OperationQuerySet:
        """Filter operations that have ended, changed something, and were not undone before."""
        can_be = Q(verb__in=Operation.UNDOABLE, rows__isnull=True) | Q(rows__changes__isnull=False)
        return self.filter(can_be, finished_at__isnull=False, changed__gt=0, undone_by=None)

    def holding(self) -> OperationQuerySet:
        """Filter moves to another backend that hold jobs: they go on, or were interrupted."""
        return self.filter(verb=Operation.Verb.MOVE_OUT, done__lt=F("total"))

    def insert(self, operation: Operation) -> Operation:
        """Insert an operation. Not with save(), which calls the project's receivers."""
        self.bulk_create([operation])
        connection = connections[self.db]
        if not connection.features.can_return_rows_from_bulk_insert:  # MySQL
            with connection.cursor() as cursor:
                cursor.execute("SELECT LAST_INSERT_ID()")
                (operation.pk,) = cursor.fetchone()
            operation._state.adding, operation._state.db = False, self.db
        return operation

    def store(self, operation: Operation, *columns: str) -> None:
        """Write columns of an operation. Not with save(), which calls the project's receivers."""
        self.filter(pk=operation.pk).update(**{name: getattr(operation, name) for name in columns})

    def stop(self) -> int:
        """Request that operations stop. What they have changed stays. Return their number."""
        return self.stoppable().update(stop_requested_at=Now())


class Operation(models.Model):
    """What an operator did: the user, filters, reason, progress, and undo."""

    class Verb(models.TextChoices):
        RETRY = "retry", _("Retry")
        RETRY_NOW = "retry_now", _("Retry now")
        RUN_NOW = "run_now", _("Run now")
        RESCHEDULE = "reschedule", _("Reschedule")
        DISCARD = "discard", _("Discard")
        MOVE = "move", _("Move to another queue")
        # Between databases: see engine/moving.py.
        MOVE_OUT = "move_out", _("Move to another backend")
        MOVE_IN = "move_in", _("Move from another backend")
        REPRIORITISE = "reprioritise", _("Set priority")
        STOP = "stop", _("Stop")
        STOP_AND_RETRY = "stop_and_retry", _("Stop and run again")
        UNDO = "undo", _("Undo")
        # Of other rows than jobs: see engine/row_operations.py.
        PAUSE = "pause", _("Pause")
        RESUME = "resume", _("Resume")
        RESTRICT = "restrict", _("Set limit")
        MUTE = "mute", _("Mute")
        RESOLVE = "resolve", _("Resolve")
        REOPEN = "reopen", _("Reopen")
        ENABLE = "enable", _("Enable")
        DISABLE = "disable", _("Disable")
        RUN = "run", _("Run a recurring task")
        QUIET = "quiet", _("Quiet processes")
        WAKE = "wake", _("Resume processes")
        END = "end", _("Stop processes")

    # Of jobs: those after which their state is known, without effects outside of the database.
    UNDOABLE = (
        Verb.RETRY,
        Verb.RETRY_NOW,
        Verb.RUN_NOW,
        Verb.RESCHEDULE,
        Verb.DISCARD,
        Verb.MOVE,
        Verb.REPRIORITISE,
    )

    verb = models.CharField(_("action"), max_length=20, choices=Verb.choices)
    value = models.CharField(_("value"), max_length=100, blank=True)
    scope = models.TextField(_("applied to"), blank=True)
    reason = models.CharField(_("reason"), max_length=200, blank=True)
    actor = models.CharField(_("by"), max_length=150, blank=True)
    # Jobs a second; None: as fast as possible.
    rate = models.PositiveIntegerField(_("jobs per second"), null=True, blank=True)
    # For a trial run: it stops if more than this share of its jobs fails again, in percent.
    stop_above = models.PositiveSmallIntegerField(
        _("stops above"), null=True, blank=True, help_text=_("Percent of jobs that fail again.")
    )
    # One to one: two requests at a time cannot both undo an operation.
    undoes = models.OneToOneField(
        "self",
        verbose_name=_("undoes"),
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="undone_by",
    )
    total = models.PositiveIntegerField(_("selected jobs"), default=0)
    done = models.PositiveIntegerField(_("processed"), default=0)
    changed = models.PositiveIntegerField(_("changed"), default=0)
    # The last item that was processed.
    position = models.BigIntegerField(default=0)
    # The job that runs the operation; None: the request that started it did.
    job = models.UUIDField(_("job"), null=True, blank=True)
    # Of an operation on other rows than jobs: their table, and the columns that an undo restores.
    rows = DocumentField(null=True, blank=True)
    problem = models.TextField(_("problem"), blank=True)
    created_at = models.DateTimeField(_("started at"), db_default=Now())
    stop_requested_at = models.DateTimeField(_("stop requested at"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)

    objects = OperationQuerySet.as_manager()

    class Meta:
        verbose_name = _("operation")
        verbose_name_plural = _("operations")
        default_permissions = ("view",)
        permissions = [
            ("stop_operation", "Can stop and continue operations"),
            ("undo_operation", "Can undo operations"),
        ]
        constraints = [
            models.CheckConstraint(
                name="dbqueue_operation_counts",
                condition=Q(changed__lte=F("done")) & Q(done__lte=F("total")),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.get_verb_display()} #{self.pk}"

    def lasted(self, now: datetime) -> timedelta:
        """Return how long the operation took, or has taken at this time."""
        return max((self.finished_at or now) - self.created_at, timedelta())


class OperationJobQuerySet(PrimaryQuerySet["OperationJob"]):
    """Jobs of operations."""


class OperationJob(models.Model):
    """A job of an operation, and what it was before the operation changed it."""

    operation = models.ForeignKey(
        Operation, on_delete=models.CASCADE, related_name="items", db_index=False
    )
    # Not a foreign key: the row outlives the job.
    job = models.UUIDField()
    # None: not processed yet, or another transaction held the job's row.
    changed = models.BooleanField(null=True)
    state = models.CharField(max_length=10, blank=True, db_default="")
    queue = IdentifierField(max_length=100, null=True)
    priority = models.SmallIntegerField(null=True)
    run_after = models.DateTimeField(null=True)
    expires_at = models.DateTimeField(null=True)
    attempt = models.PositiveIntegerField(null=True)
    failures = models.PositiveIntegerField(null=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    stop_requested_at = models.DateTimeField(null=True)

    objects = OperationJobQuerySet.as_manager()

    class Meta:
        verbose_name = _("job of an operation")
        verbose_name_plural = _("jobs of operations")
        default_permissions = ()
        indexes = [models.Index(name="dbqueue_operationjob_order", fields=["operation", "id"])]
        constraints = [
            models.UniqueConstraint(name="dbqueue_operationjob_once", fields=["operation", "job"])
        ]

    def __str__(self) -> str:
        return f"{self.operation_id}: {self.job}"
