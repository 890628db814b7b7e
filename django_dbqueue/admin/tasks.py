from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import Job, TaskState
from . import columns
from .base_actions import OperatingAdmin
from .queue_actions import PAUSE, PAUSE_FOR, RESUME


@admin.display(description=gettext_lazy("jobs"))
def jobs(task: TaskState) -> str:
    query = urlencode({"task": task.name})
    return format_html(
        '<a href="{}?{}">{}</a>', reverse("admin:dbqueue_job_changelist"), query, _("Its jobs")
    )


@admin.register(TaskState)
class TaskStateAdmin(OperatingAdmin):
    hint = gettext_lazy(
        "The tasks of the newest jobs, and those that were paused. Workers take no jobs of a task that is paused."
    )
    verbs = (PAUSE, PAUSE_FOR, RESUME)
    actions = ("pause", "pause_for", "resume")
    list_display = ("name", columns.paused, jobs)
    ordering = ("name",)
    search_fields = ("name",)
    fieldsets: ClassVar[Any] = ((None, {"fields": (("name", columns.paused, jobs),)}),)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if self.has_view_permission(request):
            TaskState.objects.know(Job.objects.recent_tasks())
        return super().changelist_view(request, extra_context)

    def get_queryset(self, request: HttpRequest) -> QuerySet[TaskState]:
        rows: Any = super().get_queryset(request)
        return rows.seen()  # type: ignore[no-any-return]

    @admin.action(description=gettext_lazy("Pause selected tasks"), permissions=["pause"])
    def pause(self, request: HttpRequest, rows: QuerySet[TaskState]) -> HttpResponse | None:
        return self.carry_out(request, rows, PAUSE)

    @admin.action(
        description=gettext_lazy("Pause selected tasks for a while"), permissions=["pause"]
    )
    def pause_for(self, request: HttpRequest, rows: QuerySet[TaskState]) -> HttpResponse | None:
        return self.carry_out(request, rows, PAUSE_FOR)

    @admin.action(description=gettext_lazy("Resume selected tasks"), permissions=["pause"])
    def resume(self, request: HttpRequest, rows: QuerySet[TaskState]) -> HttpResponse | None:
        return self.carry_out(request, rows, RESUME)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("dbqueue.view_job")

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.pause_queue")
