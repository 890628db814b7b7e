from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import Job, Semaphore, Slot
from ..models.bounded_count import count
from ..models.expressions import Now
from . import columns, formatting
from .base import ReadingAdmin
from .filters import WaitedForFilter
from .limit_text import taken as said_taken
from .limit_text import terms

SHOWN = 20


@admin.display(description=gettext_lazy("limit"))
def name(row: Semaphore) -> str:
    return str(row)


@admin.display(description=gettext_lazy("allows"))
def allows(row: Semaphore) -> str:
    return terms(row.most, row.every, row.burst)


@admin.display(description=gettext_lazy("now"))
def taken(row: Any) -> str:
    if row.every and row.earliest and row.earliest > row.seen_at:
        return format_html(_("the next starts {}"), formatting.ago(row.earliest, row.seen_at))
    return said_taken(row.number, row.most)


@admin.display(description=gettext_lazy("jobs that wait"))
def waiting(row: Any) -> Any:
    if not row.waits:
        return 0
    query = urlencode({"waits_for": row.pk})
    return format_html(
        '<a href="{}?{}">{}</a>', reverse("admin:dbqueue_job_changelist"), query, str(row.waits)
    )


@admin.display(description=gettext_lazy("next in line, enqueued"))
def next_in_line(row: Any) -> str:
    return formatting.ago(row.next_since, row.seen_at)


@admin.register(Semaphore)
class SemaphoreAdmin(ReadingAdmin):
    hint = gettext_lazy(
        "What keeps jobs waiting: so many at a time, or in a time. Whoever ends gives room to the next in line."
    )
    list_display = (name, allows, taken, waiting, next_in_line)
    list_filter = (WaitedForFilter,)
    list_per_page = 25
    ordering = ("pk",)
    search_fields = ("key",)
    fieldsets: ClassVar[Any] = ((None, {"fields": ((allows, taken), (waiting, next_in_line))}),)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Semaphore]:
        rows: QuerySet[Semaphore] = super().get_queryset(request)
        first = Job.objects.waiting_for(OuterRef("pk")).values("enqueued_at")[:1]
        return rows.annotate(seen_at=Now(), next_since=Subquery(first))

    def completed(self, rows: list[Any]) -> list[Any]:
        numbers = Slot.objects.count_by_key(row.pk for row in rows)
        for row in rows:
            row.number, row.waits = (
                numbers[row.pk],
                count(Job.objects.waiting_for(row.pk), "blocked_by", "-priority", "id"),
            )
        return rows

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Semaphore | None:
        found: Semaphore | None = super().get_object(request, object_id, from_field)
        return self.completed([found])[0] if found else None

    def beside(self, request: HttpRequest, one: Semaphore) -> dict[str, Any]:
        taken = Slot.objects.taken().filter(semaphore=one.pk).select_related("job")
        held = taken.order_by("job__started_at", "slot_group", "-job__priority", "job")[:SHOWN]
        line = Job.objects.waiting_for(one.pk).defer(*columns.NOT_LISTED)[:SHOWN]
        shown = {
            "holders": [
                {
                    **_row(slot.job, slot.job.started_at),
                    "is_behind": before is not None and before.slot_group == slot.slot_group,
                }
                for before, slot in zip([None, *held], held, strict=False)
            ],
            "line": [_row(job, job.enqueued_at) for job in line],
            "may_view_jobs": request.user.has_perm("dbqueue.view_job"),
        }
        return {**super().beside(request, one), **shown}


def _row(job: Job, since: Any) -> dict[str, Any]:
    return {
        "job": columns.linked_job(job),
        "since": formatting.ago(since),
        "priority": job.priority,
    }
