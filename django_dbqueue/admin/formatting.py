"""Formatting of values on every page: states, times, durations, schedules, JSON, links.

Values that come from jobs are text, and are escaped.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta, timezone
from uuid import UUID

from django.conf import settings
from django.db.models import Max, Min
from django.utils.dates import WEEKDAYS_ABBR
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext as _

from ..exceptions import InvalidSchedule
from ..models import Execution, Failure, Job, RecurringTask
from ..models.bounded_count import LIMIT, count
from ..models.job import JobQuerySet
from ..recurrence.cron_syntax import checked
from .addresses import page_address
from .backend_choice import with_backend
from .base import Text

LONGEST_JSON = 50_000
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")

# Icon and tone of each state: never a colour alone.
BADGES: dict[str, tuple[str, str]] = {
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
    Execution.Outcome.STOPPED: ("↺", "waits"),
}


def badge(text: Text, icon: str, tone: str) -> str:
    return format_html(
        '<span class="dbq-badge dbq-{}"><span aria-hidden="true">{}</span> {}</span>',
        tone,
        icon,
        text,
    )


def state(text: Text, value: str) -> str:
    """Return the badge of a state or an outcome. An outcome looks like the state of that name."""
    return badge(text, *BADGES.get(value, ("●", "quiet")))


def icon(text: Text, value: str) -> str:
    """Return the icon of a state, with its text as title."""
    sign, shade = BADGES.get(value, ("●", "quiet"))
    return format_html(
        '<span class="dbq-{}" title="{}" role="img" aria-label="{}">{}</span>',
        shade,
        text,
        text,
        sign,
    )


def tone(value: str) -> str:
    """Return the tone of a state or an outcome."""
    return BADGES.get(value, ("", "quiet"))[1]


def alive(is_alive: bool) -> str:
    if is_alive:
        return badge(_("Alive"), "✓", "good")
    return badge(_("Silent"), "✕", "bad")


def quiet(text: object) -> str:
    """Return secondary text."""
    return format_html('<span class="dbq-quiet">{}</span>', text)


def number(value: int) -> str:
    """Return a number with its sign before it, in a text from right to left too."""
    return format_html('<span dir="ltr">{}</span>', value)


def plain_number(value: int) -> str:
    """Return a number for plain text. A negative one is isolated, to keep its sign before it."""
    return f"\u2066{value}\u2069" if value < 0 else str(value)


def copyable(what: Text, block: str) -> str:
    """Return a block with a button that copies its text.

    The button is hidden until the script has found that it can write to the clipboard.
    """
    return format_html(
        '<div class="dbq-copyable">{}<button type="button" class="dbq-button dbq-copy" '
        'aria-label="{}: {}" data-dbq-copied="{}" hidden>{}</button>'
        '<span class="dbq-copied dbq-quiet" role="status"></span></div>',
        block,
        _("Copy"),
        what,
        _("Copied"),
        _("Copy"),
    )


def copyable_text(what: Text, text: str) -> str:
    """Return a long text, such as a traceback, with a button that copies it."""
    return copyable(what, format_html('<pre class="dbq-text" dir="ltr">{}</pre>', text))


def timestamp(time: datetime | None) -> str:
    """Format a time as local time, with UTC as its title."""
    if time is None:
        return "–"
    day, clock = plain_time(time).split()
    return _tag(time, format_html('<span class="dbq-part">{}</span> {}', day, clock))


def plain_time(time: datetime) -> str:
    """Format a time as local time."""
    return date_format(localtime(time) if is_aware(time) else time, "Y-m-d H:i:s")


def kept_times(jobs: JobQuerySet) -> str:
    """Say how many of these jobs keep their time, and from when to when; empty for none."""
    ahead = jobs.ahead().order_by()
    if not (number := count(ahead)):
        return ""
    times = ahead[:LIMIT].aggregate(first=Min("run_after"), last=Max("run_after"))
    return _("Scheduled, and run at their time: %(number)s, from %(first)s to %(last)s.") % {
        "number": number,
        **{name: plain_time(time) for name, time in times.items()},
    }


def ago(time: datetime | None, now: datetime | None = None) -> str:
    """Format a time relative to now, past or future, with the time itself as its title."""
    if time is None:
        return "–"
    passed = (now or datetime.now(time.tzinfo)) - time
    text = _("%(time)s ago") if passed >= timedelta() else _("in %(time)s")
    # Whole seconds: a fraction has passed before the page is read.
    seconds = timedelta(seconds=round(abs(passed).total_seconds()))
    return _tag(time, text % {"time": duration(seconds)})


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


def schedule(row: RecurringTask) -> str:
    """Describe the schedule of a recurring task."""
    if row.every is not None:
        text = _("every %(time)s, from the end of a run") if row.drift else _("every %(time)s")
        return text % {"time": duration(row.every)}
    return f"{_cron(row.cron)} ({row.timezone or settings.TIME_ZONE})"


# Steps of minutes that are the same in each hour.
_STEPS = {f"*/{step}": step for step in range(2, 61) if 60 % step == 0}


def _cron(expression: str) -> str:
    """Describe a cron expression, or return it if it has no short description."""
    try:
        fields = checked(expression).split()
    except InvalidSchedule:
        return expression
    match fields:
        case ["*", "*", "*", "*", "*"]:
            return _("every minute")
        case [minute, "*", "*", "*", "*"] if minute in _STEPS:
            return _("every %d minutes") % _STEPS[minute]
        case [minute, "*", "*", "*", "*"] if minute.isdigit():
            return _("hourly, at minute %d") % int(minute)
        case [minute, hour, day, "*", weekday] if minute.isdigit() and hour.isdigit():
            time = f"{int(hour):02}:{int(minute):02}"
            if (day, weekday) == ("*", "*"):
                return _("daily at %(time)s") % {"time": time}
            if day == "*":
                return _("%(days)s at %(time)s") % {"days": _weekdays(weekday), "time": time}
            if day.isdigit() and weekday == "*":
                return _("monthly on day %(day)s at %(time)s") % {"day": day, "time": time}
    return expression


def _weekdays(field: str) -> str:
    """Return the weekdays of a cron expression, such as mon-fri, by their names."""
    day = rf"(?:[0-7]|{'|'.join(DAYS)})"
    if not re.fullmatch(rf"{day}(?:[-,]{day})*", field, re.IGNORECASE):
        return field

    def name(found: re.Match[str]) -> str:
        text = found[0].lower()
        # Sunday is 0 or 7 in cron; Monday is 0 in Django's names.
        return str(WEEKDAYS_ABBR[((DAYS.index(text) if text in DAYS else int(text)) - 1) % 7])

    return re.sub(day, name, field, flags=re.IGNORECASE)


def json_of(value: object, indent: int | None = None) -> str:
    """Return a value as JSON that any page can show: half of a character is escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=repr)
    return text.encode("utf-8", "backslashreplace").decode()


