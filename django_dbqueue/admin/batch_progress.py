"""Progress of a batch: a bar, the number of jobs in each state, and the follow-up tasks."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.progress_value import ProgressValue
from ..models import Batch, Job
from ..models.bounded_count import BoundedCount
from ..models.enums import FINISHED, UNSUCCESSFUL, State
from . import columns, formatting, progress

# Unsuccessful states first, then those under way, then the successful one.
ORDER = (
    State.FAILED,
    State.DISCARDED,
    State.RUNNING,
    State.READY,
    State.BLOCKED,
    State.SCHEDULED,
    State.SUCCESSFUL,
)


@admin.display(description=gettext_lazy("ended"))
def bar(batch: Any) -> str:
    """Return the progress bar, or a text if there are more jobs than are counted."""
    counted: dict[str, int] = batch.tallied
    if any(isinstance(number, BoundedCount) for number in counted.values()):
        return _("very many jobs")
    if not counted:
        return _("no jobs")
    ended = sum(counted.get(state, 0) for state in FINISHED)
    return progress.bar(ProgressValue(ended, sum(counted.values())))


@admin.display(description=gettext_lazy("jobs"))
def numbers(batch: Any) -> str:
    """Return the number of jobs in each state, each linked to the jobs."""
    address = reverse("admin:dbqueue_job_changelist")
    found = [(state, batch.tallied[state]) for state in ORDER if batch.tallied.get(state)]
    links = [
        (
            address,
            urlencode({"batch": batch.pk, "state": state.value}),
            formatting.state(f"{number} {state.label}", state),
        )
        for state, number in found
    ]
    return format_html_join(" ", '<a class="dbq-number" href="{}?{}">{}</a>', links) or "–"


def unsuccessful(batch: Any) -> dict[str, int]:
    return {state: batch.tallied.get(state, 0) for state in UNSUCCESSFUL}


def followers(batch: Any) -> list[dict[str, Any]]:
    """Return the follow-up tasks, each with its status: its job, if it has been enqueued."""
    jobs = Job.objects.only("task", "state").in_bulk(
        list(filter(None, map(batch.follower, ("on_finish", "on_success"))))
    )
    by_id = {str(pk): job for pk, job in jobs.items()}
    when = {"on_finish": _("When all have ended"), "on_success": _("If all are successful")}
    return [
        {"when": said, "task": formatting.short(given["task"]), "job": _became(batch, name, by_id)}
        for name, said in when.items()
        if (given := getattr(batch, name))
    ]


def _became(batch: Batch, name: str, jobs: dict[str, Job]) -> str:
    pk = batch.follower(name)
    if pk in jobs:
        address = reverse("admin:dbqueue_job_change", args=[pk])
        return format_html(
            '<a href="{}">{}</a> {}', address, formatting.brief(pk), columns.state(jobs[pk])
        )
    if pk:
        return _("It was enqueued, and its job is gone.")
    return _("It does not follow: not all were successful.") if batch.finished_at else _("Not yet.")
