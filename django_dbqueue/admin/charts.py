"""Charts as inline SVG, without script and inline style, with their numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django.utils.formats import number_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

WIDTH, HEIGHT = 720, 120


class Series(NamedTuple):
    """One value for each time; ``tone`` is that of a badge."""

    name: str
    tone: str
    values: Sequence[float]


Mark = tuple[int, str]


def bars(
    title: str,
    times: Sequence[str],
    series: Sequence[Series],
    unit: str = "",
    marks: Sequence[Mark] = (),
) -> SafeString:
    """Draw the series side by side for each time, to one scale. The titles have the numbers.

    ``marks`` are vertical lines: the number of the time before which each is, and its text.
    """
    highest = max((value for each in series for value in each.values), default=0) or 1
    step = WIDTH / max(1, len(times))
    width = step * 0.8 / len(series)
    shapes = format_html_join(
        "",
        '<rect class="dbq-{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
        (
            (
                each.tone,
                f"{step * (place + 0.1) + width * row:.2f}",
                f"{HEIGHT - height:.2f}",
                f"{width:.2f}",
                f"{height:.2f}",
                f"{time}: {each.name} {_number(each.values[place])}{unit}",
            )
            for row, each in enumerate(series)
            for place, time in enumerate(times)
            if (height := HEIGHT * each.values[place] / highest)
        ),
    )
    legend = format_html_join(
        " ",
        '<span class="dbq-{}"><span aria-hidden="true">■</span> {}: {}{}</span>',
        ((each.tone, each.name, _number(_total(each, unit)), unit) for each in series),
    )
    return format_html(
        '<figure class="dbq-chart"><figcaption><strong>{}</strong> {}</figcaption>'
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}" preserveAspectRatio="none">{}{}</svg>'
        '<div class="dbq-axis"><span>{}</span><span>{}</span><span>{}</span></div>{}{}</figure>',
        title,
        legend,
        WIDTH,
        HEIGHT,
        title,
        shapes,
        format_html_join(
            "",
            '<line class="dbq-mark" x1="{0}" x2="{0}" y1="0" y2="{1}"><title>{2}</title></line>',
            ((f"{step * place:.2f}", HEIGHT, text) for place, text in marks),
        ),
        times[0] if times else "",
        times[len(times) // 2] if times else "",
        times[-1] if times else "",
        _legend_of(marks),
        _table(times, series, unit),
    )


def sparkline(title: str, values: Sequence[float], tone: str) -> SafeString:
    """Draw the values as small bars in one line of text. ``title`` says what they are."""
    highest = max(values, default=0) or 1
    shapes = format_html_join(
        "",
        '<rect x="{}" y="{}" width="3" height="{}"/>',
        (
            (place * 4, f"{24 - height:.2f}", f"{height:.2f}")
            for place, value in enumerate(values)
            if (height := max(1.0, 24 * value / highest) if value else 0)
        ),
    )
    return format_html(
        '<svg class="dbq-sparkline dbq-{}" viewBox="0 0 {} 24" role="img" aria-label="{}">'
        "<title>{}</title>{}</svg>",
        tone,
        4 * len(values),
        title,
        title,
        shapes,
    )


class Span(NamedTuple):
    """A part of a timeline; ``tone`` is that of a badge."""

    start: datetime
    end: datetime
    tone: str
    text: str


def timeline(spans: Sequence[Span]) -> SafeString:
    """Draw the spans one after the other, to scale; short ones are at least visible."""
    if not spans:
        return SafeString()
    start, end = spans[0].start, max(span.end for span in spans)
    scale = WIDTH / max((end - start).total_seconds(), 1e-6)
    shapes = format_html_join(
        "",
        '<rect class="dbq-{}" x="{}" y="{}" height="{}" width="{}"><title>{}</title></rect>',
        (
            (
                span.tone,
                f"{min((span.start - start).total_seconds() * scale, WIDTH - 2):.2f}",
                *((10, 6) if span.tone == "waits" else (2, 22)),
                f"{max((span.end - span.start).total_seconds() * scale, 2):.2f}",
                span.text,
            )
            for span in spans
        ),
    )
    return format_html(
        '<svg class="dbq-timeline" viewBox="0 0 {} 26" role="img" aria-label="{}" '
        'preserveAspectRatio="none">{}</svg>',
        WIDTH,
        ", ".join(span.text for span in spans[:50]),
        shapes,
    )


def _legend_of(marks: Sequence[Mark]) -> SafeString:
    if not marks:
        return SafeString()
    return format_html(
        '<p class="dbq-marks"><span aria-hidden="true">┊</span> {}: {}</p>',
        _("Deploys"),
        format_html_join(", ", "{}", ((text,) for _place, text in marks)),
    )


def _table(times: Sequence[str], series: Sequence[Series], unit: str) -> SafeString:
    """Return the numbers as a table, which is closed at first."""
    names = format_html_join("", '<th scope="col">{}</th>', ((each.name,) for each in series))
    rows = format_html_join(
        "",
        '<tr><th scope="row">{}</th>{}</tr>',
        (
            (
                time,
                format_html_join(
                    "", "<td>{}{}</td>", ((_number(each.values[place]), unit) for each in series)
                ),
            )
            for place, time in enumerate(times)
        ),
    )
    return format_html(
        "<details><summary>{}</summary><table><thead><tr><td></td>{}</tr></thead>"
        "<tbody>{}</tbody></table></details>",
        _("As a table"),
        names,
        rows,
    )


def _total(series: Series, unit: str) -> float:
    """Return the sum of counts, and the highest of measured values."""
    return max(series.values, default=0) if unit else sum(series.values)


def _number(value: float) -> str:
    if value != int(value):
        return number_format(value, 1 if value >= 10 else 3)
    return number_format(int(value), force_grouping=True)
