from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, ClassVar, Protocol

from django.contrib import admin
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..limits import RATE, are_readable
from ..models import Job, Semaphore, Slot
from ..models.expressions import Now
from . import columns, formatting
from .base import Fields, ReadOnlyAdmin
from .counting import counts
from .filters import WaitingJobsFilter

MOST_JOBS = 20


class UsedLimit(Protocol):
    """A limit with its current use."""

    pk: str
    max_running: int | None
    interval: timedelta | None
    earliest: datetime | None
    seen_at: datetime
    next_enqueued_at: datetime | None
    taken_slots: int
    waiting_jobs: int


@admin.display(description=gettext_lazy("limit"))
def name(row: Semaphore) -> str:
    return str(row)


@admin.display(description=gettext_lazy("allows"))
def allows(row: Semaphore) -> str:
    return _rule(row.max_running, row.interval, row.burst)


@admin.display(description=gettext_lazy("now"))
def usage(row: UsedLimit) -> str:
    if row.interval and row.earliest and row.earliest > row.seen_at:
        return format_html(_("next start {}"), formatting.ago(row.earliest, row.seen_at))
    return _taken(row.taken_slots, row.max_running)


@admin.display(description=gettext_lazy("waiting jobs"))
def waiting(row: UsedLimit) -> str:
    return formatting.job_count(row.waiting_jobs, waits_for=row.pk)


@admin.display(description=gettext_lazy("next job, enqueued"))
def next_job(row: UsedLimit) -> str:
    return formatting.ago(row.next_enqueued_at, row.seen_at)


@admin.register(Semaphore)
class SemaphoreAdmin(ReadOnlyAdmin):
    hint = gettext_lazy(
        "Concurrency and rate limits with waiting jobs. When a job finishes, the next one starts."
    )
    list_display = (name, allows, usage, waiting, next_job)
    list_filter = (WaitingJobsFilter,)
    list_per_page = 25
    ordering = ("pk",)
    search_fields = ("key",)
    fieldsets: ClassVar[Fields] = ((None, {"fields": ((allows, usage), (waiting, next_job))}),)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Semaphore]:
        rows: QuerySet[Semaphore] = super().get_queryset(request)
        first = Job.objects.waiting_for(OuterRef("pk")).values("enqueued_at")[:1]
        return rows.annotate(seen_at=Now(), next_enqueued_at=Subquery(first))

    def with_details(self, request: HttpRequest, rows: list[UsedLimit]) -> list[UsedLimit]:
        taken = Slot.objects.count_by_key(row.pk for row in rows)
        along = "blocked_by", "-priority", "id"
        waiting = [Job.objects.waiting_for(row.pk).order_by(*along).values("pk") for row in rows]
        for row, number in zip(rows, counts(waiting), strict=True):
            row.taken_slots, row.waiting_jobs = taken[row.pk], number
        return rows

    def page_context(self, request: HttpRequest, row: Semaphore) -> dict[str, object]:
        taken = Slot.objects.taken().filter(semaphore=row.pk).select_related("job")
        slots = taken.order_by("job__started_at", "slot_group", "-job__priority", "job")[:MOST_JOBS]
        blocked = Job.objects.waiting_for(row.pk).defer(*columns.NOT_LISTED)[:MOST_JOBS]
        return {
            **super().page_context(request, row),
            "holders": [
                {
                    **_job(slot.job, slot.job.started_at),
                    "is_behind": before is not None and before.slot_group == slot.slot_group,
                }
                for before, slot in zip([None, *slots], slots, strict=False)
            ],
            "waiting": [_job(job, job.enqueued_at) for job in blocked],
            "may_view_jobs": request.user.has_perm("dbqueue.view_job"),
        }


def _job(job: Job, since: datetime | None) -> dict[str, object]:
    return {
        "job": columns.linked_job(job),
        "since": formatting.ago(since),
        "priority": formatting.number(job.priority),
    }


def limits_of(job: Job, linked: bool) -> list[str]:
    """Return the limits of a job, each with its current use, in two queries."""
    # A job that was inserted by hand may have others, with which it is discarded.
    if not job.limits or not are_readable(job.limits):
        return []
    keys = [limit["key"] for limit in job.limits]
    rows, taken = Semaphore.objects.in_bulk(keys), Slot.objects.count_by_key(keys)
    return [
        _limit(limit, rows.get(limit["key"]), taken[limit["key"]], linked) for limit in job.limits
    ]


def _limit(limit: dict[str, Any], row: Semaphore | None, taken: int, linked: bool) -> str:
    """Return the text for one limit of a job.

    The values of the row apply. Without a row, as long as no job was claimed, those of the job
    apply.
    """
    interval = timedelta(seconds=limit["interval"]) if "interval" in limit else None
    max_running, interval, burst = (
        (row.max_running, row.interval, row.burst)
        if row
        else (limit.get("max_running"), interval, limit.get("burst", 1))
    )
    label: str = format_html("<strong>{}</strong>", limit_name(limit["key"]))
    if row and linked:
        label = formatting.link("semaphore", row.pk, label)
    text = format_html("{}: {}", label, _rule(max_running, interval, burst))
    if max_running is not None:
        text = format_html("{} {}", text, _taken(taken, max_running))
    if limit.get("discard"):
        text = format_html("{}, {}", text, _("discarded if the limit is reached"))
    return text


def limit_name(key: str) -> str:
    return key.removeprefix(RATE)


def _rule(max_running: int | None, interval: timedelta | None, burst: int) -> str:
    if max_running is not None:
        return _("%d at a time") % max_running
    text = _("one every %s") % formatting.duration(interval or timedelta())
    return _("%(rate)s, burst of %(burst)d") % {"rate": text, "burst": burst} if burst > 1 else text


def _taken(number: int, max_running: int | None) -> str:
    """Return the number of taken slots out of all; none for a rate, which holds no slots."""
    if max_running is None:
        return "–"
    text = _("%(number)d of %(max_running)d taken") % {"number": number, "max_running": max_running}
    sign, shade = ("⊘", "waits") if number >= max_running else ("○", "good")
    meter = format_html(
        '<meter class="dbq-bar" value="{}" max="{}" aria-label="{}"></meter>',
        number,
        max_running,
        text,
    )
    return format_html("{} {}", formatting.badge(text, sign, shade), meter)
