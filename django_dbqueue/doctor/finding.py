"""Results of the checks of a database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from django.utils.translation import ngettext


class Severity(str, Enum):
    """Severity of a result, in the words of monitoring systems.

    CRITICAL: jobs do not run. UNKNOWN: the check of the queue failed. WARNING: anything else to
    change.
    """

    CRITICAL = "critical"
    UNKNOWN = "unknown"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """A recommended change.

    what: the finding, with its figure. why: its effect on a queue. remedy: a statement or a setting
    to copy. subject: the queue, row or process kind that it is about, if a check finds several; it
    stays the same while figures change. is_event: whether it reports an event, which is not over
    when it is no longer found. further: the subjects that it counts without naming them.
    """

    what: str
    why: str
    remedy: str
    severity: Severity = Severity.WARNING
    subject: str = ""
    is_event: bool = False
    further: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotChecked:
    """A check that could not run: it is unknown whether a change is needed.

    what: the unchecked object, with the reason. remedy: a statement that makes it visible, if any.
    severity: UNKNOWN if nothing is known of the queue, None if only a recommendation is missing.
    """

    what: str
    remedy: str = ""
    severity: Severity | None = None


def format_duration(seconds: float) -> str:
    """Format a duration: 2:03:11, or 3 days, 1:00:00."""
    days, rest = divmod(round(seconds), 86400)
    clock = str(timedelta(seconds=rest))
    text = ngettext("%(days)d day, %(clock)s", "%(days)d days, %(clock)s", days)
    return text % {"days": days, "clock": clock} if days else clock


def one_line(text: str) -> str:
    """Replace line breaks and control characters, which terminals would obey, by spaces."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def megabytes(size: float) -> str:
    return f"{size / 2**20:,.0f} MB"
