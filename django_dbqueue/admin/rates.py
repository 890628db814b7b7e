"""What a queue or a task has done lately, in words."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

from django.contrib import admin
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.counts import Counts, Times
from ..models import Statistic
from ..models.statistic import Period
from . import formatting

# Rates are those of the last hour; what is to come is estimated by the last minutes.
SPAN, RECENT = timedelta(hours=1), timedelta(minutes=10)


def of_queues() -> dict[str, tuple[Counts, Counts]]:
    """Return the counts of each queue in the last hour, and in the last minutes."""
    now = timezone.now()
    return {
        queue: (
            merged(counts.values()),
            merged(each for start, each in counts.items() if start > now - RECENT),
        )
        for queue, counts in Statistic.objects.by_queue(now - SPAN, Period.MINUTE).items()
    }


def of_tasks() -> dict[str, Counts]:
    return Statistic.objects.per_task(timezone.now() - SPAN)


def merged(each: Iterable[Counts]) -> Counts:
    """Return the sum of counts."""
    total = Counts()
    for counts in each:
        total.merge(counts)
    return total


class Counted(Protocol):
    """A queue or a task with its counts of the last hour."""

    counts: Counts


@admin.display(description=gettext_lazy("last hour"))
def throughput(row: Counted) -> str:
    """Return how many jobs came, and how many attempts ended."""
    counts = row.counts
    if not (counts.enqueued or counts.runs):
        return "–"
    return lines(_("in: %s") % per_minute(counts.enqueued), _("out: %s") % per_minute(counts.runs))


@admin.display(description=gettext_lazy("failed attempts"))
def failed(row: Counted) -> str:
    return share_failed(row.counts)


def share_failed(counts: Counts) -> str:
    """Return the share of attempts that failed; red from a tenth on."""
    if not counts.runs:
        return "–"
    share = counts.failures / counts.runs
    text = f"{number_format(100 * share, 0 if share in (0, 1) or share >= 0.1 else 1)} %"
    return format_html('<span class="dbq-bad">{}</span>', text) if share >= 0.1 else text


@admin.display(description=gettext_lazy("run time"))
def run_time(row: Counted) -> str:
    return percentiles(row.counts.run_time)


@admin.display(description=gettext_lazy("waiting time"))
def waiting_time(row: Counted) -> str:
    return percentiles(row.counts.wait_time)


def lines(*texts: str) -> str:
    """Return texts below each other."""
    rows = ((each,) for each in texts if each)
    return format_html_join("", '<span class="dbq-line">{}</span>', rows)


def per_minute(number: float) -> str:
    """Format a number within the last hour as a rate."""
    rate = number / 60
    return _("%s/min") % number_format(rate, 0 if rate >= 10 else 1, force_grouping=True)


def percentiles(times: Times, percents: Iterable[int] = (50, 95)) -> str:
    """Return percentiles of measured times: the median and the 95th, or others."""
    if not times.number:
        return "–"
    shown = ((percent, times.percentile(percent) or 0.0) for percent in percents)
    return lines(
        *(
            f"p{percent}: {formatting.duration(timedelta(seconds=seconds))}"
            for percent, seconds in shown
        )
    )


def drained_in(waiting: int, recent: Counts) -> str:
    """Return when the waiting jobs will have run, at the rates of the last minutes."""
    if not waiting:
        return "–"
    gain = (recent.runs - recent.retries - recent.enqueued) / RECENT.total_seconds()
    if gain <= 0:
        return _("never: more jobs come than end") if recent.runs else _("unknown")
    return formatting.duration(timedelta(seconds=waiting / gain))
