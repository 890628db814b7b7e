"""Source of jobs (OPTIONS["note_source"]): on a job's page, and as a filter of the list."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from ..core.source import stored
from ..models import Job
from ..models.job import JobQuerySet
from . import formatting

# No index holds sources: a filter reads at most this many jobs, in the order of their ids.
MOST = 100_000
# Newest jobs whose sources are offered, and the number of sources.
SAMPLE, OFFERED = 2000, 30
# How far clocks of hosts may differ: ids have the time of the host that enqueues.
SKEW = timedelta(minutes=1)
KINDS = {
    "job": _("job"),
    "recurring": _("recurring task"),
    "user": _("user"),
    "path": _("request"),
    "command": _("command"),
    "program": _("program"),
}


@admin.display(description=_("enqueued by"))
def enqueued_by(job: Job) -> str:
    """Return the parts of a job's source, with links to all jobs of each part."""
    source = _parts(job.source)
    parts = [(label, _linked(source, name)) for name, label in KINDS.items() if name in source]
    text = format_html_join(" · ", "{} {}", parts)
    process = formatting.quiet(source.get("process", ""))
    return format_html("{} {}", text, process)


@admin.display(description=_("jobs that it enqueued"))
def enqueued_jobs(job: Job) -> str:
    return formatting.jobs_link(_("Show"), source=f"job:{job.pk}")


def recent_sources() -> list[tuple[str, str]]:
    """Return the most frequent sources of the newest jobs, as filter and text."""
    rows = Job.objects.order_by("-pk").values_list("source", flat=True)[:SAMPLE]
    sources = Counter(
        (name, source[name], _text(source, name))
        for source in map(_parts, rows)
        for name in KINDS
        if name in source and name != "job"
    )
    return [
        (f"{name}:{value}", f"{KINDS[name]} {text}")
        for (name, value, text), _number in sources.most_common(OFFERED)
    ]


def jobs_from(rows: JobQuerySet, kind: str, value: str) -> JobQuerySet:
    """Filter jobs by a part of their source.

    For ``job``, among the first MOST jobs since that job last started. Raises ValueError for an
    unknown kind, and for a job that is not an id.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}.")
    wanted = {f"source__{kind}": stored(value)}
    if kind != "job":
        return rows.filter(**wanted)
    first = _start_of(UUID(value))
    ids = Job.objects.filter(pk__gte=first).order_by("pk").values_list("pk", flat=True)
    last = ids[MOST : MOST + 1].first()
    bounds = {"pk__gte": first, **({"pk__lt": last} if last else {})}
    return rows.filter(**bounds, **wanted)


def _start_of(job: UUID) -> UUID:
    """Return the lowest id of a job that this job can have enqueued in its last attempt."""
    started = Job.objects.filter(pk=job).values_list("started_at", flat=True).first()
    return UUID(int=int((started - SKEW).timestamp() * 1000) << 80) if started else job


def _linked(source: dict[str, str], name: str) -> str:
    if name == "job":
        return formatting.link("job", source[name], formatting.short_id(source[name]))
    return formatting.jobs_link(_text(source, name), source=f"{name}:{source[name]}")


def _text(source: dict[str, str], name: str) -> str:
    return source.get("username", source[name]) if name == "user" else source[name]


def _parts(source: Any) -> dict[str, str]:
    """Return the parts that are text: a row inserted by hand may hold anything."""
    return (
        {name: value for name, value in source.items() if isinstance(value, str) and value}
        if isinstance(source, dict)
        else {}
    )
