"""Text for limits and their taken slots: the same on a job's page and on the page of limits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _

from ..limits import RATE
from ..models import Job, Semaphore, Slot
from . import formatting


def named(key: str) -> str:
    return key.removeprefix(RATE)


def terms(most: int | None, every: timedelta | None, burst: int = 1) -> str:
    if most is not None:
        return _("%d at a time") % most
    said = _("one every %s") % formatting.duration(every or timedelta())
    return (
        _("%(said)s, %(burst)d together after a pause") % {"said": said, "burst": burst}
        if burst > 1
        else said
    )


def taken(number: int, most: int | None) -> str:
    """Return the number of taken slots out of all; none for a rate, which holds no slots."""
    if most is None:
        return "–"
    said = _("%(number)d of %(most)d taken") % {"number": number, "most": most}
    return (
        formatting.badge(said, "⊘", "waits")
        if number >= most
        else formatting.badge(said, "○", "good")
    )


def limits_of(job: Job, linked: bool) -> list[str]:
    """Return the limits of a job, if any, each with its current use, in two queries."""
    if not job.limits:
        return []
    keys = [limit["key"] for limit in job.limits]
    rows, numbers = Semaphore.objects.in_bulk(keys), Slot.objects.count_by_key(keys)
    return [
        _said(limit, rows.get(limit["key"]), numbers[limit["key"]], linked) for limit in job.limits
    ]


def _said(limit: dict[str, Any], row: Semaphore | None, number: int, linked: bool) -> str:
    """Return the text for one limit.

    The values of the row apply. Without a row, as long as no job was claimed, those of the job
    apply.
    """
    every = timedelta(seconds=limit["every"]) if "every" in limit else None
    most, every, burst = (
        (row.most, row.every, row.burst)
        if row
        else (limit.get("most"), every, limit.get("burst", 1))
    )
    name = format_html("<strong>{}</strong>", named(limit["key"]))
    if row and linked:
        address = reverse("admin:dbqueue_semaphore_change", args=[quote(row.pk)])
        name = format_html('<a href="{}">{}</a>', address, name)
    said = format_html("{}: {}", name, terms(most, every, burst))
    if most is not None:
        said = format_html("{} {}", said, taken(number, most))
    return (
        format_html("{}, {}", said, _("and it is discarded if there is none"))
        if limit.get("discard")
        else said
    )
