from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .expressions import Now
from .primary import PrimaryQuerySet


class RecurringExecutionQuerySet(PrimaryQuerySet["RecurringExecution"]):
    """Recurring executions, read from the primary."""


class RecurringExecution(models.Model):
    """One time of a recurring task, with the job that was enqueued for it.

    Unique, however many dispatchers run. It outlives its job, which may be deleted as soon as the
    job has succeeded.
    """

    task = models.ForeignKey(
        "dbqueue.RecurringTask",
        verbose_name=_("recurring task"),
        on_delete=models.CASCADE,
        db_index=False,
        related_name="executions",
    )
    run_at = models.DateTimeField(_("run at"), db_index=True)
    job = models.UUIDField(_("job"), null=True)
    enqueued_at = models.DateTimeField(_("enqueued at"), db_default=Now())

    objects = RecurringExecutionQuerySet.as_manager()

    class Meta:
        verbose_name = _("recurring execution")
        verbose_name_plural = _("recurring executions")
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(name="dbqueue_recurring_once", fields=["task", "run_at"])
        ]

    def __str__(self) -> str:
        return f"{self.task_id} {self.run_at}"
