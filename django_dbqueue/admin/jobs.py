from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets
from django.db.models import QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _

from ..models import Execution, Job, TaskState
from ..models.expressions import Now
from . import columns, formatting, progress
from .actions import DISCARD, REPRIORITISE, RETRY, STOP
from .attempts import attempts_of, stack_of
from .base_actions import OperatingAdmin
from .filters import (
    BatchFilter,
    FailureFilter,
    JobStateFilter,
    LimitFilter,
    ProcessFilter,
    QueueFilter,
    TaskFilter,
)
from .job_fields import fields_of
from .limit_text import limits_of
from .queue_actions import MOVE
from .redaction import call_without_secrets, without_secrets
from .search import asked
from .stages import children_of, stages_of
from .why_waiting import why_waiting


@admin.register(Job)
class JobAdmin(OperatingAdmin):
    verbs = (RETRY, STOP, REPRIORITISE, MOVE, DISCARD)
    actions = ("retry", "stop", "reprioritise", "move", "discard")
    list_display = (
        columns.task_and_id,
        progress.state_and_progress,
        columns.last_error,
        "queue",
        "attempt",
        columns.enqueued,
        "priority",
    )
    list_filter = (
        JobStateFilter,
        QueueFilter,
        TaskFilter,
        FailureFilter,
        ProcessFilter,
        BatchFilter,
        LimitFilter,
    )
    ordering = ("-pk",)
    search_fields = ("pk",)
    search_help_text = _(
        "An id, a task by its name or the beginning of its path, queue:name, key:text or key:task text."
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        rows: QuerySet[Job] = super().get_queryset(request)
        return rows.select_related("process", "progress", "batch").annotate(seen_at=Now())

    def listed(self, rows: QuerySet[Job]) -> QuerySet[Job]:
        last = Execution.objects.last_of_each()
        rows = rows.select_related(None).select_related("progress").defer(*columns.NOT_LISTED)
        return rows.annotate(
            error=Subquery(last.values("error_type")), said=Subquery(last.values("message"))
        )

    def get_fieldsets(self, request: HttpRequest, obj: Job | None = None) -> Any:
        return (
            ((None, {"fields": fields_of(obj, request.user.has_perm("dbqueue.view_batch"))}),)
            if obj
            else ()
        )

    def get_readonly_fields(self, request: HttpRequest, obj: Job | None = None) -> Any:
        return flatten_fieldsets(self.get_fieldsets(request, obj))

    def get_search_results(
        self, request: HttpRequest, rows: QuerySet[Job], text: str
    ) -> tuple[QuerySet[Job], bool]:
        return rows.filter(asked(text.strip())), False

    def beside(self, request: HttpRequest, one: Job) -> dict[str, Any]:
        TaskState.objects.know([one.task])
        may = request.user.has_perm("dbqueue.view_failure")
        stack, attempts = stack_of(one), attempts_of(one)
        shown = {
            "why": why_waiting(one),
            "progress": progress.described(one),
            "stack": stack,
            "stack_seen": stack and formatting.ago(stack.taken_at),
            "attempts": attempts,
            "stages": stages_of(one, attempts),
            "children": children_of(one),
            "limits": limits_of(one, linked=request.user.has_perm("dbqueue.view_semaphore")),
            "data": _data(one),
            "may_view_failures": may,
        }
        return {**super().beside(request, one), **shown}

    @admin.action(description=_("Retry selected jobs"), permissions=["retry"])
    def retry(self, request: HttpRequest, rows: QuerySet[Job]) -> HttpResponse | None:
        return self.carry_out(request, rows, RETRY)

    @admin.action(description=_("Stop selected jobs"), permissions=["stop"])
    def stop(self, request: HttpRequest, rows: QuerySet[Job]) -> HttpResponse | None:
        return self.carry_out(request, rows, STOP)

    @admin.action(description=_("Move selected jobs to another queue"), permissions=["move"])
    def move(self, request: HttpRequest, rows: QuerySet[Job]) -> HttpResponse | None:
        return self.carry_out(request, rows, MOVE)

    @admin.action(description=_("Set priority of selected jobs"), permissions=["reprioritise"])
    def reprioritise(self, request: HttpRequest, rows: QuerySet[Job]) -> HttpResponse | None:
        return self.carry_out(request, rows, REPRIORITISE)

    @admin.action(description=_("Discard selected jobs"), permissions=["discard"])
    def discard(self, request: HttpRequest, rows: QuerySet[Job]) -> HttpResponse | None:
        return self.carry_out(request, rows, DISCARD)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.retry_job")

    def has_stop_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.stop_job")

    def has_move_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.move_job")

    def has_reprioritise_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.reprioritise_job")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.discard_job")


def _data(job: Job) -> list[tuple[Any, str]]:
    """Return the arguments, the result and the metadata of a job, without empty ones."""
    args, kwargs = call_without_secrets(job)
    named = (
        (_("arguments"), args),
        (_("keyword arguments"), kwargs),
        (_("result"), without_secrets(job.result)),
        (_("metadata"), without_secrets(job.metadata)),
    )
    return [
        (name, formatting.pretty(value)) for name, value in named if value not in (None, [], {})
    ]
