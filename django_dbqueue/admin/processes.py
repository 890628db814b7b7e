from __future__ import annotations

from typing import Any, ClassVar, Protocol

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..models import Job, Process
from . import columns, formatting
from .base import Fields, ReadOnlyAdmin


class CountedProcess(Protocol):
    """A process with the number of its running jobs."""

    pk: int
    running: int


@admin.display(description=_("name"))
def name(process: Process) -> str:
    """Return the name, which contains the kind, the host and the pid."""
    return formatting.process(process.name)


@admin.display(description=_("running jobs"))
def running(process: CountedProcess) -> str:
    return formatting.job_count(process.running, process=process.pk)


@admin.display(description=_("supervisor"))
def supervisor(process: Process) -> str:
    return columns.linked_process(process.supervisor) if process.supervisor else "–"


@admin.display(description=_("details"))
def details(process: Process) -> str:
    return formatting.json_text(process.details)


@admin.register(Process)
class ProcessAdmin(ReadOnlyAdmin):
    hint = _(
        "Workers, dispatchers and supervisors. "
        "A process without a heartbeat is declared dead, and its jobs are recovered."
    )
    list_display = (
        name,
        columns.alive,
        columns.heartbeat,
        running,
        "release",
        columns.age("started_at", _("started")),
    )
    list_filter = (("kind", admin.ChoicesFieldListFilter),)
    ordering = ("hostname", "kind", "pk")
    fieldsets: ClassVar[Fields] = (
        (
            None,
            {
                "fields": (
                    (columns.alive, columns.heartbeat, columns.time("started_at", _("started"))),
                    ("name", "kind", supervisor),
                    ("hostname", "pid", "release", running),
                    details,
                )
            },
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Process]:
        rows: Any = super().get_queryset(request)
        return rows.select_related("supervisor").seen()  # type: ignore[no-any-return]

    def with_details(
        self, request: HttpRequest, rows: list[CountedProcess]
    ) -> list[CountedProcess]:
        numbers = Job.objects.count_running()
        for process in rows:
            process.running = numbers.get(process.pk, 0)
        return rows
