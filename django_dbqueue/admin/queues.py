from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy

from ..models import Job, Queue
from ..models.enums import State
from ..models.queue import Load
from . import columns, formatting
from .base_actions import OperatingAdmin
from .config import limit_of
from .queue_actions import CLEAR, PAUSE, PAUSE_FOR, RESTRICT, RESUME


@admin.display(description=gettext_lazy("oldest ready job"))
def oldest(queue: Any) -> str:
    return formatting.ago(queue.load.oldest)


def jobs(state: State) -> Any:
    """A column with the number of jobs in a state, and a link to them."""

    @admin.display(description=state.label)
    def column(queue: Any) -> Any:
        if not (number := getattr(queue.load, state.value)):
            return 0
        query = urlencode({"queue": queue.name, "state": state.value})
        return format_html(
            '<a href="{}?{}">{}</a>', reverse("admin:dbqueue_job_changelist"), query, str(number)
        )

    column.__name__ = state.value
    return column


@admin.display(description=gettext_lazy("limit"))
def limit(queue: Queue) -> Any:
    return limit_of(queue) or "–"


COLUMNS = (
    columns.paused,
    jobs(State.READY),
    oldest,
    jobs(State.SCHEDULED),
    jobs(State.BLOCKED),
    jobs(State.RUNNING),
    limit,
)


@admin.register(Queue)
class QueueAdmin(OperatingAdmin):
    hint = gettext_lazy(
        "Workers take no jobs from a queue that is paused; what runs already goes on."
    )
    verbs = (PAUSE, PAUSE_FOR, RESUME, RESTRICT, CLEAR)
    actions = ("pause", "pause_for", "resume", "restrict", "clear")
    list_display = ("name", *COLUMNS)
    ordering = ("name",)
    search_fields = ("name",)
    fieldsets: ClassVar[Any] = ((None, {"fields": (("name", columns.paused), COLUMNS[1:])}),)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if self.has_view_permission(request):
            Queue.objects.know({lane.queue for lane in Job.objects.lanes()})
        return super().changelist_view(request, extra_context)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Queue]:
        rows: Any = super().get_queryset(request)
        return rows.seen()  # type: ignore[no-any-return]

    def completed(self, rows: list[Any]) -> list[Any]:
        loads = Queue.objects.loads(Job.objects.lanes(queue.name for queue in rows))
        for queue in rows:
            queue.load = loads.get(queue.name, Load())
        return rows

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Queue | None:
        found: Queue | None = super().get_object(request, object_id, from_field)
        return self.completed([found])[0] if found else None

    @admin.action(description=gettext_lazy("Pause selected queues"), permissions=["pause"])
    def pause(self, request: HttpRequest, rows: QuerySet[Queue]) -> HttpResponse | None:
        return self.carry_out(request, rows, PAUSE)

    @admin.action(
        description=gettext_lazy("Pause selected queues for a while"), permissions=["pause"]
    )
    def pause_for(self, request: HttpRequest, rows: QuerySet[Queue]) -> HttpResponse | None:
        return self.carry_out(request, rows, PAUSE_FOR)

    @admin.action(description=gettext_lazy("Resume selected queues"), permissions=["pause"])
    def resume(self, request: HttpRequest, rows: QuerySet[Queue]) -> HttpResponse | None:
        return self.carry_out(request, rows, RESUME)

    @admin.action(
        description=gettext_lazy("Set limit of selected queues"), permissions=["restrict"]
    )
    def restrict(self, request: HttpRequest, rows: QuerySet[Queue]) -> HttpResponse | None:
        return self.carry_out(request, rows, RESTRICT)

    @admin.action(
        description=gettext_lazy("Discard all that wait in selected queues"),
        permissions=["discard"],
    )
    def clear(self, request: HttpRequest, rows: QuerySet[Queue]) -> HttpResponse | None:
        return self.carry_out(request, rows, CLEAR)

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.discard_job")

    def has_restrict_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.restrict_queue")

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("dbqueue.pause_queue")
