from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..models import Job, Process
from . import columns, formatting
from .base import ReadingAdmin


@admin.display(description=_("name"))
def name(process: Process) -> str:
    """Return the name, which contains the kind, the host and the pid."""
    return formatting.process(process.name)


@admin.display(description=_("running jobs"))
def running(process: Any) -> Any:
    if not process.running:
        return 0
    address = reverse("admin:dbqueue_job_changelist")
    return format_html('<a href="{}?process={}">{}</a>', address, process.pk, process.running)


@admin.display(description=_("supervisor"))
def supervisor(process: Process) -> str:
    return columns.linked_process(process.supervisor) if process.supervisor else "–"


@admin.display(description=_("details"))
def details(process: Process) -> str:
    return formatting.pretty(process.details)


@admin.register(Process)
class ProcessAdmin(ReadingAdmin):
    hint = _(
        "What runs the jobs. A process that is silent for too long is taken for dead, and its jobs are recovered."
    )
    list_display = (
        name,
        columns.alive,
        columns.heartbeat,
        running,
        columns.age("started_at", _("started")),
    )
    list_filter = (("kind", admin.ChoicesFieldListFilter),)
    ordering = ("hostname", "kind", "pk")
    fieldsets: ClassVar[Any] = (
        (
            None,
            {
                "fields": (
                    (columns.alive, columns.heartbeat, columns.time("started_at", _("started"))),
                    ("name", "kind", supervisor),
                    ("hostname", "pid", running),
                    details,
                )
            },
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Process]:
        rows: Any = super().get_queryset(request)
        return rows.select_related("supervisor").seen()  # type: ignore[no-any-return]

    def completed(self, rows: list[Any]) -> list[Any]:
        numbers = Job.objects.count_running()
        for process in rows:
            process.running = numbers.get(process.pk, 0)
        return rows

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Process | None:
        found = super().get_object(request, object_id, from_field)
        return self.completed([found])[0] if found else None
