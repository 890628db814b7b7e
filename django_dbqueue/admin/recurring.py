from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.db.models import Model, OuterRef, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..engine.recurring import SCHEDULE
from ..exceptions import InvalidSchedule, InvalidTaskPath
from ..models import Job, RecurringExecution, RecurringTask
from ..registry import discover
from . import columns, formatting
from .actions import DISABLE, ENABLE, RUN_NOW, Verb
from .base_actions import OperatingAdmin
from .config import options
from .recurring_form import HOW, WHAT, WHEN, RecurringTaskForm
from .redaction import call_without_secrets
from .schedule_text import in_words

SHOWN = 20
TIMES = 5


@admin.display(description=gettext_lazy("runs"))
def what(row: RecurringTask) -> str:
    return formatting.short(row.task) if row.task else format_html("manage.py {}", row.command)


@admin.display(description=gettext_lazy("schedule"))
def schedule(row: RecurringTask) -> str:
    return format_html('<span title="{}">{}</span>', row.cron or str(row.every), in_words(row))


@admin.display(description=gettext_lazy("state"))
def state(row: RecurringTask) -> str:
    if row.problem:
        return formatting.badge(_("In trouble"), "✕", "bad")
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


@admin.display(description=gettext_lazy("made"))
def origin(row: RecurringTask) -> str:
    return _("in the code") if row.is_from_code else _("here")


@admin.display(description=gettext_lazy("next run"))
def next_run(row: RecurringTask) -> str:
    if row.next_run_at is None and row.waits_for:
        return _("when its last run has ended")
    return formatting.ago(row.next_run_at)


@admin.display(description=gettext_lazy("last run"))
def last_run(row: Any) -> str:
    if row.last_run_at is None:
        return "–"
    return format_html("{} {}", formatting.ago(row.last_run_at), _job(row.last_job))


def _job(job: Job | None) -> str:
    """Return the state of a job, linked to the job."""
    if job is None:
        return format_html('<span class="dbq-quiet">{}</span>', _("its job is gone"))
    return format_html(
        '<a href="{}">{}</a>',
        reverse("admin:dbqueue_job_change", args=[job.pk]),
        columns.state(job),
    )


@admin.display(description=gettext_lazy("arguments"))
def arguments(row: RecurringTask) -> str:
    """Return the arguments for users with read-only access."""
    return (
        format_html_join(
            "", "{}", ((formatting.pretty(each),) for each in call_without_secrets(row) if each)
        )
        or "–"
    )


