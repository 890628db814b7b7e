from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Protocol

from django.contrib import admin
from django.db.models import Case, OuterRef, Subquery, Sum, When
from django.db.models.functions import Coalesce
from django.http import HttpRequest, QueryDict
from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..core.frames import project_frames
from ..models import Execution, Failure, FailureStatistic, Process
from ..models.affected_jobs import AffectedJobs
from ..models.failure import FailureQuerySet
from ..models.statistic import Occurrences
from . import columns, formatting
from .actions import (
    DISCARD_AFFECTED,
    MUTE,
    MUTE_FOR,
    REOPEN,
    RESOLVE,
    RETRY_AFFECTED,
    RETRY_IN_STEPS,
)
from .base import Fields
from .base_actions import Action, ActionAdmin, all_of
from .charts import Series, bars, sparkline
from .filters import FailureOrder, OpenFilter, WindowFilter
from .redaction import arguments_text
from .spans import Axis, deploys_of, span_links, span_of
from .traits import SAMPLE, common_traits

# The largest number of attempts on a failure's page; and of tasks, queues and releases in a list.
MOST_EXECUTIONS, MOST_NAMES = 20, 3
LONGEST_ARGUMENTS = 80
TIMES = (
    columns.time("first_seen", _("first seen")),
    columns.time("last_seen", _("last seen")),
    columns.time("reopened_at", _("seen again")),
)


class ShownFailure(Protocol):
    """A failure with what its row in the list shows."""

    pk: int
    state: str
    release: str
    reopened_at: datetime | None
    muted_until: datetime | None
    count: int
    in_window: int
    axis: Axis
    jobs: AffectedJobs
    occurrences: Occurrences
    running: set[str]

    def get_state_display(self) -> str: ...


@admin.display(description=_("failure"))
def summary(failure: Failure) -> str:
    return format_html(
        '{}<br><span class="dbq-quiet dbq-said">{}</span>'
        '<br><span class="dbq-id" dir="ltr">{}</span>',
        formatting.last_part(failure.error_type),
        failure.message[:150],
        failure.location,
    )


@admin.display(description=_("state"))
def state(failure: ShownFailure) -> str:
    """Return the state and what is new about it; red only while jobs are failed."""
    is_quiet = failure.state == Failure.State.OPEN and not any(failure.jobs)
    text = failure.get_state_display()
    badges = [
        formatting.badge(text, "○", "quiet") if is_quiet else formatting.state(text, failure.state)
    ]
    if failure.muted_until:
        badges.append(format_html(gettext("until {}"), formatting.timestamp(failure.muted_until)))
    if failure.reopened_at:
        badges.append(formatting.badge(gettext("Regression"), "↺", "bad"))
    if failure.release in failure.running:
        text = gettext("New in %(release)s") % {"release": failure.release}
        badges.append(formatting.badge(text, "✦", "waits"))
    return format_html_join(" ", "{}", ((each,) for each in badges))


@admin.display(description=_("in this time"))
def in_window(failure: ShownFailure) -> str:
    number = failure.in_window
    text = ngettext("%(number)d attempt in %(span)s", "%(number)d attempts in %(span)s", number)
    said = text % {"number": number, "span": failure.axis.span.label}
    values = failure.axis.numbers(failure.occurrences.at)
    return format_html(
        '<strong>{}</strong><br>{}<span class="dbq-quiet dbq-line">{}</span>',
        number_format(number, force_grouping=True),
        sparkline(said, values, "bad") if number else "",
        gettext("%(count)d in all") % {"count": failure.count},
    )


@admin.display(description=_("failed now"))
def failed_jobs(failure: ShownFailure) -> str:
    return formatting.job_count(failure.jobs.failed, failure=failure.pk, state="failed")


@admin.display(description=_("waiting for a retry"))
def retried_jobs(failure: ShownFailure) -> str:
    return formatting.job_count(failure.jobs.waiting, failure=failure.pk, attempts="retry")


@admin.display(description=_("jobs"))
def jobs(failure: ShownFailure) -> str:
    return format_html(
        "{}: {}<br>{}: {}",
        _("failed now"),
        failed_jobs(failure),
        _("waiting for a retry"),
        retried_jobs(failure),
    )


@admin.display(description=_("task, queue, release"))
def where(failure: ShownFailure) -> str:
    of = failure.occurrences
    names = (
        _names(formatting.last_part(each) for each, _number in of.tasks.most_common()),
        _names(each for each, _number in of.queues.most_common()),
        _names(each for each, _number in of.releases.most_common() if each),
    )
    return format_html_join("", "<div>{}</div>", ((each,) for each in names if each)) or "–"


def _names(names: Iterable[str]) -> str:
    found = list(names)
    more = len(found) - MOST_NAMES
    shown = format_html_join(", ", "{}", ((each,) for each in found[:MOST_NAMES]))
    return format_html(gettext("{} and {} more"), shown, more) if more > 0 else shown


@admin.display(description=_("seen"))
def seen(failure: Failure) -> str:
    return format_html(
        '<span class="dbq-line">{}: {}</span> <span class="dbq-line">{}: {}</span>',
        _("last"),
        formatting.ago(failure.last_seen),
        _("first"),
        formatting.ago(failure.first_seen),
    )


