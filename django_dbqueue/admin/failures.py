from __future__ import annotations

from typing import ClassVar, Protocol

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..models import Execution, Failure
from . import columns, formatting
from .actions import DISCARD_FAILED, MUTE, REOPEN, RESOLVE, RETRY_FAILED
from .base import Fields
from .base_actions import ActionAdmin
from .filters import LastSeenFilter, StateFilter

MOST_EXECUTIONS = 50


class CountedFailure(Protocol):
    """A failure with the number of its failed jobs."""

    pk: int
    failed_jobs: int


@admin.display(description=_("failure"))
def summary(failure: Failure) -> str:
    return format_html(
        '{}<br><span class="dbq-quiet dbq-said">{}</span><br><span class="dbq-id">{}</span>',
        formatting.last_part(failure.error_type),
        failure.message[:150],
        failure.location,
    )


@admin.display(description=_("failed jobs"))
def failed_jobs(failure: CountedFailure) -> str:
    return formatting.job_count(failure.failed_jobs, failure=failure.pk, state="failed")


@admin.register(Failure)
class FailureAdmin(ActionAdmin):
    hint = _("Failed attempts, grouped by error, location and kind of message. Last seen first.")
    actions = (RETRY_FAILED, DISCARD_FAILED, RESOLVE, MUTE, REOPEN)
    list_display = (
        summary,
        columns.state,
        "count",
        failed_jobs,
        columns.age("first_seen", _("first seen")),
        columns.age("last_seen", _("last seen")),
    )
    list_filter = (StateFilter, LastSeenFilter)
    list_per_page = 25
    ordering = ("-last_seen", "-pk")
    search_fields = ("error_type", "message", "location")
    times = (
        columns.time("first_seen", _("first seen")),
        columns.time("last_seen", _("last seen")),
    )
    fieldsets: ClassVar[Fields] = (
        (
            None,
            {
                "fields": (
                    (columns.state, failed_jobs, "count"),
                    times,
                    ("error_type", "location"),
                )
            },
        ),
    )

    def with_details(self, rows: list[CountedFailure]) -> list[CountedFailure]:
        numbers = Execution.objects.count_failed_jobs([failure.pk for failure in rows])
        for failure in rows:
            failure.failed_jobs = numbers[failure.pk]
        return rows

    def page_context(self, request: HttpRequest, row: Failure) -> dict[str, object]:
        executions = Execution.objects.newest_of(row, MOST_EXECUTIONS)
        newest_by_job = {each.job_id: _attempt(each) for each in reversed(executions)}
        return {
            **super().page_context(request, row),
            "newest": executions[0] if executions else None,
            "attempts": list(reversed(newest_by_job.values())),
            "may_view_jobs": request.user.has_perm("dbqueue.view_job"),
        }


def _attempt(execution: Execution) -> dict[str, object]:
    return {
        "job": columns.linked_job(execution.job),
        "state": columns.state(execution.job),
        "attempt": execution.attempt,
        "failed": formatting.ago(execution.finished_at),
        "message": execution.message,
    }