def json_text(value: object) -> str:
    """Format a value as indented JSON; only the beginning if it is very long."""
    text = json_of(value, indent=2)
    if len(text) > LONGEST_JSON:
        text = text[:LONGEST_JSON] + "\n[…]"
    return format_html('<pre class="dbq-text" dir="ltr">{}</pre>', text)


def last_part(path: str) -> str:
    """Return the last part of a dotted path, with the path as its title."""
    return format_html('<span title="{}">{}</span>', path, path.rpartition(".")[2])


def process(name: str) -> str:
    """Format the name of a process. Lines may break between its parts."""
    role, at, place = name.partition("@")
    host, colon, rest = place.partition(":")
    return format_html("{}{}<wbr>{}<wbr>{}{}", role, at, host, colon, rest)


def short_id(pk: UUID | str) -> str:
    """Shorten an id to its beginning (the time) and its unique end, with the id as its title."""
    text = str(pk)
    return format_html(
        '<span class="dbq-id" dir="ltr" title="{}">{}…{}</span>', text, text[:8], text[-8:]
    )


def link(model: str, pk: UUID | int | str, text: object) -> str:
    """Return a link to the page of a row; without an id, such as an empty name, the text."""
    if pk == "":
        return format_html("{}", text)
    address = page_address(f"{model}_change", pk)
    return format_html('<a href="{}">{}</a>', with_backend(address), text)


def jobs_link(text: object, **filters: int | str) -> str:
    """Return a link to the list of jobs with these filters."""
    address = f"{page_address('job_changelist')}?{urlencode(filters)}"
    return format_html('<a href="{}">{}</a>', with_backend(address), text)


def job_count(number: int, **filters: int | str) -> str:
    """Return a number of jobs, with a link to them if there are any."""
    return jobs_link(number, **filters) if number else "0"


def _tag(time: datetime, text: str) -> str:
    exact = (
        time.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        if is_aware(time)
        else str(time)
    )
    return format_html(
        '<time class="dbq-time" datetime="{}" title="{}">{}</time>', time.isoformat(), exact, text
    )
