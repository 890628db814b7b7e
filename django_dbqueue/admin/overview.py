"""The first page: whether all is well, and how much runs, fails and waits."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.translation import gettext as _

from ..core.counts import BOUNDS, Counts, Times
from ..doctor.database import database_of
from ..doctor.runner import of_the_queue
from ..models import Overview, Queue, Statistic
from . import rates
from .backend_choice import with_backend
from .base import PageAdmin
from .charts import Series, bars, sparkline
from .config import backend
from .filters import number_by_state
from .formatting import duration, job_count
from .problems import verdict
from .spans import Axis, Span, deploys_of, span_links, span_of

# The largest number of queues that can be chosen for the charts.
MOST_QUEUES = 200
# The largest number of queues in the table, those that did most.
MOST_ROWS = 20
PERCENTILES = (50, 95, 99)
# The first bucket of a distribution: it has all times up to 2 ms.
SHORTEST = 2


@admin.register(Overview)
class OverviewAdmin(PageAdmin):
    permission = "view_job"
    template = "admin/dbqueue/overview.html"

    def context(self, request: HttpRequest) -> dict[str, object]:
        chosen = span_of(request.GET.get("hours"))
        queue = request.GET.get("queue", "").replace("\x00", "")
        of = backend()
        database = of and database_of(of)
        return {
            **verdict(of_the_queue(database) if database else ()),
            "states": [
                (state.label, job_count(number, state=state.value))
                for state, number in number_by_state().items()
            ],
            **_over_time(chosen, queue),
            "hours": chosen.hours,
            "queue": queue,
            "queues": _queues(queue),
            "spans": span_links(chosen, **({"queue": queue} if queue else {})),
        }


def _queues(chosen: str) -> list[str]:
    names = Queue.objects.order_by("name").values_list("name", flat=True)[:MOST_QUEUES]
    return sorted({*names, *([chosen] if chosen else [])})


def _over_time(span: Span, queue: str) -> dict[str, object]:
    """Return the charts of the chosen time, and a row for each queue that did most in it."""
    axis = Axis.until_now(span)
    read = Statistic.objects.by_queue(axis.start, axis.span.period, queue or None)
    by_queue = {name: bars_of(axis, counts) for name, counts in read.items()}
    every = [rates.merged(each) for each in zip(*by_queue.values(), strict=True)]
    most = heapq.nlargest(MOST_ROWS, by_queue, key=lambda name: _number(by_queue[name]))
    return {
        "charts": charts_of(axis, every or bars_of(axis, {})),
        "by_queue": [_row(axis, name, by_queue[name]) for name in most],
        "has_more_queues": len(by_queue) > MOST_ROWS,
    }


def _number(of: Iterable[Counts]) -> int:
    return sum(each.runs + each.enqueued for each in of)


def _row(axis: Axis, name: str, of: list[Counts]) -> dict[str, Any]:
    counts, title = rates.merged(of), _("attempts")
    query = urlencode({"hours": axis.span.hours, "queue": name})
    return {
        "name": name,
        "address": with_backend(f"?{query}"),
        "enqueued": number_format(counts.enqueued, force_grouping=True),
        "runs": number_format(counts.runs, force_grouping=True),
        "chart": sparkline(title, [each.runs for each in of], "runs"),
        "failed": rates.share_failed(counts),
        "waiting_time": rates.percentiles(counts.wait_time, PERCENTILES),
        "run_time": rates.percentiles(counts.run_time, PERCENTILES),
    }


def charts_of(axis: Axis, of: list[Counts]) -> list[str]:
    """Return the charts of jobs and attempts, of waiting times and of run times."""
    times, deploys = axis.labels(), deploys_of(axis)
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


def distribution_of(times: Times) -> str:
    """Return a chart of how many attempts ran for how long; empty without any."""
    if not times.buckets:
        return ""
    numbers: Counter[int] = Counter()
    for place, number in times.buckets.items():
        numbers[max(place, SHORTEST)] += number
    places = range(min(numbers), max(numbers) + 1)
    labels = [
        f"≤ {duration(timedelta(seconds=BOUNDS[each]))}"
        if each < len(BOUNDS)
        else f"> {duration(timedelta(seconds=BOUNDS[-1]))}"
        for each in places
    ]
    series = Series(_("attempts"), "runs", [numbers[each] for each in places])
    return bars(_("Distribution of run times"), labels, [series])


def _percentiles(times: list[Times]) -> list[Series]:
    tones = dict(zip(PERCENTILES, ("good", "waits", "bad"), strict=True))
    return [
        Series(
            _("highest p%d") % percent, tone, [each.percentile(percent) or 0.0 for each in times]
        )
        for percent, tone in tones.items()
    ]


def bars_of(axis: Axis, of: Mapping[datetime, Counts]) -> list[Counts]:
    """Return the counts of each bar; also of those without a job."""
    found = [Counts() for _bar in range(axis.span.bars)]
    for start, counts in of.items():
        if (place := axis.place(start)) < axis.span.bars:
            found[place].merge(counts)
    return found
