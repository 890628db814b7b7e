from __future__ import annotations

import json
from datetime import timedelta
from typing import Protocol, cast

from django.contrib import admin
from django.db.models import Case, F, QuerySet, Subquery, TextField, When
from django.db.models.functions import Cast, Length
from django.db.models.lookups import LessThanOrEqual
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.text import Truncator
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import Execution, Job, TaskState
from ..models.expressions import Now
from ..models.job import JobQuerySet
from . import columns, formatting, progress, rates, sources
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
from .attempts import attempts_of, stack_of, timeline_of
from .base import Fields, Rows, Text
from .base_actions import ActionAdmin
from .charts import sparkline
from .config import options
from .filters import (
    AttemptsFilter,
    BatchFilter,
    BeforeFilter,
    EndFilter,
    ErrorFilter,
    FailureFilter,
    LimitFilter,
    ProcessFilter,
    QueueFilter,
    ReleaseFilter,
    SourceFilter,
    StateFilter,
    TaskFilter,
    TimeFilter,
    WorkerFilter,
    window_of,
)
from .limits import limits_of
from .overview import bars_of
from .redaction import (
    HIDDEN,
    arguments_text,
    call_without_secrets,
    named_arguments,
    without_secrets,
)
from .search import PREFIXES, search
from .sessions import sessions_of
from .spans import USUAL, Axis
from .stages import children_of, stages_of
from .tasks import enqueue_address
from .why_waiting import why_waiting
from .windows import Window, is_unbounded

TIMES = (
    columns.time("enqueued_at", _("enqueued")),
    columns.time("run_after", _("run after")),
    columns.time("expires_at", _("expires")),
    columns.time("started_at", _("last started")),
    columns.time("finished_at", _("finished")),
)


# Longer arguments are not read for the list; shown are the first characters.
LONGEST_READ, LONGEST_SHOWN = 2000, 80
# Number of earlier jobs with the same arguments on the page of a job.
MOST_EARLIER = 5


class ListedJob(Protocol):
    """A job with its arguments, if these are short."""

    pk: object
    task: str
    short_args: object
    short_kwargs: object


@admin.display(description=_("job"))
def job_and_arguments(job: ListedJob) -> str:
    """Return task, id, key, and the redacted arguments."""
    named = columns.task_and_id(cast(Job, job))
    if job.short_args is None or job.short_kwargs is None:
        return format_html("{}<br>{}", named, formatting.quiet(gettext("long arguments")))
    text = arguments_text(Job(task=job.task, args=job.short_args, kwargs=job.short_kwargs))
    if not text:
        return named
    shown = Truncator(text).chars(LONGEST_SHOWN)
    return format_html('{}<br><span class="dbq-quiet dbq-args" dir="ltr">{}</span>', named, shown)


