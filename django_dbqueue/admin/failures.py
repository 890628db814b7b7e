from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..models import Execution, Failure
from . import columns, formatting
from .actions import DISCARD, MUTE, REOPEN, RESOLVE, RETRY
from .base_actions import OperatingAdmin
from .filters import FailureStateFilter, LastSeenFilter

SHOWN = 50

RETRY_JOBS = replace(
    RETRY, label=_("Retry all failed jobs"), target=Execution.objects.failed_jobs, asks_from=1
)
DISCARD_JOBS = replace(
    DISCARD, label=_("Discard all failed jobs"), target=Execution.objects.failed_jobs
)


@admin.display(description=_("failure"))
def described(failure: Failure) -> str:
    lines = formatting.short(failure.error_type), failure.message[:150], failure.location
    return format_html(
        '{}<br><span class="dbq-quiet dbq-said">{}</span><br><span class="dbq-id">{}</span>', *lines
    )


@admin.display(description=_("failed now"))
def failed_now(failure: Any) -> Any:
    if not failure.failed_now:
        return 0
    address = reverse("admin:dbqueue_job_changelist")
    return format_html(
        '<a href="{}?failure={}&amp;state=failed">{}</a>',
        address,
        failure.pk,
        str(failure.failed_now),
    )


def _row(execution: Execution) -> dict[str, Any]:
    return {
        "job": columns.linked_job(execution.job),
        "state": columns.state(execution.job),
        "attempt": execution.attempt,
        "failed": formatting.ago(execution.finished_at),
        "message": execution.message,
    }


@admin.register(Failure)
class FailureAdmin(OperatingAdmin):
    hint = _(
        "Attempts that failed alike: the same error, at the same place, with the same kind of message. Newest first."
    )
    verbs = (RETRY_JOBS, DISCARD_JOBS, RESOLVE, MUTE, REOPEN)
    actions = ("retry", "discard", "resolve", "mute", "reopen")
    list_display = (
        described,
        columns.state,
        "count",
        failed_now,
        columns.age("first_seen", _("first seen")),
        columns.age("last_seen", _("last seen")),
    )
    list_filter = (FailureStateFilter, LastSeenFilter)
    list_per_page = 25
    ordering = ("-last_seen", "-pk")
    search_fields = ("error_type", "message", "location")
    fieldsets: ClassVar[Any] = (
        (
            None,
            {
                "fields": (
                    (columns.state, failed_now, "count"),
                    (
                        columns.time("first_seen", _("first seen")),
                        columns.time("last_seen", _("last seen")),
                    ),
                    ("error_type", "location"),
                )
            },
        ),
    )

    def completed(self, rows: list[Any]) -> list[Any]:
        numbers = Execution.objects.count_failed_jobs([failure.pk for failure in rows])
        for failure in rows:
            failure.failed_now = numbers[failure.pk]
        return rows

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Failure | None:
        found: Failure | None = super().get_object(request, object_id, from_field)
        return self.completed([found])[0] if found else None

    def beside(self, request: HttpRequest, one: Failure) -> dict[str, Any]:
        executions = Execution.objects.newest_of(one, SHOWN)
        rows = {execution.job_id: _row(execution) for execution in reversed(executions)}
        shown = {"newest": next(iter(executions), None), "rows": [*rows.values()][::-1]}
        return {
            **super().beside(request, one),
            **shown,
            "may_view_jobs": request.user.has_perm("dbqueue.view_job"),
        }

    @admin.action(
        description=_("Retry all failed jobs of selected failures"), permissions=["retry"]
    )
    def retry(self, request: HttpRequest, rows: QuerySet[Failure]) -> HttpResponse | None:
        return self.carry_out(request, rows, RETRY_JOBS)

    @admin.action(
        description=_("Discard all failed jobs of selected failures"), permissions=["discard"]
    )
    def discard(self, request: HttpRequest, rows: QuerySet[Failure]) -> HttpResponse | None:
        return self.carry_out(request, rows, DISCARD_JOBS)

    @admin.action(description=_("Resolve selected failures"), permissions=["triage"])
    def resolve(self, request: HttpRequest, rows: QuerySet[Failure]) -> HttpResponse | None:
        return self.carry_out(request, rows, RESOLVE)

    @admin.action(description=_("Mute selected failures"), permissions=["triage"])
    def mute(self, request: HttpRequest, rows: QuerySet[Failure]) -> HttpResponse | None:
        return self.carry_out(request, rows, MUTE)

    @admin.action(description=_("Reopen selected failures"), permissions=["triage"])
    def reopen(self, request: HttpRequest, rows: QuerySet[Failure]) -> HttpResponse | None:
        return self.carry_out(request, rows, REOPEN)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.retry_job")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.discard_job")

    def has_triage_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.triage_failure")
