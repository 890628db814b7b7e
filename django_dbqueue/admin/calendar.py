"""The next runs of recurring tasks as a picture: a line for each task, over a day or a week."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..exceptions import InvalidSchedule
from ..models import RecurringTask, Statistic
from ..models.recurring_task import aware
from . import formatting

WIDTH, HEIGHT = 960, 16
# More runs of one task are drawn as one bar.
MOST_RUNS = 100
# How long runs usually take is that of the last week.
USUAL = timedelta(days=7)


class Line(NamedTuple):
    """A task with its runs until the end of the calendar; ``is_often`` if there are very many."""

    name: str
    runs: list[datetime]
    is_often: bool
    length: timedelta


class Calendar(NamedTuple):
    """The calendar from now on."""

    start: datetime
    end: datetime
    lines: list[Line]

    @classmethod
    def of(cls, rows: Iterable[RecurringTask], days: int) -> Calendar:
        """Return the calendar of the enabled tasks among these. A broken schedule is left out."""
        start = aware(timezone.now())
        end = start + timedelta(days=days)
        enabled = [row for row in rows if row.is_enabled]
        since = timezone.now() - USUAL
        lengths = Statistic.objects.mean_run_times({row.task for row in enabled}, since)
        lines = [_line(row, end, lengths.get(row.task, 0.0)) for row in enabled]
        return cls(start, end, [line for line in lines if line.runs])

    def draw(self) -> SafeString:
        """Return the lines as rows of a table, with the hours or days above."""
        rows = format_html_join(
            "",
            '<tr><th scope="row">{}</th><td>{}</td></tr>',
            ((line.name, self._line(line)) for line in self.lines),
        )
        first, last = (formatting.timestamp(time) for time in (self.start, self.end))
        head = format_html("{}: {} – {}", timezone.get_current_timezone_name(), first, last)
        note = format_html("<p>{}</p>", change) if (change := self._clock_change()) else ""
        return format_html(
            '<p class="dbq-quiet">{}</p>{}<table class="dbq-table dbq-calendar">'
            "<tbody>{}</tbody></table>",
            head,
            note,
            rows,
        )

    def _line(self, line: Line) -> SafeString:
        said = (
            _("more than %d runs") % MOST_RUNS
            if line.is_often
            else ngettext("%d run", "%d runs", len(line.runs)) % len(line.runs)
        )
        spans = (
            [(self._x(line.runs[0]), WIDTH, said)]
            if line.is_often
            else [
                (self._x(run), self._x(run + line.length), _label(run, line)) for run in line.runs
            ]
        )
        shapes = format_html_join(
            "",
            '<rect class="dbq-runs" x="{}" y="2" height="12" width="{}"><title>{}</title></rect>',
            ((f"{x:.1f}", f"{max(end - x, 2.0):.1f}", text) for x, end, text in spans),
        )
        return format_html(
            '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">'
            "{}</svg>",
            WIDTH,
            HEIGHT,
            said,
            shapes,
        )

    def _x(self, time: datetime) -> float:
        return min(WIDTH, WIDTH * ((time - self.start) / (self.end - self.start)))

    def _clock_change(self) -> str:
        """Return a sentence if the clocks change before the end."""
        if not timezone.is_aware(self.start):
            return ""
        offsets = [timezone.localtime(time).utcoffset() for time in (self.start, self.end)]
        return _("The clocks change in this time.") if offsets[0] != offsets[1] else ""


def _line(row: RecurringTask, end: datetime, seconds: float) -> Line:
    try:
        times: Sequence[datetime] = row.next_times(MOST_RUNS + 1, until=end)
    except (InvalidSchedule, OverflowError):  # Or it has a time after the last year.
        times = ()
    runs = [time for time in times if time < end]
    return Line(row.name, runs, len(runs) > MOST_RUNS, timedelta(seconds=seconds))


def _label(run: datetime, line: Line) -> str:
    local = timezone.localtime(run) if timezone.is_aware(run) else run
    when = date_format(local, "SHORT_DATETIME_FORMAT")
    if not line.length:
        return when
    return _("%(time)s, usually for %(length)s") % {
        "time": when,
        "length": formatting.duration(line.length),
    }
