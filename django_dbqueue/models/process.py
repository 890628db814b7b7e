from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from .expressions import Now, after


class ProcessQuerySet(models.QuerySet["Process"]):
    def beat(self) -> bool:
        """Say that they are alive. False if somebody has declared them dead: then they own nothing any more."""
        return bool(self.update(heartbeat_at=Now()))

    def silent(self, seconds: float) -> ProcessQuerySet:
        """Those that have not said for that long that they are alive."""
        return self.filter(heartbeat_at__lt=after(timedelta(seconds=-seconds)))

    def seen(self) -> ProcessQuerySet:
        """With the database's time in ``seen_at``, to tell how long ago they beat."""
        return self.annotate(seen_at=Now())

    def alive(self, seconds: float) -> ProcessQuerySet:
        return self.filter(heartbeat_at__gte=after(timedelta(seconds=-seconds)))


class Process(models.Model):
    """A running role: it beats as long as it lives, and the jobs that it runs are its own for that long."""

    class Kind(models.TextChoices):
        SUPERVISOR = "supervisor", _("Supervisor")
        WORKER = "worker", _("Worker")
        DISPATCHER = "dispatcher", _("Dispatcher")

    name = models.CharField(_("name"), max_length=200, unique=True)
    kind = models.CharField(_("kind"), max_length=20, choices=Kind.choices)
    hostname = models.CharField(_("host"), max_length=150)
    pid = models.PositiveIntegerField(_("process id"))
    supervisor = models.ForeignKey(
        "self",
        verbose_name=_("supervisor"),
        null=True,
        blank=True,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="children",
    )
    details = models.JSONField(_("details"), default=dict)
    started_at = models.DateTimeField(_("started at"), db_default=Now())
    heartbeat_at = models.DateTimeField(_("last heartbeat"), db_default=Now())

    objects = ProcessQuerySet.as_manager()

    class Meta:
        verbose_name = _("process")
        verbose_name_plural = _("processes")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Process {self.name}>"

    @property
    def log_fields(self) -> dict[str, Any]:
        """What a line of the log about it says to machines."""
        return {"process_name": self.name}

    def silence(self, now: datetime) -> timedelta:
        """How long it has not said that it is alive, by the database's time."""
        return max(now - self.heartbeat_at, timedelta())
