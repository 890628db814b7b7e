from __future__ import annotations

from datetime import timedelta
from typing import cast

from django.contrib import admin
from django.db.models import QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext_lazy as _

from ..models import Execution, Job, TaskState
from ..models.expressions import Now
from ..models.job import JobQuerySet
from . import columns, formatting, progress, sources
from .actions import (
    DISCARD,
    MOVE,
    REPRIORITISE,
    RESCHEDULE,
    RETRY,
    RUN_JOB_NOW,
    STOP,
    STOP_AND_RETRY,
)
from .attempts import attempts_of, stack_of
from .base import Fields, Rows, Text
from .base_actions import ActionAdmin
from .config import options
from .filters import (
    AttemptsFilter,
    BatchFilter,
    FailureFilter,
    LimitFilter,
    ProcessFilter,
    QueueFilter,
    SourceFilter,
    StateFilter,
    TaskFilter,
)
from .limits import limits_of
from .redaction import call_without_secrets, without_secrets
from .search import search
from .stages import children_of, stages_of
from .tasks import enqueue_address
from .why_waiting import why_waiting

TIMES = (
    columns.time("enqueued_at", _("enqueued")),
    columns.time("run_after", _("run after")),
    columns.time("expires_at", _("expires")),
    columns.time("started_at", _("last started")),
    columns.time("finished_at", _("finished")),
)


@admin.register(Job)
class JobAdmin(ActionAdmin):
    actions = (
        RETRY,
        RUN_JOB_NOW,
        STOP,
        STOP_AND_RETRY,
        REPRIORITISE,
        RESCHEDULE,
        MOVE,
        DISCARD,
    )
    list_display = (
        columns.task_and_id,
        progress.state_and_progress,
        columns.last_error,
        columns.queue_and_priority,
        "attempt",
        columns.enqueued_and_last_run,
    )
    list_filter = (
        StateFilter,
        QueueFilter,
        TaskFilter,
        AttemptsFilter,
        SourceFilter,
        FailureFilter,
        ProcessFilter,
        BatchFilter,
        LimitFilter,
    )
    ordering = ("-pk",)
    search_fields = ("pk",)
    search_help_text = _(
        "Id or a part of it, name of a task, queue:name, key:text, or a value in the arguments or "
        "the metadata, such as customer:17."
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        rows: QuerySet[Job] = super().get_queryset(request)
        return rows.select_related("process", "progress", "batch").annotate(seen_at=Now())

    def list_queryset(self, rows: QuerySet[Job]) -> QuerySet[Job]:
        last = Execution.objects.last_of_each()
        rows = rows.select_related(None).select_related("progress").defer(*columns.NOT_LISTED)
        return rows.annotate(
            error=Subquery(last.values("error_type")),
            error_message=Subquery(last.values("message")),
        )

    def get_fieldsets(self, request: HttpRequest, obj: Job | None = None) -> Fields:
        if obj is None:
            return ()
        fields = _fields(obj, with_batch=request.user.has_perm("dbqueue.view_batch"))
        return ((None, {"fields": fields}),)

    def get_search_results(self, request: HttpRequest, rows: Rows, text: str) -> tuple[Rows, bool]:
        found = search(cast(JobQuerySet, rows), text.strip())
        request.searched = found.said  # type: ignore[attr-defined]
        return found.jobs, False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        response = super().changelist_view(request, extra_context)
        if isinstance(response, TemplateResponse) and response.context_data is not None:
            response.context_data["searched"] = getattr(request, "searched", "")
        return response

    def page_context(self, request: HttpRequest, row: Job) -> dict[str, object]:
        TaskState.objects.ensure_rows([row.task])
        stack, attempts = stack_of(row), attempts_of(row)
        return {
            **super().page_context(request, row),
            "why": why_waiting(row),
            "progress": progress.summary(row),
            "stack": stack,
            "stack_taken": stack and formatting.ago(stack.taken_at),
            "attempts": attempts,
            "stages": stages_of(row, attempts),
            "children": children_of(row),
            "limits": limits_of(row, linked=request.user.has_perm("dbqueue.view_semaphore")),
            "data": _data(row),
            "run_again_address": enqueue_address(request, row.task, row),
            "may_view_failures": request.user.has_perm("dbqueue.view_failure"),
        }


def _fields(job: Job, with_batch: bool) -> Fields:
    """Return the rows of fields, without fields that the job does not have."""
    batch = [columns.linked_batch] if with_batch and job.batch else []
    key = [columns.key, *["version"] * (job.version is not None)] if job.key else []
    # Without an explicit run_after, a job may run as soon as it is enqueued.
    at_once = abs(job.run_after - job.enqueued_at) <= timedelta(seconds=1)
    times = [
        each
        for each in TIMES
        if getattr(job, each.__name__) and not (at_once and each.__name__ == "run_after")
    ]
    rows = (
        [columns.state, columns.attempts, *[columns.owner] * (job.process_id is not None)],
        [columns.linked_task, columns.linked_queue, "priority"],
        [*batch, *key],
        times[:3],
        times[3:],
        [
            *["max_attempts"] * (job.max_attempts > 0),
            *[columns.timeout] * (job.timeout is not None),
            "on_lost",
        ],
        [
            *[sources.enqueued_by] * bool(job.source),
            *[sources.enqueued_jobs] * (options().note_source and job.started_at is not None),
        ],
    )
    return tuple(tuple(row) for row in rows if row)


def _data(job: Job) -> list[tuple[Text, str]]:
    """Return the arguments, the result and the metadata of a job, without empty ones."""
    args, kwargs = call_without_secrets(job)
    named = (
        (_("arguments"), args),
        (_("keyword arguments"), kwargs),
        (_("result"), without_secrets(job.result)),
        (_("metadata"), without_secrets(job.metadata)),
        (_("options of the call"), job.options),
    )
    return [
        (name, formatting.json_text(value)) for name, value in named if value not in (None, [], {})
    ]
