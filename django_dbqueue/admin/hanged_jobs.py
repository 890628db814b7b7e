from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, cast
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.frames import innermost_frame
from ..models import HangedJob, Job, StackTrace
from ..models.enums import OnLost
from ..models.expressions import Now
from . import columns, progress
from .actions import STOP, STOP_AND_RETRY
from .addresses import page_address
from .backend_choice import with_backend
from .base_actions import ActionAdmin
from .config import options
from .filters import QueueFilter
from .formatting import duration


class SeenJob(Protocol):
    """A hanged job with the stack of its task, as its worker last read it; "" without one."""

    pk: UUID
    stack_text: str


@admin.display(description=gettext_lazy("doing"))
def doing(job: SeenJob) -> str:
    """Return the progress of the job, and the innermost frame of the project."""
    shown = progress.summary(cast(Job, job))
    frame = innermost_frame(job.stack_text)
    code = format_html('<code class="dbq-said" dir="ltr">{}</code>', frame) if frame else ""
    return format_html_join("", "<div>{}</div>", ((each,) for each in (shown, code) if each)) or "–"


@admin.display(description=gettext_lazy("what happens next"))
def outlook(job: HangedJob) -> str:
    if job.retry_requested:
        return _("It is being stopped, and runs again.")
    if job.stop_requested_at:
        return _("It is being stopped.")
    if job.process and job.process.is_alive(columns.seen_at(job)):
        return _("It runs until it ends or is stopped. Its page shows its stack trace.")
    if job.on_lost == OnLost.FAIL:
        return _("Its process is dead. The attempt is lost, and the job fails: it runs only once.")
    return _("Its process is dead. The attempt is lost, and the job is retried.")


@admin.register(HangedJob)
class HangedJobAdmin(ActionAdmin):
    actions = (STOP, STOP_AND_RETRY)
    list_display = (
        columns.linked_job,
        "queue",
        columns.running_for,
        columns.owner_and_heartbeat,
        doing,
        outlook,
    )
    list_display_links = None
    list_filter = (QueueFilter,)
    ordering = ("started_at", "pk")

    def get_queryset(self, request: HttpRequest) -> QuerySet[HangedJob]:
        rows: Any = super().get_queryset(request)
        config = options()
        by_queue = {queue: config.of(queue).hanged_after for queue in config.per_queue}
        hanged = rows.hanged(after_seconds=config.hanged_after, by_queue=by_queue)
        return hanged.select_related("process", "progress").annotate(seen_at=Now())  # type: ignore[no-any-return]

    def list_queryset(self, rows: QuerySet[HangedJob]) -> QuerySet[HangedJob]:
        return rows.defer(*columns.NOT_LISTED)

    def with_details(self, request: HttpRequest, rows: list[SeenJob]) -> list[SeenJob]:
        stacks = StackTrace.objects.of(cast(list[Job], rows))
        for job in rows:
            job.stack_text = stacks.get(job.pk, "")
        return rows

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        hint = _(
            "Jobs that have been running for more than {} (or hanged_after of their queue) "
            "or for many times as long as usual, or whose process sends no heartbeat."
        )
        limit = duration(timedelta(seconds=options().hanged_after))
        context = {"hint": hint.format(limit), **(extra_context or {})}
        return super().changelist_view(request, context)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, object] | None = None,
    ) -> HttpResponse:
        """Redirect to the job's page, which also shows a job that no longer hangs."""
        job = page_address("job_change", unquote(object_id))
        return HttpResponseRedirect(with_backend(job))

    def has_view_permission(self, request: HttpRequest, obj: HangedJob | None = None) -> bool:
        return request.user.has_perm("dbqueue.view_job")
