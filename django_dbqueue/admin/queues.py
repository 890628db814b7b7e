from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy

from ..models import Job, Queue
from ..models.enums import State
from ..models.queue import Load
from . import columns, formatting
from .actions import CLEAR, PAUSE, PAUSE_FOR, RESTRICT, RESUME
from .base import Fields, Rows
from .base_actions import ActionAdmin
from .config import limit_of


class LoadedQueue(Protocol):
    """A queue with its load."""

    name: str
    load: Load


@admin.display(description=gettext_lazy("oldest ready job"))
def oldest(queue: LoadedQueue) -> str:
    return formatting.ago(queue.load.oldest)


def jobs(state: State) -> Callable[[LoadedQueue], str]:
    """Return a column with the number of jobs in a state, linked to them."""

    @admin.display(description=state.label)
    def column(queue: LoadedQueue) -> str:
        number = getattr(queue.load, state.value)
        return formatting.job_count(number, queue=queue.name, state=state.value)

    column.__name__ = state.value
    return column


@admin.display(description=gettext_lazy("waiting retries"))
def retries(queue: LoadedQueue) -> str:
    return formatting.job_count(queue.load.retries, queue=queue.name, attempts="retry")


@admin.display(description=gettext_lazy("limit"))
def limit(queue: Queue) -> str:
    return str(limit_of(queue) or "–")


COLUMNS = (
    columns.paused,
    jobs(State.READY),
    oldest,
    jobs(State.SCHEDULED),
    jobs(State.BLOCKED),
    retries,
    jobs(State.RUNNING),
    limit,
)


class PausableAdmin(ActionAdmin):
    """Pages of queues and of tasks, which can be paused."""

    ordering = ("name",)
    search_fields = ("name",)

    def names(self) -> Iterable[str]:
        """Return the names that current jobs have. The list contains them all."""
        raise NotImplementedError

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        if self.has_view_permission(request):
            self.model.objects.ensure_rows(self.names())
        return super().changelist_view(request, extra_context)

    def get_queryset(self, request: HttpRequest) -> Rows:
        rows: Any = super().get_queryset(request)
        return rows.seen()  # type: ignore[no-any-return]


@admin.register(Queue)
class QueueAdmin(PausableAdmin):
    hint = gettext_lazy("Workers claim no jobs from a paused queue. Running jobs continue.")
    actions = (PAUSE, PAUSE_FOR, RESUME, RESTRICT, CLEAR)
    list_display = ("name", *COLUMNS)
    fieldsets: ClassVar[Fields] = ((None, {"fields": (("name", columns.paused), COLUMNS[1:])}),)

    def names(self) -> Iterable[str]:
        return {lane.queue for lane in Job.objects.lanes()}

    def with_details(self, request: HttpRequest, rows: list[LoadedQueue]) -> list[LoadedQueue]:
        loads = Queue.objects.loads(Job.objects.lanes(queue.name for queue in rows))
        for queue in rows:
            queue.load = loads.get(queue.name, Load())
        return rows
