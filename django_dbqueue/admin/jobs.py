from __future__ import annotations

from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin
from django.db.models import Q, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _

from ..models import Execution, Job
from ..models.expressions import Now
from . import columns, looks
from .attempts import attempts_of, stack_of
from .filters import FailureFilter, JobStateFilter, ProcessFilter, QueueFilter, TaskFilter
from .operating import OperatingAdmin
from .secrets import arguments_without_secrets, without_secrets
from .verbs import DISCARD, RETRY, STOP
from .waiting import why_waiting


@admin.register(Job)
class JobAdmin(OperatingAdmin):
    verbs = (RETRY, STOP, DISCARD)
    actions = ("retry", "stop", "discard")
    list_display = (
        columns.task_and_id,
        columns.state,
        columns.last_error,
        "queue",
        "attempt",
        columns.enqueued,
        columns.run_after,
        "priority",
    )
    list_filter = (JobStateFilter, QueueFilter, TaskFilter, FailureFilter, ProcessFilter)
    ordering = ("-pk",)
    search_fields = ("pk",)
    search_help_text = _("An id, a task by its name or the beginning of its path, or queue:name.")
    fieldsets: ClassVar[Any] = (
        (
            None,
            {
                "fields": (
                    (columns.state, columns.attempts, columns.owner),
                    ("task", columns.linked_queue, "priority"),
                    (columns.time("enqueued_at", _("enqueued")), columns.time("run_after", _("run after"))),
                    (columns.time("started_at", _("last started")), columns.time("finished_at", _("finished"))),
                    ("max_attempts", columns.timeout, "on_lost"),
                )
            },
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        rows: QuerySet[Job] = super().get_queryset(request)
        return rows.select_related("process").annotate(seen_at=Now())

    def listed(self, rows: QuerySet[Job]) -> QuerySet[Job]:
        last = Execution.objects.last_of_each()
        rows = rows.select_related(None).defer("args", "kwargs", "result", "metadata")
        return rows.annotate(error=Subquery(last.values("error_type")), said=Subquery(last.values("message")))

    def get_search_results(self, request: HttpRequest, rows: QuerySet[Job], text: str) -> tuple[QuerySet[Job], bool]:
        return rows.filter(_asked(text.strip())), False

    def beside(self, request: HttpRequest, one: Job) -> dict[str, Any]:
        may = request.user.has_perm("dbqueue.view_failure")
        stack = stack_of(one)
        shown = {
            "why": why_waiting(one),
            "stack": stack,
            "stack_seen": stack and looks.ago(stack.taken_at),
            "attempts": attempts_of(one),
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

    @admin.action(description=_("Discard selected jobs"), permissions=["discard"])
    def discard(self, request: HttpRequest, rows: QuerySet[Job]) -> HttpResponse | None:
        return self.carry_out(request, rows, DISCARD)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.retry_job")

    def has_stop_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.stop_job")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.discard_job")


def _data(job: Job) -> list[tuple[Any, str]]:
    """What it was given and what it gave, as far as there is anything."""
    named = (
        (_("arguments"), arguments_without_secrets(job)),
        (_("keyword arguments"), without_secrets(job.kwargs)),
        (_("result"), without_secrets(job.result)),
        (_("metadata"), without_secrets(job.metadata)),
    )
    return [(name, looks.pretty(value)) for name, value in named if value not in (None, [], {})]


def _asked(text: str) -> Q:
    if not text:
        return Q()
    try:
        return Q(pk=UUID(text))
    except ValueError:
        prefix, colon, rest = text.partition(":")
    match prefix, colon:
        case "queue", ":":
            return Q(queue=rest)
        case "task", ":":
            return Q(task__startswith=rest)
    return Q(task__startswith=text) | Q(task__endswith=f".{text}")
