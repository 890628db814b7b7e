from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import HangedJob
from ..models.enums import OnLost
from ..models.expressions import Now
from . import columns
from .base import ReadingAdmin
from .config import options
from .filters import QueueFilter
from .formatting import duration


@admin.display(description=gettext_lazy("what will happen"))
def prospect(job: Any) -> str:
    if job.stop_asked_at:
        return _("It is being stopped.")
    if job.process and job.process.is_alive(job.seen_at):
        return _("It runs on until it ends, or is stopped. Its page shows where it is.")
    if job.on_lost == OnLost.FAIL:
        return _(
            "Its process is dead: it is recorded as lost, and fails, as it must not run twice."
        )
    return _("Its process is dead: it is recorded as lost, and runs again.")


@admin.register(HangedJob)
class HangedJobAdmin(ReadingAdmin):
    list_display = (
        columns.linked_job,
        "queue",
        columns.running_for,
        columns.owner_and_heartbeat,
        prospect,
    )
    list_display_links = None
    list_filter = (QueueFilter,)
    ordering = ("started_at", "pk")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: Any = super().get_queryset(request)
        longest, own = (
            options().hanged_after,
            {queue: options().of(queue).hanged_after for queue in options().per_queue},
        )
        hanged = rows.hanged(after_seconds=longest, by_queue=own)
        return hanged.select_related("process").annotate(seen_at=Now())  # type: ignore[no-any-return]

    def listed(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        return rows.defer(*columns.NOT_LISTED)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        hint = _(
            "Jobs that have been running for more than {} (or what their queue allows), or for many times as long as usual, "
            "or whose process no longer says that it is alive."
        )
        context = {
            "hint": hint.format(duration(timedelta(seconds=options().hanged_after))),
            **(extra_context or {}),
        }
        return super().changelist_view(request, context)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Redirect to the job's page, which also shows a job that does not hang any more."""
        return HttpResponseRedirect(
            reverse("admin:dbqueue_job_change", args=[object_id], current_app=self.admin_site.name)
        )

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("dbqueue.view_job")
