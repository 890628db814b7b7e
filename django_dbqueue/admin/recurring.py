from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Protocol

from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.db.models import Model, OuterRef, Subquery
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.chosen_backend import chosen_backend
from ..doctor.queue import LATE
from ..exceptions import InvalidSchedule, InvalidTaskPath
from ..models import Job, RecurringExecution, RecurringTask
from ..registry import discover
from . import columns, formatting
from .actions import DISABLE, ENABLE, RUN_NOW
from .backend_choice import with_alias
from .base import Fields, Rows
from .base_actions import Action, ActionAdmin
from .calendar import Calendar
from .config import options
from .filters import CalendarFilter
from .recurring_form import RecurringTaskForm
from .redaction import call_without_secrets

MOST_RUNS = 20
NEXT_TIMES = 5
# The number of last runs in the list.
MOST_ICONS = 8


class WithLastJob(Protocol):
    """A recurring task with the job of its last run."""

    pk: int
    is_enabled: bool
    next_run_at: datetime | None
    last_run_at: datetime | None
    last_job: Job | None
    last_jobs: list[Job | None]


@admin.display(description=gettext_lazy("task or command"))
def target(row: RecurringTask) -> str:
    return formatting.last_part(row.task) if row.task else format_html("manage.py {}", row.command)


@admin.display(description=gettext_lazy("schedule"))
def schedule(row: RecurringTask) -> str:
    exact = row.cron or str(row.every)
    return format_html('<span title="{}">{}</span>', exact, formatting.schedule(row))


@admin.display(description=gettext_lazy("state"))
def state(row: RecurringTask) -> str:
    if row.problem:
        return formatting.badge(_("Not enqueued"), "✕", "bad")
    if not row.is_enabled:
        return formatting.badge(_("Disabled"), "‖", "waits")
    return formatting.badge(_("Enabled"), "▸", "good")


@admin.display(description=gettext_lazy("state"))
def state_and_problem(row: RecurringTask) -> str:
    if not row.problem:
        return state(row)
    return format_html(
        '{}<br><span class="dbq-quiet dbq-problem">{}</span>',
        state(row),
        Truncator(row.problem).chars(100),
    )


@admin.display(description=gettext_lazy("defined in"))
def origin(row: RecurringTask) -> str:
    return _("code") if row.is_from_code else _("admin")


@admin.display(description=gettext_lazy("next run"))
def next_run(row: RecurringTask) -> str:
    if row.is_enabled and row.next_run_at is None and row.waits_for:
        return _("after the last run has ended")
    text = formatting.ago(row.next_run_at)
    late = timezone.now() - timedelta(seconds=LATE["recurring"])
    if not row.is_enabled or row.next_run_at is None or row.next_run_at > late:
        return text
    return format_html("{} {}", text, formatting.badge(_("Overdue"), "✕", "bad"))


@admin.display(description=gettext_lazy("last run"))
def last_run(row: WithLastJob) -> str:
    if row.last_run_at is None:
        return "–"
    return format_html("{} {}", formatting.ago(row.last_run_at), _job(row.last_job))


@admin.display(description=gettext_lazy("last runs"))
def last_runs(row: WithLastJob) -> str:
    """Return the states of the last jobs as icons, the newest first."""
    icons = (
        (formatting.link("job", job.pk, formatting.icon(job.get_state_display(), job.state)),)
        if job
        else (formatting.quiet(format_html('<span title="{}">·</span>', _("job deleted"))),)
        for job in row.last_jobs
    )
    return format_html_join(" ", "{}", icons) or "–"


def _job(job: Job | None) -> str:
    """Return the state of a job, linked to the job."""
    if job is None:
        return formatting.quiet(_("job deleted"))
    return formatting.link("job", job.pk, columns.state(job))


@admin.display(description=gettext_lazy("arguments"))
def arguments(row: RecurringTask) -> str:
    """Return the arguments for users with read-only access."""
    given = [(formatting.json_text(each),) for each in call_without_secrets(row) if each]
    return format_html_join("", "{}", given) or "–"


