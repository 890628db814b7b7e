from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import Job, TaskState
from . import columns, formatting
from .actions import PAUSE, PAUSE_FOR, RESUME
from .base import Fields
from .queues import PausableAdmin


@admin.display(description=gettext_lazy("jobs"))
def jobs(task: TaskState) -> str:
    return formatting.jobs_link(_("View jobs"), task=task.name)


@admin.register(TaskState)
class TaskStateAdmin(PausableAdmin):
    hint = gettext_lazy(
        "Tasks of the newest jobs, and tasks that were paused. "
        "Workers claim no jobs of a paused task."
    )
    actions = (PAUSE, PAUSE_FOR, RESUME)
    list_display = ("name", columns.paused, jobs)
    fieldsets: ClassVar[Fields] = ((None, {"fields": (("name", columns.paused, jobs),)}),)

    def names(self) -> Iterable[str]:
        return Job.objects.recent_tasks()

    def has_view_permission(self, request: HttpRequest, obj: TaskState | None = None) -> bool:
        return request.user.has_perm("dbqueue.view_job")
