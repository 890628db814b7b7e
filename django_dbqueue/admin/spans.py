"""The times that charts and windows can show, and their bars."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext, gettext_lazy

from ..core.counts import Counts
from ..models import Statistic
from ..models.statistic import Period, start_of
from .backend_choice import with_backend
from .charts import Mark


class Span(NamedTuple):
    """A time that charts can show: its hours, and the minutes of each bar."""

    hours: int
    each: int
    label: Any

    @property
    def period(self) -> Period:
        """The statistics that have its bars."""
        return Period.MINUTE if self.each < 60 else Period.HOUR

    @property
    def bars(self) -> int:
        return self.hours * 60 // self.each


class Axis(NamedTuple):
    """The bars of a chart, from a time on."""

    span: Span
    start: datetime

    @classmethod
    def until_now(cls, span: Span) -> Axis:
        last = start_of(span.period, timezone.now())
        unit = timedelta(minutes=1) if span.period == Period.MINUTE else timedelta(hours=1)
        return cls(span, last - timedelta(hours=span.hours) + unit)

    def place(self, time: datetime) -> int:
        """Return the number of the bar of a time."""
        return (time - self.start) // timedelta(minutes=self.span.each)

    def labels(self) -> list[str]:
        """Return the starts of the bars as text."""
        step = timedelta(minutes=self.span.each)
        return [self.label(self.start + step * place) for place in range(self.span.bars)]

    def numbers(self, at: Mapping[datetime, int]) -> list[int]:
        """Add up numbers by time in the bars."""
        found = [0] * self.span.bars
        for time, number in at.items():
            if 0 <= (place := self.place(time)) < len(found):
                found[place] += number
        return found

    def counts(self, task: str) -> dict[datetime, Counts]:
        """Return what a task has done, by the start of each hour or minute."""
        rows = Statistic.objects
        per = rows.per_minute if self.span.period == Period.MINUTE else rows.per_hour
        return per(self.start, task=task)

    def label(self, time: datetime) -> str:
        local = timezone.localtime(time) if timezone.is_aware(time) else time
        hours, each = self.span.hours, self.span.each
        return date_format(local, "H:i" if hours <= 24 else "m-d H:i" if each < 1440 else "m-d")


SPANS = (
    Span(1, 1, gettext_lazy("1 hour")),
    Span(6, 5, gettext_lazy("6 hours")),
    Span(24, 60, gettext_lazy("24 hours")),
    Span(7 * 24, 360, gettext_lazy("7 days")),
    Span(30 * 24, 1440, gettext_lazy("30 days")),
)
USUAL = SPANS[2]


def span_of(hours: str | None) -> Span:
    """Return the time of this many hours; the usual one for any other text."""
    return next((span for span in SPANS if str(span.hours) == hours), USUAL)


def span_links(chosen: Span, **kept: str) -> list[tuple[Span, str, bool]]:
    """Return each time with its address on the same page, and whether it is the chosen one."""
    return [
        (span, with_backend(f"?{urlencode({'hours': span.hours, **kept})}"), span is chosen)
        for span in SPANS
    ]


def deploys_of(axis: Axis) -> list[Mark]:
    """Return the marks of a chart for the releases that began to run jobs."""
    said = gettext("%(release)s since %(time)s")
    deploys = Statistic.objects.deploys(axis.start, axis.span.period)
    return [
        (axis.place(time), said % {"release": release, "time": axis.label(time)})
        for time, releases in deploys.items()
        for release in releases
    ]
