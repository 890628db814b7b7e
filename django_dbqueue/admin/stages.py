"""Stages of a job's pipeline, as shown on the job's page."""

from __future__ import annotations

from uuid import UUID

from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _

from ..models import Execution, Job
from . import columns, formatting
from .attempts import Attempt

MOST_CHILDREN = 50


def stages_of(job: Job, attempts: list[Attempt]) -> list[dict[str, object]]:
    """Return the stages of a job in order; empty for a job without stages."""
    executions = [attempt.execution for attempt in attempts if not attempt.is_earlier]
    passed = {each.stage for each in executions if each.outcome == Execution.Outcome.SUCCESSFUL}
    return [
        {
            "name": formatting.last_part(stage["task"]),
            "queue": stage["queue"],
            "is_current": place == job.stage,
            "badge": _badge(job, place, place in passed),
        }
        for place, stage in enumerate(job.stages)
    ]


def _badge(job: Job, place: int, has_passed: bool) -> str:
    if place == job.stage:
        return columns.state(job)
    return formatting.badge(_("Done"), "✓", "good") if has_passed else ""


def children_of(job: Job) -> str:
    """Return links to the child jobs of a job that has fanned out, with their states."""
    ids = _child_ids(job)
    found = Job.objects.only("task", "state").in_bulk(ids[:MOST_CHILDREN]) if ids else {}
    if not found:
        return ""
    links = [
        (formatting.link("job", pk, formatting.short_id(pk)), columns.state(child))
        for pk, child in found.items()
    ]
    more = _("and %d more") % (len(ids) - len(found)) if len(ids) > len(found) else ""
    items = format_html_join("", "<li>{} {}</li>", links)
    return format_html('<ul class="dbq-list">{}</ul>{}', items, more)


def _child_ids(job: Job) -> list[UUID]:
    """Return the ids in the result of a job that ended at a stage before its last."""
    ended_early = job.state == Job.State.SUCCESSFUL and (job.stage or 0) + 1 < len(job.stages)
    if not ended_early or not isinstance(job.result, list):
        return []
    try:
        return [UUID(each) for each in job.result]
    except (ValueError, TypeError, AttributeError):
        return []