def _if_short(name: str) -> Case:
    """Return the value of a document; None if it is long."""
    length = Length(Cast(name, TextField()))
    return Case(When(LessThanOrEqual(length, LONGEST_READ), then=F(name)), default=None)


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
        job_and_arguments,
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
        TimeFilter,
        EndFilter,
        AttemptsFilter,
        ErrorFilter,
        WorkerFilter,
        ReleaseFilter,
        SourceFilter,
        BeforeFilter,
        FailureFilter,
        ProcessFilter,
        BatchFilter,
        LimitFilter,
    )
    ordering = ("-pk",)
    search_fields = ("pk",)
    hint = _(
        "Search for an id or a part of it, the name of a task, queue:name, key:text, or a value in "
        "the arguments or the metadata, such as customer:17."
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
            short_args=_if_short("args"),
            short_kwargs=_if_short("kwargs"),
        )

    def get_fieldsets(self, request: HttpRequest, obj: Job | None = None) -> Fields:
        if obj is None:
            return ()
        fields = _fields(obj, with_batch=request.user.has_perm("dbqueue.view_batch"))
        return ((None, {"fields": fields}),)

    def get_search_results(self, request: HttpRequest, rows: Rows, text: str) -> tuple[Rows, bool]:
        window = window_of(request)
        jobs, said, is_windowed = search(cast(JobQuerySet, rows), text.strip(), window)
        if is_windowed is None and (is_windowed := is_unbounded(request)):
            jobs = window.within(jobs)
        shown = (said, window.text(request) if is_windowed else "")
        request.searched = shown  # type: ignore[attr-defined]
        return jobs, False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        response = super().changelist_view(request, extra_context)
        if isinstance(response, TemplateResponse) and response.context_data is not None:
            response.context_data["searched"] = getattr(request, "searched", ())
        return response

    def page_context(self, request: HttpRequest, row: Job) -> dict[str, object]:
        TaskState.objects.ensure_rows([row.task])
        stack, attempts = stack_of(row), attempts_of(row)
        return {
            **super().page_context(request, row),
            "why": why_waiting(row),
            "progress": progress.summary(row),
            "stack": stack and formatting.copyable_text(gettext("Stack trace"), stack.text),
            "sessions": sessions_of(stack),
            "stack_taken": stack and formatting.ago(stack.taken_at),
            "attempts": attempts,
            "timeline": timeline_of(row, attempts),
            "alike": _alike(row),
            "earlier": _earlier(row),
            "stages": stages_of(row, attempts),
            "children": children_of(row),
            "limits": limits_of(row, linked=request.user.has_perm("dbqueue.view_semaphore")),
            "data": _data(row),
            "run_again_address": enqueue_address(request, row.task, row),
            "may_view_failures": request.user.has_perm("dbqueue.view_failure"),
        }


@admin.display(description=_("task, last 24 hours"))
def task_history(job: Job) -> str:
    """Return the attempts of the job's task by hour, their number, and how many failed."""
    axis = Axis.until_now(USUAL)
    of = bars_of(axis, axis.counts(job.task))
    total = rates.merged(of)
    if not total.runs:
        return "–"
    chart = sparkline(gettext("attempts"), [each.runs for each in of], "runs")
    said = gettext("%(attempts)s (%(failures)d failed)")
    number = number_format(total.runs, force_grouping=True)
    return format_html("{} {}", chart, said % {"attempts": number, "failures": total.failures})


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
        [columns.full_id, task_history],
        [columns.state, columns.attempts, *[columns.owner] * (job.process_id is not None)],
        [columns.linked_task, columns.linked_queue, columns.priority],
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
        (name, formatting.copyable(name, formatting.json_text(value)))
        for name, value in named
        if value not in (None, [], {})
    ]


def _earlier(job: Job) -> list[dict[str, str]]:
    """Return the last jobs before this one of the same task with the same arguments."""
    call = job.args, job.kwargs
    # Whether another job has the same hidden value must not show either.
    if call_without_secrets(job) != call or not (
        isinstance(job.args, list) and isinstance(job.kwargs, dict)
    ):
        return []
    before = Job.objects.filter(pk__lt=job.pk, task=job.task, args=job.args, kwargs=job.kwargs)
    rows = Window(job.pk).within(before).defer(*columns.NOT_LISTED)
    try:
        found = list(rows.annotate(seen_at=Now()).order_by("-pk")[:MOST_EARLIER])
    except RecursionError:  # A row inserted by hand may be nested as deep as the database takes.
        return []
    return [
        {
            "job": columns.linked_job(each),
            "state": columns.state(each),
            "times": columns.enqueued_and_last_run(each),
        }
        for each in found
    ]


def _is_text(text: str) -> bool:
    """Return False for text with half of a character, which an address cannot hold."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def _alike(job: Job) -> str:
    """Return links to the jobs with the same value of an argument."""
    named = [
        (name, value)
        for name, value in named_arguments(job).items()
        if isinstance(value, (str, int))
        and value != HIDDEN
        and name.isidentifier()
        and name not in PREFIXES
    ]
    texts = [
        (name, value if isinstance(value, str) else json.dumps(value)) for name, value in named
    ]
    links = (
        (formatting.jobs_link(f"{name}:{text}", q=f"{name}:{text}"),)
        for name, text in texts
        if 0 < len(text) <= LONGEST_SHOWN and text == text.strip() and _is_text(text)
    )
    return format_html_join(" ", "{}", links)
