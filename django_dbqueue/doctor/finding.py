"""Results of the checks of a database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Finding:
    """A recommended change.

    what: the finding, with its figure. why: its effect on a queue. remedy: a statement or a setting
    to copy.
    """

    what: str
    why: str
    remedy: str


@dataclass(frozen=True)
class NotChecked:
    """A check that could not run: it is unknown whether a change is needed.

    what: the unchecked object, with the reason. remedy: a statement that makes it visible, if any.
    """

    what: str
    remedy: str = ""


def format_duration(seconds: float) -> str:
    """Format a duration: 2:03:11, or 3 days, 1:00:00."""
    return str(timedelta(seconds=round(seconds)))


def megabytes(size: float) -> str:
    return f"{size / 2**20:,.0f} MB"
