"""Stages of a job's pipeline, as shown on the job's page."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _

from ..models import Execution, Job
from . import columns, formatting
from .attempts import Attempt

# Maximum number of linked child jobs.
CHILDREN = 50


def stages_of(job: Job, attempts: list[Attempt]) -> list[dict[str, Any]]:
    """Return the stages of a job in order; empty for a job without stages."""
    executions = [attempt.execution for attempt in attempts if not attempt.is_earlier]
    passed = {each.stage for each in executions if each.outcome == Execution.Outcome.SUCCESSFUL}
    return [
        {
            "name": formatting.short(stage["task"]),
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
    """Return links to the child jobs that a job has become at its stage, with their states."""
    ids = _ids(job)
    found = Job.objects.only("task", "state").in_bulk(ids[:CHILDREN]) if ids else {}
    if not found:
        return ""
    links = [
        (
            reverse("admin:dbqueue_job_change", args=[pk]),
            formatting.brief(pk),
            columns.state(found[pk]),
        )
        for pk in found
    ]
    more = _("and %d more") % (len(ids) - len(found)) if len(ids) > len(found) else ""
    items = format_html_join("", '<li><a href="{}">{}</a> {}</li>', links)
    return format_html('<ul class="dbq-list">{}</ul>{}', items, more)


def _ids(job: Job) -> list[UUID]:
    """Return the ids in the result of a job that ended at a stage before its last."""
    ended_early = job.state == Job.State.SUCCESSFUL and (job.stage or 0) + 1 < len(job.stages)
    if not ended_early or not isinstance(job.result, list):
        return []
    try:
        return [UUID(each) for each in job.result]
    except (ValueError, TypeError, AttributeError):
        return []
