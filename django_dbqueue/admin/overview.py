"""The first page: whether all is well, and how much runs, fails and waits."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext as _

from ..core.counts import Counts, Times
from ..doctor.database import QueueDatabase
from ..doctor.runner import of_the_queue
from ..models import Job, Overview, Queue, Statistic
from ..models.bounded_count import count
from ..models.enums import State
from ..models.statistic import Period, StatisticQuerySet
from .base import PageAdmin
from .charts import Series, bars
from .config import backend, backends_in
from .formatting import job_count
from .problems import verdict
from .spans import Axis, Span, deploys_of, span_links, span_of

# The order of the index that holds the jobs of each state: see count().
INDEXES = {
    State.READY: ("queue", "priority", "run_after"),
    State.RUNNING: ("process",),
    State.SCHEDULED: ("run_after",),
    State.BLOCKED: ("blocked_by", "-priority"),
    State.FAILED: ("finished_at",),
}
# The largest number of queues that can be chosen for the charts.
MOST_QUEUES = 200


@admin.register(Overview)
class OverviewAdmin(PageAdmin):
    permission = "view_job"
    template = "admin/dbqueue/overview.html"

    def context(self, request: HttpRequest) -> dict[str, object]:
        chosen = span_of(request.GET.get("hours"))
        queue = request.GET.get("queue", "")
        of = backend()
        database = of and QueueDatabase(of.database, backends_in(of.database))
        return {
            **verdict(of_the_queue(database) if database else ()),
            "states": [(state.label, _number_in(state)) for state in INDEXES],
            "charts": _charts(chosen, queue),
            "hours": chosen.hours,
            "queue": queue,
            "queues": _queues(queue),
            "spans": span_links(chosen, **({"queue": queue} if queue else {})),
        }


def _number_in(state: State) -> str:
    rows = Job.objects.filter(state=state)
    return job_count(count(rows, *INDEXES[state]), state=state.value)


def _queues(chosen: str) -> list[str]:
    names = Queue.objects.order_by("name").values_list("name", flat=True)[:MOST_QUEUES]
    return sorted({*names, *([chosen] if chosen else [])})


def _charts(span: Span, queue: str) -> list[str]:
    axis, statistics = Axis.until_now(span), Statistic.objects.all()
    of, times = _bars(axis, statistics, queue), axis.labels()
    deploys = deploys_of(axis)
    numbers = (
        Series(_("enqueued jobs"), "waits", [each.enqueued for each in of]),
        Series(_("attempts without failure"), "good", [each.runs - each.failures for each in of]),
        Series(_("failed attempts"), "bad", [each.failures for each in of]),
    )
    waits, runs = ([getattr(each, name) for each in of] for name in ("wait_time", "run_time"))
    return [
        bars(_("Jobs and attempts"), times, numbers, marks=deploys),
        bars(_("Waiting time"), times, _percentiles(waits), _(" s"), marks=deploys),
        bars(_("Run time"), times, _percentiles(runs), _(" s"), marks=deploys),
    ]


def _percentiles(times: list[Times]) -> list[Series]:
    tones = {50: "good", 95: "waits", 99: "bad"}
    return [
        Series(
            _("highest p%d") % percent, tone, [each.percentile(percent) or 0.0 for each in times]
        )
        for percent, tone in tones.items()
    ]


def _bars(axis: Axis, statistics: StatisticQuerySet, queue: str) -> list[Counts]:
    """Return the counts of each bar; also of those without a job."""
    found = [Counts() for _bar in range(axis.span.bars)]
    is_fine = axis.span.period == Period.MINUTE
    read = statistics.per_minute if is_fine else statistics.per_hour
    for start, counts in read(axis.start, queue=queue or None).items():
        if (place := axis.place(start)) < axis.span.bars:
            found[place].merge(counts)
    return found