@admin.register(RecurringTask)
class RecurringTaskAdmin(OperatingAdmin):
    hint = gettext_lazy(
        "What is made in the code is changed there; what is made here lives beside it."
    )
    verbs = (RUN_NOW, ENABLE, DISABLE)
    actions = ("run", "enable", "disable")
    form = RecurringTaskForm
    list_display = ("name", what, schedule, state_and_problem, next_run, last_run, origin)
    list_filter = ("is_enabled", "is_from_code")
    ordering = ("name",)
    search_fields = ("name", "task", "command")
    status: ClassVar[Any] = (None, {"fields": ((state, origin), (schedule, next_run, last_run))})
    what: ClassVar[Any] = ("name", ("task", "command"), ("args", "kwargs"), ("queue", "priority"))
    how: ClassVar[Any] = (
        (
            gettext_lazy("When"),
            {"fields": (("cron", "timezone"), ("every", "drift"), ("starts_at", "ends_at"))},
        ),
        (gettext_lazy("And if it is late"), {"fields": (("missed", "most_missed"), "jitter")}),
    )

    def get_fieldsets(self, request: HttpRequest, obj: RecurringTask | None = None) -> Any:
        writes = obj is None or self.has_change_permission(request, obj)
        what = (
            self.what
            if writes
            else [arguments if each == ("args", "kwargs") else each for each in self.what]
        )
        fieldsets = (*[self.status] * bool(obj), (_("What"), {"fields": what}), *self.how)
        return (
            fieldsets
            if writes
            else [(name, {"fields": _given(obj, options["fields"])}) for name, options in fieldsets]
        )

    def get_readonly_fields(self, request: HttpRequest, obj: RecurringTask | None = None) -> Any:
        status = [state, origin, schedule, next_run, last_run]
        writes = obj is None or self.has_change_permission(request, obj)
        return status if writes else [*status, arguments, *WHAT, *WHEN, *HOW]

    def listed(self, rows: QuerySet[RecurringTask]) -> QuerySet[RecurringTask]:
        newest = RecurringExecution.objects.filter(task=OuterRef("pk")).order_by("-run_at")
        return rows.annotate(last_job_id=Subquery(newest.values("job")[:1]))

    def completed(self, rows: list[Any]) -> list[Any]:
        jobs = Job.objects.defer(*columns.NOT_LISTED).in_bulk([row.last_job_id for row in rows])
        for row in rows:
            row.last_job = jobs.get(row.last_job_id)
        return rows

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> RecurringTask | None:
        found: Any = super().get_object(request, object_id, from_field)
        return (
            self.completed([self.listed(RecurringTask.objects.filter(pk=found.pk)).get()])[0]
            if found
            else None
        )

    def beside(self, request: HttpRequest, one: RecurringTask) -> dict[str, Any]:
        shown = {"times": _times(one), "runs": _runs(one), "problem": one.problem}
        return {**super().beside(request, one), **shown}

    def save_model(self, request: HttpRequest, obj: RecurringTask, form: Any, change: bool) -> None:
        obj.problem = ""
        obj.save(update_fields=[*form.changed_data, "problem"] if change else None)
        if set(form.changed_data) & {"name", *SCHEDULE}:
            RecurringTask.objects.filter(pk=obj.pk).replan()
        said = format_html_join(
            ", ", "{}", ((formatting.moment(time),) for time in obj.next_times(TIMES))
        )
        self.message_user(request, format_html(_("Its next times: {}."), said), messages.INFO)

    def carry_out(
        self, request: HttpRequest, rows: QuerySet[Any], verb: Verb, one: Model | None = None
    ) -> HttpResponse | None:
        discover(options().task_modules)
        try:
            return super().carry_out(request, rows, verb, one)
        except (InvalidSchedule, InvalidTaskPath) as error:
            self.message_user(request, str(error), messages.ERROR)
            return None

    @admin.action(description=gettext_lazy("Run selected recurring tasks now"), permissions=["run"])
    def run(self, request: HttpRequest, rows: QuerySet[RecurringTask]) -> HttpResponse | None:
        return self.carry_out(request, rows, RUN_NOW)

    @admin.action(
        description=gettext_lazy("Enable selected recurring tasks"), permissions=["enable"]
    )
    def enable(self, request: HttpRequest, rows: QuerySet[RecurringTask]) -> HttpResponse | None:
        return self.carry_out(request, rows, ENABLE)

    @admin.action(
        description=gettext_lazy("Disable selected recurring tasks"), permissions=["enable"]
    )
    def disable(self, request: HttpRequest, rows: QuerySet[RecurringTask]) -> HttpResponse | None:
        return self.carry_out(request, rows, DISABLE)

    def has_run_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.run_recurringtask")

    def has_enable_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.enable_recurringtask")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.add_recurringtask")

    def has_change_permission(self, request: HttpRequest, obj: RecurringTask | None = None) -> bool:
        return request.user.has_perm("dbqueue.change_recurringtask") and not (
            obj and obj.is_from_code
        )

    def has_delete_permission(self, request: HttpRequest, obj: RecurringTask | None = None) -> bool:
        """Allow deletion on a row's own page only.

        A selection may contain rows from code, which would come back.
        """
        return (
            obj is not None
            and not obj.is_from_code
            and request.user.has_perm("dbqueue.delete_recurringtask")
        )


def _given(row: Any, fields: Any) -> list[Any]:
    """Return the fields that are not empty in the row, for users with read-only access."""
    lines = [
        [name for name in (line if isinstance(line, tuple) else (line,)) if _is_given(row, name)]
        for line in fields
    ]
    return [tuple(line) for line in lines if line]


def _is_given(row: Any, name: Any) -> bool:
    value = None if callable(name) else getattr(row, name)
    return callable(name) or not (value is None or value is False or value in ("", timedelta()))


def _times(row: RecurringTask) -> list[str]:
    try:
        return [
            format_html("{} ({})", formatting.moment(time), formatting.ago(time))
            for time in row.next_times(TIMES)
        ]
    except InvalidSchedule as error:
        return [str(error)]


def _runs(row: RecurringTask) -> list[dict[str, Any]]:
    """Return the newest runs."""
    executions = list(row.executions.order_by("-run_at")[:SHOWN])
    jobs = Job.objects.defer(*columns.NOT_LISTED).in_bulk([each.job for each in executions])
    return [_run(each.run_at, each.enqueued_at, jobs.get(each.job)) for each in executions]


def _run(planned: datetime, enqueued: datetime, job: Job | None) -> dict[str, Any]:
    return {
        "planned": formatting.moment(planned),
        "enqueued": formatting.ago(enqueued),
        "job": _job(job),
    }
