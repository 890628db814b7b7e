"""Formatting of values on every page: states, times, durations, JSON.

Values that come from jobs are text, and are escaped.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext as _

from ..models import Execution, Failure, Job

LONGEST_JSON = 50_000

# Icon and tone of each badge: never a colour alone.
LOOKS = {
    Job.State.SCHEDULED: ("◷", "waits"),
    Job.State.BLOCKED: ("⊘", "waits"),
    Job.State.READY: ("○", "waits"),
    Job.State.RUNNING: ("▸", "runs"),
    Job.State.SUCCESSFUL: ("✓", "good"),
    Job.State.FAILED: ("✕", "bad"),
    Job.State.DISCARDED: ("–", "quiet"),
    Failure.State.OPEN: ("●", "bad"),
    Failure.State.MUTED: ("◌", "quiet"),
    Failure.State.RESOLVED: ("✓", "good"),
    Execution.Outcome.TIMED_OUT: ("◔", "bad"),
    Execution.Outcome.LOST: ("✕", "bad"),
    Execution.Outcome.INTERRUPTED: ("↺", "waits"),
    Execution.Outcome.SNOOZED: ("◷", "waits"),
}


def badge(word: Any, icon: str, tone: str) -> str:
    return format_html(
        '<span class="dbq-badge dbq-{}"><span aria-hidden="true">{}</span> {}</span>',
        tone,
        icon,
        word,
    )


def state(word: Any, value: str) -> str:
    """Return the badge of a state or an outcome. Outcomes that end a job look like its state."""
    return badge(word, *LOOKS.get(value, ("●", "quiet")))  # type: ignore[call-overload]


def alive(is_alive: bool) -> str:
    if is_alive:
        return badge(_("Alive"), "✓", "good")
    return badge(_("Silent"), "✕", "bad")


def moment(time: datetime | None) -> str:
    """Format a time as local time, with UTC as its title."""
    if time is None:
        return "–"
    return _time(time, date_format(localtime(time) if is_aware(time) else time, "Y-m-d H:i:s"))


def ago(time: datetime | None, now: datetime | None = None) -> str:
    """Format a time relative to now, past or future, with the time itself as its title."""
    if time is None:
        return "–"
    passed = (now or datetime.now(time.tzinfo)) - time
    said = _("%(time)s ago") if passed >= timedelta() else _("in %(time)s")
    # Whole seconds: by the time the page is read, it is older than a fraction of a second.
    return _time(
        time, said % {"time": duration(timedelta(seconds=round(abs(passed).total_seconds())))}
    )


def duration(length: timedelta) -> str:
    """Format in the two largest relevant units: 340 ms, 3.4 s, 4 min 5 s, 3 h 20 min, 2 d 3 h."""
    seconds = length.total_seconds()
    if 0 < seconds < 1:
        return _("%d ms") % (seconds * 1000)
    if seconds < 60:
        return _("%.3g s") % seconds
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 60:
        return _both(_("%d min") % minutes, _("%d s"), seconds % 60)
    if hours < 24:
        return _both(_("%d h") % hours, _("%d min"), minutes % 60)
    return _both(_("%d d") % days, _("%d h"), hours % 24)


def _both(large: str, small: str, number: float) -> str:
    return f"{large} {small % number}" if number >= 1 else large


def pretty(value: Any) -> str:
    """Format JSON for reading; only the beginning if it is very long."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=repr)
    if len(text) > LONGEST_JSON:
        text = text[:LONGEST_JSON] + "\n[…]"
    return format_html('<pre class="dbq-text">{}</pre>', text)


def short(path: str) -> str:
    """Return the last part of a dotted path, with the path as its title."""
    return format_html('<span title="{}">{}</span>', path, path.rpartition(".")[2])


def process(name: str) -> str:
    """Format a process's name. It is long, so lines may break where its parts begin."""
    role, at, place = name.partition("@")
    host, colon, rest = place.partition(":")
    return format_html("{}{}<wbr>{}<wbr>{}{}", role, at, host, colon, rest)


def brief(pk: Any) -> str:
    """Shorten an id to its beginning (the time) and its unique end, with the id as its title."""
    text = str(pk)
    return format_html('<span class="dbq-id" title="{}">{}…{}</span>', text, text[:8], text[-8:])


def _time(time: datetime, text: str) -> str:
    exact = (
        time.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        if is_aware(time)
        else str(time)
    )
    return format_html(
        '<time class="dbq-time" datetime="{}" title="{}">{}</time>', time.isoformat(), exact, text
    )
