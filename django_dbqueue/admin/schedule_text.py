"""A schedule in words, if there is a short description."""

from __future__ import annotations

from django.conf import settings
from django.utils.translation import gettext as _

from ..exceptions import InvalidSchedule
from ..models import RecurringTask
from ..recurrence.cron_syntax import checked
from . import formatting


def in_words(row: RecurringTask) -> str:
    if row.every is not None:
        said = _("every %(time)s, from the end of a run") if row.drift else _("every %(time)s")
        return said % {"time": formatting.duration(row.every)}
    return f"{_of_cron(row.cron)} ({row.timezone or settings.TIME_ZONE})"


def _of_cron(expression: str) -> str:
    """Return a cron expression in words, or the expression if it needs more than a few words."""
    try:
        fields = checked(expression).split()
    except InvalidSchedule:
        return expression
    match fields:
        case ["*", "*", "*", "*", "*"]:
            return _("every minute")
        case [minute, "*", "*", "*", "*"] if minute.startswith("*/") and 60 % int(minute[2:]) == 0:
            return _("every %d minutes") % int(minute[2:])
        case [minute, "*", "*", "*", "*"] if minute.isdigit():
            return _("hourly, at minute %d") % int(minute)
        case [minute, hour, day, "*", weekday] if minute.isdigit() and hour.isdigit():
            time = f"{int(hour):02}:{int(minute):02}"
            if (day, weekday) == ("*", "*"):
                return _("daily at %(time)s") % {"time": time}
            if day == "*":
                return _("%(days)s at %(time)s") % {"days": weekday, "time": time}
            if day.isdigit() and weekday == "*":
                return _("monthly on day %(day)s at %(time)s") % {"day": day, "time": time}
    return expression