@admin.register(Failure)
class FailureAdmin(ActionAdmin):
    hint = _("Failed attempts, grouped by error, location and kind of message.")
    actions = (RETRY_AFFECTED, RETRY_IN_STEPS, DISCARD_AFFECTED, RESOLVE, MUTE, MUTE_FOR, REOPEN)
    list_display = (summary, in_window, jobs, where, seen, state)
    list_filter = (OpenFilter, WindowFilter, FailureOrder)
    list_per_page = 25
    ordering = ("-last_seen", "-pk")
    search_fields = ("error_type", "message", "location")

    def get_fieldsets(self, request: HttpRequest, obj: Failure | None = None) -> Fields:
        if obj is None:
            return ()
        first, last, again = TIMES
        rows = (
            (state, failed_jobs, retried_jobs, "count"),
            (first, last, *[again] * (obj.reopened_at is not None)),
            tuple(name for name in ("release", "last_release") if getattr(obj, name)),
            ("error_type", "location"),
        )
        return ((None, {"fields": tuple(row for row in rows if row)}),)

    def get_queryset(self, request: HttpRequest) -> FailureQuerySet:
        axis = _axis(request)
        numbers = (
            FailureStatistic.objects.since(axis.span.period, axis.start)
            .filter(failure=OuterRef("pk"))
            .order_by()
            .values("failure")
            .annotate(total=Sum("number"))
            .values("total")
        )
        # A failure that was not seen since then has no number, and needs no lookup.
        number = When(last_seen__gte=axis.start, then=Coalesce(Subquery(numbers), 0))
        rows = Failure.objects.annotate(in_window=Case(number, default=0))
        return rows.order_by(*self.get_ordering(request))

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        chosen = request.GET.get(FailureOrder.parameter_name, "")
        _text, fields = FailureOrder.orders.get(chosen, ("", ("-in_window", *self.ordering)))
        return fields

    def with_details(self, request: HttpRequest, rows: list[ShownFailure]) -> list[ShownFailure]:
        ids = [failure.pk for failure in rows]
        axis = _axis(request)
        affected = Execution.objects.count_affected_jobs(ids)
        counted = FailureStatistic.objects.since(axis.span.period, axis.start).by_failure(ids)
        running = Process.objects.releases()
        for failure in rows:
            failure.axis, failure.running = axis, running
            failure.jobs, failure.occurrences = affected[failure.pk], counted[failure.pk]
        return rows

    def offered(self, one: ShownFailure) -> tuple[Action, ...]:
        """Leave out the actions on jobs if there are none.

        PostgreSQL would search all attempts for the first job.
        """
        found = one.jobs.may_exist
        return tuple(each for each in self.actions if found or each.target is all_of)

    def page_context(self, request: HttpRequest, row: Any) -> dict[str, object]:
        executions = Execution.objects.newest_of(row, SAMPLE)
        shown = executions[:MOST_EXECUTIONS]
        newest_by_job = {each.job_id: _attempt(each) for each in reversed(shown)}
        may_view_jobs = request.user.has_perm("dbqueue.view_job")
        common, compared = common_traits(executions) if may_view_jobs else ([], 0)
        newest = executions[0] if executions else None
        return {
            **super().page_context(request, row),
            "newest": newest,
            "all_jobs": formatting.jobs_link(
                gettext("View all in the list of jobs"), failure=row.pk
            ),
            **(_traceback_of(newest) if newest else {}),
            "attempts": list(reversed(newest_by_job.values())),
            "chart": _chart(row),
            "spans": span_links(row.axis.span),
            "common": common,
            "sample": len(executions),
            "compared": compared,
            "may_view_jobs": may_view_jobs,
        }


def _traceback_of(newest: Execution) -> dict[str, str]:
    """Return the traceback, and the frames of the project if it has some, to be copied."""
    frames, what = project_frames(newest.traceback), gettext("Traceback")
    return {
        "frames": formatting.copyable_text(what, frames) if frames else "",
        "traceback": formatting.copyable_text(gettext("Whole traceback"), newest.traceback),
    }


def _axis(request: HttpRequest) -> Axis:
    """Return the chosen time; on a page that was opened from a list, that of the list."""
    name = WindowFilter.parameter_name
    of_list = QueryDict(request.GET.get("_changelist_filters", "")).get(name)
    return Axis.until_now(span_of(request.GET.get(name, of_list)))


def _chart(failure: ShownFailure) -> str:
    axis = failure.axis
    values = axis.numbers(failure.occurrences.at)
    series = Series(gettext("failed attempts"), "bad", values)
    return bars(gettext("Failed attempts"), axis.labels(), [series], marks=deploys_of(axis))


def _attempt(execution: Execution) -> dict[str, object]:
    return {
        "job": columns.linked_job(execution.job),
        "arguments": Truncator(arguments_text(execution.job)).chars(LONGEST_ARGUMENTS),
        "state": columns.state(execution.job),
        "attempt": execution.attempt,
        "failed": formatting.ago(execution.finished_at),
        "message": execution.message,
    }
