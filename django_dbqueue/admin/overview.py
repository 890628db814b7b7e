"""The first page: whether all is well, and how much runs, fails and waits."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..core.counts import Counts, Times
from ..doctor.database import QueueDatabase
from ..doctor.finding import Finding, Severity
from ..doctor.runner import of_the_queue
from ..models import Job, Overview, Statistic
from ..models.bounded_count import count
from ..models.enums import State
from ..models.statistic import hour_of
from .addresses import page_address
from .backend_choice import offered_backends, with_backend
from .base import ReadOnlyAdmin
from .charts import Series, bars
from .config import backend, backends_in
from .formatting import job_count

# The order of the index that holds the jobs of each state: see count().
INDEXES = {
    State.READY: ("queue", "priority", "run_after"),
    State.RUNNING: ("process",),
    State.SCHEDULED: ("run_after",),
    State.BLOCKED: ("blocked_by", "-priority"),
    State.FAILED: ("finished_at",),
}
# The page that shows more of a finding.
PAGES = {
    "processes": "process",
    "silent-processes": "process",
    "lag": "queue",
    "overdue-recurring-tasks": "recurringtask",
    "failures": "failure",
    "hanged-jobs": "hangedjob",
    "stalled-operations": "operation",
    "orphaned-jobs": "hangedjob",
    "retention": "job",
}


class Span(NamedTuple):
    """A time that charts can show: its hours, and the hours of each bar."""

    hours: int
    each: int
    label: Any


SPANS = (
    Span(24, 1, gettext_lazy("24 hours")),
    Span(7 * 24, 6, gettext_lazy("7 days")),
    Span(30 * 24, 24, gettext_lazy("30 days")),
)


@admin.register(Overview)
class OverviewAdmin(ReadOnlyAdmin):
    def get_urls(self) -> list[Any]:
        """Return the one page: there are no rows."""
        return [each for each in super().get_urls() if each.name == "dbqueue_overview_changelist"]

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return request.user.has_perm("dbqueue.view_job")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        chosen = next((s for s in SPANS if str(s.hours) == request.GET.get("hours")), SPANS[0])
        found = list(_found())
        context = {
            **self.admin_site.each_context(request),
            "title": _("Overview"),
            "opts": self.opts,
            "media": self.media,
            "backends": offered_backends(),
            "verdict": _verdict(found),
            "is_well": not found,
            "problems": found,
            "states": [(state.label, _number_in(state)) for state in INDEXES],
            "charts": _charts(chosen),
            "spans": [
                (span, with_backend(f"?hours={span.hours}"), span is chosen) for span in SPANS
            ],
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/dbqueue/overview.html", context)


def _found() -> Iterable[dict[str, object]]:
    """Yield what is wrong, the most serious first."""
    of = backend()
    if of is None:
        return
    results = of_the_queue(QueueDatabase(of.database, backends_in(of.database)))
    problems = [(name, each) for name, each in results if each.severity]
    for name, each in sorted(problems, key=lambda it: it[1].severity != Severity.CRITICAL):
        yield {
            "what": each.what,
            "why": each.why if isinstance(each, Finding) else "",
            "remedy": each.remedy,
            "is_critical": each.severity == Severity.CRITICAL,
            "page": with_backend(page_address(f"{PAGES[name]}_changelist")),
        }


def _verdict(found: list[dict[str, object]]) -> str:
    if not found:
        return _("All is well: no problem was found.")
    critical = sum(bool(each["is_critical"]) for each in found)
    text = ngettext(
        "%(number)d problem, of which critical: %(critical)d.",
        "%(number)d problems, of which critical: %(critical)d.",
        len(found),
    )
    return text % {"number": len(found), "critical": critical}


def _number_in(state: State) -> str:
    rows = Job.objects.filter(state=state)
    return job_count(count(rows, *INDEXES[state]), state=state.value)


def _charts(span: Span) -> list[str]:
    bars_of = _bars(span)
    times = [_time(start, span) for start in bars_of]
    of = list(bars_of.values())
    numbers = (
        Series(_("enqueued jobs"), "waits", [each.enqueued for each in of]),
        Series(_("attempts without failure"), "good", [each.runs - each.failures for each in of]),
        Series(_("failed attempts"), "bad", [each.failures for each in of]),
    )
    return [
        bars(_("Jobs and attempts"), times, numbers),
        bars(_("Waiting time"), times, _percentiles([each.wait_time for each in of]), _(" s")),
        bars(_("Run time"), times, _percentiles([each.run_time for each in of]), _(" s")),
    ]


def _percentiles(times: list[Times]) -> list[Series]:
    tones = {50: "good", 95: "waits", 99: "bad"}
    return [
        Series(
            _("highest p%d") % percent, tone, [each.percentile(percent) or 0.0 for each in times]
        )
        for percent, tone in tones.items()
    ]


def _bars(span: Span) -> dict[datetime, Counts]:
    """Return the counts of each bar, by its start; also of those without a job."""
    step = timedelta(hours=span.each)
    last = hour_of(timezone.now())
    start = last - timedelta(hours=span.hours) + timedelta(hours=1)
    found = {start + step * place: Counts() for place in range(span.hours // span.each)}
    for hour, counts in Statistic.objects.per_hour(start).items():
        if hour <= last:
            found[start + step * ((hour - start) // step)].merge(counts)
    return found


def _time(start: datetime, span: Span) -> str:
    local = timezone.localtime(start) if timezone.is_aware(start) else start
    return date_format(local, "H:i" if span.each == 1 else "m-d H:i" if span.each < 24 else "m-d")