@admin.register(RecurringTask)
class RecurringTaskAdmin(ActionAdmin):
    hint = gettext_lazy(
        "Tasks and commands on a schedule. Those that are defined in code are changed only there."
    )
    actions = (RUN_NOW, ENABLE, DISABLE)
    form = RecurringTaskForm
    list_display = (
        *("name", target, schedule, state_and_problem),
        *(next_run, last_run, last_runs, origin),
    )
    list_filter = ("is_enabled", "is_from_code", CalendarFilter)
    ordering = ("name",)
    search_fields = ("name", "task", "command")
    status_fields = ((state, origin), (schedule, next_run, last_run))
    schedule_fieldsets = (
        (
            gettext_lazy("Schedule"),
            {"fields": (("cron", "timezone"), ("every", "drift"), ("starts_at", "ends_at"))},
        ),
        (gettext_lazy("Missed runs and jitter"), {"fields": (("missed", "most_missed"), "jitter")}),
    )

    def get_fieldsets(self, request: HttpRequest, obj: RecurringTask | None = None) -> Fields:
        may_change = obj is None or self.has_change_permission(request, obj)
        args = ("args", "kwargs") if may_change else arguments
        is_given = not may_change and obj is not None and obj.priority is not None
        priority = columns.priority if is_given else "priority"
        fields = ("name", ("task", "command"), args, ("queue", priority))
        fieldsets: list[Fields] = [(_("Task"), {"fields": fields}), *self.schedule_fieldsets]
        if obj:
            fieldsets = [(None, {"fields": self.status_fields}), *fieldsets]
        if obj is None or may_change:
            return fieldsets
        return [(name, {"fields": _given(obj, each["fields"])}) for name, each in fieldsets]

    def get_readonly_fields(self, request: HttpRequest, obj: RecurringTask | None = None) -> Fields:
        status = [state, origin, schedule, next_run, last_run]
        if obj is None or self.has_change_permission(request, obj):
            return status
        return [*status, arguments, columns.priority, *RecurringTaskForm.Meta.fields]

    def with_details(self, request: HttpRequest, rows: list[WithLastJob]) -> list[WithLastJob]:
        newest = RecurringExecution.objects.filter(task=OuterRef("pk")).order_by("-run_at")
        found = RecurringTask.objects.filter(pk__in=[row.pk for row in rows])
        places = (
            (
                Subquery(newest.values("pk")[place : place + 1]),
                Subquery(newest.values("job")[place : place + 1]),
            )
            for place in range(MOST_ICONS)
        )
        ids = {pk: of for pk, *of in found.values_list("pk", *chain.from_iterable(places))}
        wanted = {pk for of in ids.values() for pk in of[1::2] if pk}
        jobs = Job.objects.defer(*columns.NOT_LISTED).in_bulk(list(wanted))
        for row in rows:
            of = ids.get(row.pk, [])
            runs = zip(of[::2], of[1::2], strict=True)
            row.last_jobs = [jobs.get(job) for execution, job in runs if execution]
            row.last_job = row.last_jobs[0] if row.last_jobs else None
        return rows

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        response = super().changelist_view(request, extra_context)
        # Without a list, it is the question before an action.
        context = getattr(response, "context_data", None)
        if context and "cl" in context:
            rows = context["cl"].result_list
            days = 7 if request.GET.get(CalendarFilter.parameter_name) == "7" else 1
            calendar = Calendar.of(rows, days)
            context["calendar"] = calendar.draw() if calendar.lines else ""
        return response

    def page_context(self, request: HttpRequest, row: RecurringTask) -> dict[str, object]:
        return {
            **super().page_context(request, row),
            "times": _times(row),
            "runs": _runs(row),
            "problem": row.problem,
        }

    def save_model(
        self, request: HttpRequest, obj: RecurringTask, form: RecurringTaskForm, change: bool
    ) -> None:
        obj.problem = ""
        obj.save(update_fields=[*form.changed_data, "problem"] if change else None)
        times = [(formatting.timestamp(time),) for time in obj.next_times(NEXT_TIMES)]
        text = format_html(_("Next runs: {}."), format_html_join(", ", "{}", times))
        self.message_user(request, text, messages.INFO)

    def construct_change_message(
        self, request: HttpRequest, form: Any, formsets: Any, add: bool = False
    ) -> Any:
        """Name the backend, if there is a choice: all databases share the history of an id."""
        changes = super().construct_change_message(request, form, formsets, add)
        if not chosen_backend.get():
            return changes
        return with_alias(LogEntry(change_message=json.dumps(changes)).get_change_message())

    def run_action(
        self, request: HttpRequest, rows: Rows, action: Action, one: Model | None = None
    ) -> HttpResponse | None:
        discover(options().task_modules)
        try:
            return super().run_action(request, rows, action, one)
        except (InvalidSchedule, InvalidTaskPath) as error:
            self.message_user(request, str(error), messages.ERROR)
            return None

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.add_recurringtask")

    def has_change_permission(self, request: HttpRequest, obj: RecurringTask | None = None) -> bool:
        return request.user.has_perm("dbqueue.change_recurringtask") and not (
            obj and obj.is_from_code
        )

    def has_delete_permission(self, request: HttpRequest, obj: RecurringTask | None = None) -> bool:
        """Allow deletion on a row's own page only.

        A selection may contain rows from code, which a dispatcher would insert again.
        """
        return (
            obj is not None
            and not obj.is_from_code
            and request.user.has_perm("dbqueue.delete_recurringtask")
        )


def _given(row: RecurringTask, fields: Fields) -> Fields:
    """Return the fields that are not empty in the row, for users with read-only access."""
    lines = [
        [name for name in (line if isinstance(line, tuple) else (line,)) if _is_given(row, name)]
        for line in fields
    ]
    return [tuple(line) for line in lines if line]


def _is_given(row: RecurringTask, field: str | Callable[..., str]) -> bool:
    if callable(field):
        return True
    value = getattr(row, field)
    # Not ``value in (False, …)``: a priority of 0 is given.
    return not (value is None or value is False or value in ("", timedelta()))


def _times(row: RecurringTask) -> list[str]:
    try:
        return [
            format_html("{} ({})", formatting.timestamp(time), formatting.ago(time))
            for time in row.next_times(NEXT_TIMES)
        ]
    except (InvalidSchedule, OverflowError) as error:
        return [str(error)]


def _runs(row: RecurringTask) -> list[dict[str, object]]:
    """Return the newest runs."""
    found = RecurringExecution.objects.filter(task=row).order_by("-run_at")
    executions = list(found[:MOST_RUNS])
    jobs = Job.objects.defer(*columns.NOT_LISTED).in_bulk([each.job for each in executions])
    return [_run(each.run_at, each.enqueued_at, jobs.get(each.job)) for each in executions]


def _run(planned: datetime, enqueued: datetime, job: Job | None) -> dict[str, object]:
    return {
        "planned": formatting.timestamp(planned),
        "enqueued": formatting.ago(enqueued),
        "job": _job(job),
    }
