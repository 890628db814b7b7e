from __future__ import annotations

from django.db import models

from .expressions import Now, now_plus
from .identifier import IdentifierField
from .primary import PrimaryQuerySet

# Seconds after which the rows of a target that is no longer in the settings say nothing.
FORGOTTEN = 3600.0


class AlertQuerySet(PrimaryQuerySet["Alert"]):
    """Alerts: which problems last, and which are to be sent."""

    def active(self) -> AlertQuerySet:
        """Filter alerts whose problem lasts, of targets that are in the settings."""
        return self.filter(ended_at=None, found_at__gte=now_plus(-FORGOTTEN))

    def due(self) -> AlertQuerySet:
        """Filter alerts that are to be sent now."""
        return self.filter(due_at__lte=Now())

    def undelivered(self) -> AlertQuerySet:
        """Filter alerts that could not be sent several times in a row, and are tried again."""
        return self.filter(tries__gte=Alert.MANY, due_at__gte=now_plus(-FORGOTTEN))


class Alert(models.Model):
    """A problem, for one target of ``OPTIONS["alerts"]``.

    The next time that the same check finds the same subject, it is the same row.

    target: the name of the target.
    check_name, subject: the check that finds it, and what it is about, such as the queue.
    severity: "warning" or "critical".
    what, why, remedy: the finding, its effect, and what to do.
    opened_at, ended_at: when it began, and when it ended; None while it lasts.
    sent_at: when it was last sent; None if it was not.
    tries, error: the number of failed tries in a row, and the last error.
    """

    # Number of failed tries from which an alert counts as undelivered.
    MANY = 3

    target = IdentifierField(max_length=100)
    check_name = IdentifierField(max_length=50)
    subject = IdentifierField(max_length=255)
    severity = models.CharField(max_length=10)
    what = models.TextField()
    why = models.TextField()
    remedy = models.TextField()
    # Whether it is of an event, which is sent once, and is never over.
    is_event = models.BooleanField(default=False)
    opened_at = models.DateTimeField(db_default=Now())
    found_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)
    # When it is to be sent next; None if nothing is to be sent.
    due_at = models.DateTimeField(null=True)
    # Until when a process is sending it.
    sending_until = models.DateTimeField(null=True)
    sent_at = models.DateTimeField(null=True)
    # Tries in a row to send it.
    tries = models.PositiveIntegerField(default=0)
    error = models.TextField()

    objects = AlertQuerySet.as_manager()

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["target", "check_name", "subject"], name="dbqueue_alert_unique"
            )
        ]

    def __str__(self) -> str:
        return f"{self.check_name} {self.subject}".strip()

    @property
    def is_sent(self) -> bool:
        """Whether the problem was sent since it began."""
        return self.sent_at is not None and self.sent_at >= self.opened_at

    @property
    def is_over(self) -> bool:
        """Whether the problem has ended."""
        return self.ended_at is not None
