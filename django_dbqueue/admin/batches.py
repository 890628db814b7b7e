from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Protocol
from uuid import UUID

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.progress_value import ProgressValue
from ..models import Batch, Job
from ..models.bounded_count import BoundedCount
from ..models.enums import FINISHED, UNSUCCESSFUL, State
from ..models.job import JobQuerySet
from . import columns, formatting, progress
from .actions import DISCARD_BATCH, RETRY_BATCH
from .base import Fields
from .base_actions import ActionAdmin
from .counting import counts
from .filters import FinishedFilter

# Unsuccessful states first, then the unfinished ones, then the successful one.
STATES = (
    State.FAILED,
    State.DISCARDED,
    State.RUNNING,
    State.READY,
    State.BLOCKED,
    State.SCHEDULED,
    State.SUCCESSFUL,
)


class CountedBatch(Protocol):
    """A batch with the number of its jobs in each state."""

    pk: UUID
    sealed_at: datetime | None
    finished_at: datetime | None
    jobs_by_state: dict[str, int]

    @property
    def is_abandoned(self) -> bool: ...
    def jobs(self) -> JobQuerySet: ...
    def follower(self, name: str) -> str | None: ...


@admin.display(description=gettext_lazy("batch"))
def description(batch: Batch) -> str:
    if not batch.description:
        return formatting.short_id(batch.pk)
    return format_html("{}<br>{}", batch.description, formatting.short_id(batch.pk))


@admin.display(description=gettext_lazy("id"))
def full_id(batch: Batch) -> str:
    return format_html('<span class="dbq-id" dir="ltr">{}</span>', batch.pk)


@admin.display(description=gettext_lazy("state"))
def state(batch: CountedBatch) -> str:
    if batch.is_abandoned:
        text = _("Finished, abandoned") if batch.finished_at else _("Abandoned")
        return formatting.badge(text, "✕", "bad")
    if batch.finished_at and any(batch.jobs_by_state.get(each) for each in UNSUCCESSFUL):
        return formatting.badge(_("Finished, not all successful"), "✕", "bad")
    if batch.finished_at:
        return formatting.badge(_("Finished"), "✓", "good")
    if batch.sealed_at:
        return formatting.badge(_("In progress"), "▸", "runs")
    return formatting.badge(_("Adding jobs"), "◷", "waits")


@admin.display(description=gettext_lazy("ended"))
def bar(batch: CountedBatch) -> str:
    """Return the progress bar, or a text if there are more jobs than are counted."""
    numbers = batch.jobs_by_state
    if any(isinstance(number, BoundedCount) for number in numbers.values()):
        return _("too many jobs to count")
    if not numbers:
        return _("no jobs")
    ended = sum(numbers.get(state, 0) for state in FINISHED)
    return progress.bar(ProgressValue(ended, sum(numbers.values())))


@admin.display(description=gettext_lazy("state"))
def state_and_bar(batch: CountedBatch) -> str:
    return format_html("{}<br>{}", state(batch), bar(batch))


@admin.display(description=gettext_lazy("jobs"))
def jobs(batch: CountedBatch) -> str:
    """Return the number of jobs in each state, each linked to the jobs."""
    badges = [
        (each, formatting.state(format_html("{}: {}", each.label, number), each))
        for each in STATES
        if (number := batch.jobs_by_state.get(each))
    ]
    links = [
        (formatting.jobs_link(badge, batch=str(batch.pk), state=each.value),)
        for each, badge in badges
    ]
    return format_html_join(" ", '<span class="dbq-number">{}</span>', links) or "–"


@admin.register(Batch)
class BatchAdmin(ActionAdmin):
    hint = gettext_lazy(
        "Groups of jobs, with callbacks for when all have ended. Newest first. "
        "Search for a part of the description, or the id."
    )
    actions = (RETRY_BATCH, DISCARD_BATCH)
    list_display = (
        description,
        state_and_bar,
        jobs,
        columns.age("created_at", gettext_lazy("created")),
        columns.age("finished_at", gettext_lazy("finished")),
    )
    list_filter = (FinishedFilter,)
    list_per_page = 25
    ordering = ("-pk",)
    search_fields = ("description",)
    times = (
        columns.time("created_at", gettext_lazy("created")),
        columns.time("finished_at", gettext_lazy("finished")),
    )
    fieldsets: ClassVar[Fields] = ((None, {"fields": ((state, bar, full_id), times)}),)

    def with_details(self, request: HttpRequest, rows: list[CountedBatch]) -> list[CountedBatch]:
        """Return the batches with the number of their jobs in each state, in one statement."""
        of = [(batch, state) for batch in rows for state in STATES]
        # By state, as the index is: no job's row is read.
        found = counts(
            [
                batch.jobs().filter(state=state).order_by("state").values("state")
                for batch, state in of
            ]
        )
        for batch in rows:
            batch.jobs_by_state = {}
        for (batch, state), number in zip(of, found, strict=True):
            if number:
                batch.jobs_by_state[state.value] = number
        return rows

    def get_search_results(
        self, request: HttpRequest, rows: QuerySet[Batch], text: str
    ) -> tuple[QuerySet[Batch], bool]:
        text = text.strip()
        try:
            return rows.filter(pk=UUID(text)), False
        except ValueError:
            return rows.filter(Q(description__icontains=text) if text else Q()), False

    def page_context(self, request: HttpRequest, row: CountedBatch) -> dict[str, object]:
        return {
            **super().page_context(request, row),
            "may_view_jobs": request.user.has_perm("dbqueue.view_job"),
            "jobs": jobs(row),
            "callbacks": _callbacks(row),
        }


def _callbacks(batch: CountedBatch) -> list[dict[str, str]]:
    """Return the callbacks, each with its job if it has been enqueued."""
    conditions = {
        "on_finish": _("When all jobs have ended"),
        "on_success": _("If all jobs are successful"),
    }
    ids = {name: batch.follower(name) for name in conditions}
    found = Job.objects.only("task", "state").in_bulk([pk for pk in ids.values() if pk])
    enqueued = {str(pk): job for pk, job in found.items()}
    return [
        {
            "condition": condition,
            "task": formatting.last_part(getattr(batch, name)["task"]),
            "job": _callback_job(batch, ids[name], enqueued),
        }
        for name, condition in conditions.items()
        if getattr(batch, name)
    ]


def _callback_job(batch: CountedBatch, pk: str | None, enqueued: dict[str, Job]) -> str:
    if pk in enqueued:
        link = formatting.link("job", pk, formatting.short_id(pk))
        return format_html("{} {}", link, columns.state(enqueued[pk]))
    if pk:
        return _("Enqueued; the job has been deleted.")
    if batch.finished_at:
        return _("Not enqueued: not all jobs were successful.")
    return _("Not enqueued yet.")
