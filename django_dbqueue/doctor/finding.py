"""What a look at a database finds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Finding:
    """Something to change.

    what: what was found, with its figure. why: why it matters to a queue. remedy: a statement or a setting, to copy.
    """

    what: str
    why: str
    remedy: str


@dataclass(frozen=True)
class NotChecked:
    """Something that could not be looked at: nobody knows whether there is anything to change.

    what: what it was, and why not. remedy: what makes it visible, if anything does.
    """

    what: str
    remedy: str = ""


def lasting(seconds: float) -> str:
    """2:03:11, or 3 days, 1:00:00."""
    return str(timedelta(seconds=round(seconds)))


def megabytes(size: float) -> str:
    return f"{size / 2**20:,.0f} MB"
