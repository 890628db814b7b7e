from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.utils import flatten_fieldsets
from django.db.models import Q, QuerySet, Subquery
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..models import Execution, Job, TaskState
from ..models.expressions import Now
from . import columns, formatting, progress
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
from .base import Fields, Text
from .base_actions import ActionAdmin
from .filters import (
    AttemptsFilter,
    BatchFilter,
    FailureFilter,
    LimitFilter,
    ProcessFilter,
    QueueFilter,
    StateFilter,
    TaskFilter,
)
from .limits import limits_of
from .redaction import call_without_secrets, without_secrets
from .stages import children_of, stages_of
from .why_waiting import why_waiting

# Maximum number of tasks to try with a key that is given without a task.
MOST_TASKS = 1000
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
        "queue",
        "attempt",
        columns.age("enqueued_at", _("enqueued")),
        "priority",
    )
    list_filter = (
        StateFilter,
        QueueFilter,
        TaskFilter,
        AttemptsFilter,
        FailureFilter,
        ProcessFilter,
        BatchFilter,
        LimitFilter,
    )
    ordering = ("-pk",)
    search_fields = ("pk",)
    search_help_text = _(
        "Id, name of a task, beginning of its path, queue:name, key:text or key:task text."
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

    def get_readonly_fields(self, request: HttpRequest, obj: Job | None = None) -> Fields:
        return flatten_fieldsets(self.get_fieldsets(request, obj))

    def get_search_results(
        self, request: HttpRequest, rows: QuerySet[Job], text: str
    ) -> tuple[QuerySet[Job], bool]:
        return rows.filter(_matching(text.strip())), False

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
    )
    return tuple(tuple(row) for row in rows if row)


def _matching(text: str) -> Q:
    """Return the filter for a search.

    Each form is one index lookup, or a scan that ends when the list is full.
    """
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
        case "key", ":":
            return _with_key(rest.strip())
    return Q(task__startswith=text) | Q(task__endswith=f".{text}")


def _with_key(text: str) -> Q:
    """Match jobs by key.

    The unique index holds each key after its task, so the lookup tries the key after each known
    task.
    """
    tasks = {*TaskState.objects.order_by("name").values_list("name", flat=True)[:MOST_TASKS]}
    tasks |= Job.objects.recent_keyed_tasks()
    name, _space, rest = text.partition(" ")
    of_any = [f"{task} {text}" for task in tasks]
    of_one = [f"{task} {rest}" for task in tasks if rest and task.endswith(f".{name}")]
    return Q(key__in=[text, *of_any, *of_one])


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
