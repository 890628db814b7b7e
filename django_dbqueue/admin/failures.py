from __future__ import annotations

from typing import ClassVar, Protocol

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..models import Execution, Failure
from ..models.execution import AffectedJobs
from . import columns, formatting
from .actions import DISCARD_AFFECTED, MUTE, REOPEN, RESOLVE, RETRY_AFFECTED, RETRY_IN_STEPS
from .base import Fields
from .base_actions import ActionAdmin
from .filters import FailureOrder, LastSeenFilter, StateFilter

MOST_EXECUTIONS = 50


class CountedFailure(Protocol):
    """A failure with the numbers of its jobs."""

    pk: int
    jobs: AffectedJobs


@admin.display(description=_("failure"))
def summary(failure: Failure) -> str:
    return format_html(
        '{}<br><span class="dbq-quiet dbq-said">{}</span><br><span class="dbq-id">{}</span>',
        formatting.last_part(failure.error_type),
        failure.message[:150],
        failure.location,
    )


@admin.display(description=_("failed now"))
def failed_jobs(failure: CountedFailure) -> str:
    return formatting.job_count(failure.jobs.failed, failure=failure.pk, state="failed")


@admin.display(description=_("waiting for a retry"))
def retried_jobs(failure: CountedFailure) -> str:
    return formatting.job_count(failure.jobs.waiting, failure=failure.pk, attempts="retry")


@admin.display(description=_("jobs"))
def jobs(failure: CountedFailure) -> str:
    return format_html(
        "{}: {}<br>{}: {}",
        _("failed now"),
        failed_jobs(failure),
        _("waiting for a retry"),
        retried_jobs(failure),
    )


@admin.register(Failure)
class FailureAdmin(ActionAdmin):
    hint = _("Failed attempts, grouped by error, location and kind of message.")
    actions = (RETRY_AFFECTED, RETRY_IN_STEPS, DISCARD_AFFECTED, RESOLVE, MUTE, REOPEN)
    list_display = (
        summary,
        columns.state,
        "count",
        jobs,
        columns.age("first_seen", _("first seen")),
        columns.age("last_seen", _("last seen")),
    )
    list_filter = (FailureOrder, StateFilter, LastSeenFilter)
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
                    (columns.state, failed_jobs, retried_jobs, "count"),
                    times,
                    ("error_type", "location"),
                )
            },
        ),
    )

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        chosen = request.GET.get(FailureOrder.parameter_name, "")
        _text, fields = FailureOrder.orders.get(chosen, ("", self.ordering))
        return fields

    def with_details(self, rows: list[CountedFailure]) -> list[CountedFailure]:
        numbers = Execution.objects.count_affected_jobs([failure.pk for failure in rows])
        for failure in rows:
            failure.jobs = numbers[failure.pk]
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
