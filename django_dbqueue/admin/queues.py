from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ClassVar, Protocol

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.counts import Counts
from ..models import Job, Process, Queue
from ..models.enums import State
from ..models.queue import Load
from . import columns, formatting, rates
from .actions import CLEAR, PAUSE, PAUSE_FOR, RESTRICT, RESUME
from .base import Fields, Rows
from .base_actions import ActionAdmin
from .config import limit_of, options


class LoadedQueue(Protocol):
    """A queue with its load, its counts of the last hour and minutes, and its workers' number."""

    name: str
    load: Load
    counts: Counts
    recent: Counts
    workers: int


@admin.display(description=gettext_lazy("oldest ready job"))
def oldest(queue: LoadedQueue) -> str:
    """Return its age; red if it has been ready for longer than the queue's ``ready_within``."""
    text = formatting.ago(queue.load.oldest)
    within = options().of(queue.name).ready_within
    if within is None or queue.load.age.total_seconds() <= within:
        return text
    badge = formatting.badge(_("Late"), "✕", "bad")
    most = formatting.duration(timedelta(seconds=within))
    return rates.lines(text, format_html(_("{} objective: {}"), badge, most))


@admin.display(description=gettext_lazy("ready jobs end in"))
def drained_in(queue: LoadedQueue) -> str:
    return rates.drained_in(queue.load.ready, queue.recent)


@admin.display(description=gettext_lazy("workers"))
def workers(queue: LoadedQueue) -> str:
    """Return the number of live workers that serve the queue; red if jobs wait and none does."""
    if queue.workers or not queue.load.ready:
        return str(queue.workers)
    return formatting.badge(_("None"), "✕", "bad")


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


@admin.display(description=gettext_lazy("not ready"))
def not_ready(queue: LoadedQueue) -> str:
    """Return the numbers of scheduled and blocked jobs, and of retries among all that wait."""
    shown = (
        (State.SCHEDULED.label, SCHEDULED),
        (State.BLOCKED.label, BLOCKED),
        (_("Retries"), retries),
    )
    return rates.lines(*(format_html("{}: {}", name, each(queue)) for name, each in shown))


@admin.display(description=gettext_lazy("running"))
def running(queue: Any) -> str:
    return rates.lines(RUNNING(queue), format_html(_("limit: {}"), limit(queue)))


READY, SCHEDULED, BLOCKED, RUNNING = map(
    jobs, (State.READY, State.SCHEDULED, State.BLOCKED, State.RUNNING)
)
LIST = (columns.paused, READY, oldest, drained_in, not_ready, running, workers)
LAST_HOUR = (rates.throughput, rates.failed, rates.waiting_time)
PAGE = (READY, oldest, drained_in, SCHEDULED, BLOCKED, retries, RUNNING, limit, workers)


class PausableAdmin(ActionAdmin):
    """Pages of queues and of tasks, which can be paused."""

    ordering = ("name",)
    search_fields = ("name",)

    def names(self, request: HttpRequest) -> Iterable[str]:
        """Return the names that current jobs have. The list contains them all."""
        raise NotImplementedError

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        if self.has_view_permission(request):
            self.model.objects.ensure_rows(self.names(request))
        return super().changelist_view(request, extra_context)

    def get_queryset(self, request: HttpRequest) -> Rows:
        rows: Any = super().get_queryset(request)
        return rows.seen()  # type: ignore[no-any-return]


@admin.register(Queue)
class QueueAdmin(PausableAdmin):
    hint = gettext_lazy("Workers claim no jobs from a paused queue. Running jobs continue.")
    actions = (PAUSE, PAUSE_FOR, RESUME, RESTRICT, CLEAR)
    list_display = ("name", *LIST, *LAST_HOUR)
    fieldsets: ClassVar[Fields] = (
        (None, {"fields": (("name", columns.paused), PAGE)}),
        (gettext_lazy("In the last hour"), {"fields": (LAST_HOUR,)}),
    )

    def names(self, request: Any) -> Iterable[str]:
        request.lanes = Job.objects.lanes()
        return {lane.queue for lane in request.lanes}

    def with_details(self, request: Any, rows: list[LoadedQueue]) -> list[LoadedQueue]:
        shown = [queue.name for queue in rows]
        lanes = request.lanes if hasattr(request, "lanes") else Job.objects.lanes(shown)
        loads = Queue.objects.loads(lane for lane in lanes if lane.queue in shown)
        counts, none = rates.of_queues(), (Counts(), Counts())
        alive = list(Process.objects.workers())
        for queue in rows:
            queue.load = loads.get(queue.name, Load())
            queue.counts, queue.recent = counts.get(queue.name, none)
            queue.workers = sum(worker.serves(queue.name) for worker in alive)
        return rows
