from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..models import Batch
from . import columns, formatting
from .actions import DISCARD, RETRY
from .base_actions import OperatingAdmin
from .batch_progress import bar, followers, numbers, unsuccessful
from .filters import FinishedFilter

DISCARD_REST = replace(
    DISCARD,
    label=_("Discard the rest"),
    means=_(
        "All of its jobs that wait are discarded. What runs already goes on, and when it has ended, the batch has finished."
    ),
    target=lambda batches: batches.jobs().waiting(),  # type: ignore[attr-defined]
)
RETRY_FAILED = replace(
    RETRY,
    label=_("Retry all failed jobs"),
    means=_(
        "A retried job is ready again. What follows a batch that has finished already does not follow once more."
    ),
    target=lambda batches: batches.jobs().failed(),  # type: ignore[attr-defined]
    asks_from=1,
)


@admin.display(description=_("batch"))
def described(batch: Batch) -> str:
    if not batch.description:
        return formatting.brief(batch.pk)
    return format_html("{}<br>{}", batch.description, formatting.brief(batch.pk))


@admin.display(description=_("id"))
def identity(batch: Batch) -> str:
    return format_html('<span class="dbq-id">{}</span>', batch.pk)


@admin.display(description=_("state"))
def state(batch: Any) -> str:
    if batch.is_abandoned:
        what = (
            _("Finished, abandoned by its opener")
            if batch.finished_at
            else _("Abandoned by its opener")
        )
        return formatting.badge(what, "✕", "bad")
    if batch.finished_at and any(unsuccessful(batch).values()):
        return formatting.badge(_("Finished, not all well"), "✕", "bad")
    if batch.finished_at:
        return formatting.badge(_("Finished"), "✓", "good")
    return (
        formatting.badge(_("Under way"), "▸", "runs")
        if batch.sealed_at
        else formatting.badge(_("Being filled"), "◷", "waits")
    )


@admin.display(description=_("state"))
def state_and_bar(batch: Any) -> str:
    return format_html("{}<br>{}", state(batch), bar(batch))


@admin.register(Batch)
class BatchAdmin(OperatingAdmin):
    hint = _(
        "Jobs that belong together, and what follows when all of them have ended. Newest first."
    )
    verbs = (RETRY_FAILED, DISCARD_REST)
    actions = ("retry", "discard")
    list_display = (
        described,
        state_and_bar,
        numbers,
        columns.age("created_at", _("created")),
        columns.age("finished_at", _("finished")),
    )
    list_filter = (FinishedFilter,)
    list_per_page = 25
    ordering = ("-pk",)
    search_fields = ("description",)
    search_help_text = _("A part of its description, or its id.")
    fieldsets: ClassVar[Any] = (
        (
            None,
            {
                "fields": (
                    (state, bar, identity),
                    (
                        columns.time("created_at", _("created")),
                        columns.time("finished_at", _("finished")),
                    ),
                )
            },
        ),
    )

    def completed(self, rows: list[Any]) -> list[Any]:
        for batch in rows:
            batch.tallied = batch.tally()
        return rows

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Batch | None:
        found: Batch | None = super().get_object(request, object_id, from_field)
        return self.completed([found])[0] if found else None

    def get_search_results(
        self, request: HttpRequest, rows: QuerySet[Batch], text: str
    ) -> tuple[QuerySet[Batch], bool]:
        try:
            return rows.filter(pk=UUID(text.strip())), False
        except ValueError:
            return rows.filter(
                Q(description__icontains=text.strip()) if text.strip() else Q()
            ), False

    def beside(self, request: HttpRequest, one: Batch) -> dict[str, Any]:
        may = request.user.has_perm("dbqueue.view_job")
        return {
            **super().beside(request, one),
            "may_view_jobs": may,
            "numbers": numbers(one),
            "followers": followers(one),
        }

    @admin.action(description=_("Retry all failed jobs of selected batches"), permissions=["retry"])
    def retry(self, request: HttpRequest, rows: QuerySet[Batch]) -> HttpResponse | None:
        return self.carry_out(request, rows, RETRY_FAILED)

    @admin.action(description=_("Discard the rest of selected batches"), permissions=["discard"])
    def discard(self, request: HttpRequest, rows: QuerySet[Batch]) -> HttpResponse | None:
        return self.carry_out(request, rows, DISCARD_REST)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.retry_job")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.discard_job")
