"""Accepted cron expressions: unambiguous ones, which all cron implementations read alike."""

from __future__ import annotations

import re
from functools import lru_cache
from zoneinfo import available_timezones

from ..exceptions import InvalidSchedule

SECOND, MINUTE, HOUR, DAY, MONTH, WEEKDAY = range(6)
FIELDS = ("seconds", "minutes", "hours", "day of the month", "month", "day of the week")
# What a field may hold, in words.
ALLOWED = (
    "numbers from 0 to 59, ranges such as 10-20, or steps such as */5",
    "numbers from 0 to 59, ranges such as 10-20, or steps such as */5",
    "numbers from 0 to 23, ranges such as 9-17, or steps such as */2",
    "numbers from 1 to 31, ranges such as 1-7, or L for the last day",
    "numbers from 1 to 12, or jan to dec",
    "numbers from 0 to 7, sun to sat, or such as mon#1 for the first Monday",
)
BOUNDS = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
NAMES = {
    **dict(
        zip(
            ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
            range(1, 13),
            strict=True,
        )
    ),
    **dict(zip(["sun", "mon", "tue", "wed", "thu", "fri", "sat"], range(7), strict=True)),
}
# croniter derives the times of these from the name, as for H.
ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
# An H, alone or with a range, is not parsed further.
HASHED = re.compile(r"h(\(\d+-\d+\))?")
# A time zone before or after the expression, as some crons accept it.
TIME_ZONE = re.compile(r"(?:^\s*(?:cron_)?tz=|(?=\b[a-z]+/[a-z]))(\S+)", re.I)
# Words of schedules in plain English, as some schedulers accept them.
WORDS = re.compile(
    r"\b(every|each|at|on|of|and|(second|minute|hour|day|week|month|year|weekday)s?"
    r"|(hour|dai|week|month|year)ly|noon|midnight|[\d:]+\s*[ap]m)\b",
    re.I,
)


def checked(expression: str) -> str:
    """Return the expression in lower case, without aliases.

    Raises InvalidSchedule, with the reason, for an ambiguous expression.
    """
    if not isinstance(expression, str):
        raise InvalidSchedule(
            f"A cron expression is text such as '0 9 * * mon-fri', not {expression!r}."
        )
    return _checked(expression)


@lru_cache(maxsize=256)
def _checked(expression: str) -> str:
    text = ALIASES.get(expression.strip().lower(), expression)
    if WORDS.search(text):
        raise _refused(
            expression,
            "words. Write numbers, the minute first: '0 9 * * *' is every day at 9:00, "
            "'30 17 * * mon' is Monday at 17:30. For an interval, use every=timedelta(...)",
        )
    if zone := _zone_in(text):
        rest = " ".join(
            re.sub(rf"(?:(?:cron_)?tz=)?{re.escape(zone)}", "", text, flags=re.I).split()
        )
        raise _refused(expression, f"a time zone: give it as timezone={zone!r}, beside {rest!r}")
    fields = text.lower().split()
    if len(fields) == 7:
        raise _refused(
            expression,
            "seven fields, and the place of the year is ambiguous. "
            "Use starts_at and ends_at instead",
        )
    if len(fields) not in (5, 6):
        what = (
            repr(expression)
            if text.lstrip().startswith("@")
            else f"{len(fields)} field{'s' if len(fields) != 1 else ''}"
        )
        aliases = ", ".join(ALIASES)
        raise _refused(
            expression,
            f"{what}. Give five fields, six with the seconds first, or one of {aliases}",
        )
    if foreign := re.search(r"[^\x00-\x7f]", " ".join(text.split())):
        raise InvalidSchedule(
            f"{expression!r} is not a cron expression: it has {foreign[0]!r}. "
            "Write digits from 0 to 9, letters from a to z, and hyphens."
        )
    for place, field in enumerate(fields, start=6 - len(fields)):
        for term in field.split(","):
            _check(expression, place, term, ungrouped=term == field)
    _check_days(expression, *fields[-3::2])
    return " ".join(fields)


def _zone_in(expression: str) -> str:
    if found := TIME_ZONE.search(expression):
        return found[1]
    *_fields, last = expression.split() or [""]
    if len(last) == 1 or not last.isalpha() or last.lower() in NAMES:
        return ""
    return next((zone for zone in available_timezones() if zone.lower() == last.lower()), "")


def follows_elapsed_time(expression: str) -> bool:
    """Return True if a checked expression steps through the day.

    Other expressions name times of the day.
    """
    return any(
        field.startswith("*") or re.match(r"h.*/", field) for field in expression.split()[:-3]
    )


def _check(expression: str, place: int, term: str, *, ungrouped: bool) -> None:
    base, slash, step = term.partition("/")
    least, most = BOUNDS[place]
    where = f"{term!r} as {FIELDS[place]}"
    if re.match(r"r\b", term):
        raise _refused(
            expression,
            f"{where}: R is random at each reading. Write H, which is derived from the name",
        )
    if place == DAY and term == "h":
        raise _refused(
            expression,
            f"{where}: it could be the 31st, which some months do not have. Write H(1-28)",
        )
    if base in ("*", "?") and not ungrouped:
        raise _refused(
            expression,
            f"{where} in a list: it already includes the other values. Remove them",
        )
    if slash and step.isdigit() and int(step) > most - least:
        raise _refused(
            expression,
            f"{where}: the step exceeds the range. For an interval, use every=timedelta(...)",
        )
    if base == "*" or HASHED.fullmatch(base):
        return
    low, dash, high = base.partition("-")
    if slash and not dash:
        raise _refused(
            expression,
            f"{where}, which is ambiguous: {low} alone, or from {low} on. "
            f"Write {low}-{most}/{step}",
        )
    if (
        dash
        and (first := _number(low, place)) is not None
        and (last := _number(high, place)) is not None
    ):
        if first == last or (place == WEEKDAY and {first, last} == {0, 7} and first == 7):
            raise _refused(
                expression,
                f"{where}, which is ambiguous: {low} alone, or all values. Write {low}, or *",
            )
        if slash and first > last:
            raise _refused(
                expression,
                f"{where}: its steps after the wrap-around are ambiguous. List the values",
            )


def _check_days(expression: str, day: str, weekday: str) -> None:
    special = re.search(r"[lw]", day) or re.search(r"#|l", weekday)
    if special and day not in ("*", "?") and weekday not in ("*", "?"):
        raise _refused(
            expression,
            f"{day!r} as day of the month and {weekday!r} as day of the week: with L, W or #, it "
            "is ambiguous whether one or both must match. Write * for one of them",
        )


def _number(text: str, place: int) -> int | None:
    if text.isdigit():
        return int(text)
    return NAMES.get(text) if place in (MONTH, WEEKDAY) else None


def _refused(expression: str, why: str) -> InvalidSchedule:
    return InvalidSchedule(f"The cron expression {expression!r} has {why}.")
