"""List filters. Choices come from small or cheap sources, never from a column of a huge table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, ClassVar, cast
from uuid import UUID

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.db.models import Exists, F, Model, OuterRef, Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..core.uuid7 import uuid7_at
from ..models import Batch, Execution, Failure, Job, Process, Queue
from ..models.enums import FINISHED, WAITING, State
from ..models.job import JobQuerySet
from ..registry import tasks_in
from .base import Rows, Text
from .config import options
from .counting import counts
from .sources import jobs_from, recent_sources
from .spans import SPANS, USUAL, span_of
from .windows import BEFORE, Window, is_unbounded

Choices = Iterable[tuple[str, Any]]
MOST_OFFERED = 100
# States whose jobs are counted, and the order of the index that holds them: see count().
COUNTED_STATES = {
    State.READY: ("queue", "priority", "run_after"),
    State.RUNNING: ("process",),
    State.SCHEDULED: ("run_after",),
    State.BLOCKED: ("blocked_by", "-priority"),
    State.FAILED: ("finished_at",),
}


class Filter(SimpleListFilter):
    """Filter by one value of one field. Values that are not among the choices are valid too."""

    column: str

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        choices = list(self.options(model_admin.model))
        value = self.value()
        if value is None or any(value == choice for choice, _text in choices):
            return choices
        return [(value, value), *choices]

    def options(self, model: Any) -> Choices:
        return []

    def queryset(self, request: HttpRequest, queryset: Rows) -> Rows:
        return queryset if self.value() is None else queryset.filter(**{self.column: self.value()})


def number_by_state() -> dict[State, int]:
    """Return the number of jobs in each of COUNTED_STATES, up to a limit, in one statement."""
    found = counts(
        [
            Job.objects.filter(state=state).order_by(*along).values("pk")
            for state, along in COUNTED_STATES.items()
        ]
    )
    return dict(zip(COUNTED_STATES, found, strict=True))


class StateFilter(Filter):
    """Filter by the state of a job.

    Choices have the number of jobs, unless a search or another filter narrows the list.
    """

    title, parameter_name, column = _("state"), "state", "state"

    def options(self, model: type[Job]) -> Choices:
        return model.State.choices

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        others = {*changelist.get_filters_params(), *(["q"] if changelist.query else [])}
        numbers = {} if others - {self.parameter_name} else number_by_state()
        values = ["", *(value for value, _text in self.lookup_choices)]
        for value, choice in zip(values, super().choices(changelist), strict=True):
            if value in numbers:
                text = format_html("{} ({})", choice["display"], numbers[State(value)])
                choice = {**choice, "display": text}
            yield choice


class QueueFilter(Filter):
    title, parameter_name, column = _("queue"), "queue", "queue"

    def options(self, model: object) -> Choices:
        names = Queue.objects.order_by("name").values_list("name", flat=True)[:MOST_OFFERED]
        return [(name, name) for name in names]


class TaskFilter(Filter):
    title, parameter_name, column = _("task"), "task", "task"

    def options(self, model: object) -> Choices:
        tasks = {*tasks_in(options().task_modules), *Job.objects.recent_tasks()}
        named = [(task, task.rpartition(".")[2]) for task in tasks]
        return sorted(named, key=lambda choice: choice[::-1])


class TimeFilter(SimpleListFilter):
    """Filter by the time of the enqueue, by the primary key: ids are in this order."""

    title, parameter_name = _("enqueued"), "enqueued"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        return [(str(span.hours), _("In the last %s") % span.label) for span in SPANS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        if self.value() is None:
            return queryset
        first = uuid7_at(timezone.now() - timedelta(hours=span_of(self.value()).hours))
        return queryset.filter(pk__gte=first)


class EndFilter(TimeFilter):
    """Filter by the time at which the job ended: a job may end long after its enqueue."""

    title, parameter_name = _("finished"), "ended"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        if self.value() is None:
            return queryset
        first = timezone.now() - timedelta(hours=span_of(self.value()).hours)
        return queryset.filter(state__in=FINISHED, finished_at__gte=first)


class AttemptsFilter(SimpleListFilter):
    """Filter by the number of attempts in a job's current run."""

    title, parameter_name = _("attempts"), "attempts"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        return [
            ("first", _("First attempt")),
            ("again", _("Second attempt or later")),
            ("retry", _("Waiting for a retry")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        waits, was_tried = Q(state__in=WAITING), Q(attempt__gt=F("attempts_before"))
        is_again = waits & was_tried | ~waits & Q(attempt__gt=F("attempts_before") + 1)
        match self.value():
            case "first":
                return queryset.exclude(is_again)
            case "again":
                return queryset.filter(is_again)
            case "retry":
                return queryset.filter(waits, was_tried)
        return queryset


class ErrorFilter(Filter):
    """Filter by the type of an error that an attempt failed with."""

    title, parameter_name = _("error"), "error"

    def options(self, model: object) -> Choices:
        failures = Failure.objects.open().order_by("-last_seen")
        types = dict.fromkeys(failures.values_list("error_type", flat=True)[:MOST_OFFERED])
        return [(each, each.rpartition(".")[2]) for each in types]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        if self.value() is None:
            return queryset
        failures = Failure.objects.filter(error_type=self.value())
        return _with_attempt(request, queryset, failure__in=failures.values("pk"))


class WorkerFilter(Filter):
    """Filter by the process that has run a job; shown only while in use.

    The page of a process links here.
    """

    title, parameter_name = _("worker"), "worker"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        if self.value() is None:
            return queryset
        return _with_attempt(request, queryset, process=self.value())


class ReleaseFilter(Filter):
    """Filter by a release that an attempt ran with."""

    title, parameter_name = _("release"), "release"

    def options(self, model: object) -> Choices:
        return [(name, name) for name in sorted(Process.objects.releases())]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        if self.value() is None:
            return queryset
        return _with_attempt(request, queryset, release=self.value())


def window_of(request: HttpRequest) -> Window:
    """Return the window of a list of jobs: the same for its filters and its search."""
    kept = request.__dict__
    if "_dbqueue_window" not in kept:
        of_all = request.POST.get("select_across") == "1"
        kept["_dbqueue_window"] = Window(BeforeFilter.job(request), is_open=of_all)
    window: Window = kept["_dbqueue_window"]
    return window


def _with_attempt(request: HttpRequest, jobs: QuerySet[Job], **values: object) -> QuerySet[Job]:
    """Filter jobs that have an attempt with these values."""
    own = Execution.objects.filter(job=OuterRef("pk"), **values)
    if is_unbounded(request) and not request.GET.get("q"):
        # PostgreSQL may read all attempts, and does not see that only those of the window matter.
        own = own.filter(**window_of(request).bounds("job_id"))
    return jobs.filter(Exists(own))


class SourceFilter(Filter):
    """Filter by a part of the source; shown if sources are recorded, or while in use."""

    title, parameter_name = _("enqueued by"), "source"

    def options(self, model: object) -> Choices:
        return recent_sources() if options().note_source else []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        if self.value() is None:
            return queryset
        kind, _colon, value = (self.value() or "").partition(":")
        try:
            return jobs_from(cast(JobQuerySet, queryset), kind, value)
        except ValueError:
            raise IncorrectLookupParameters from None


class OperationStateFilter(SimpleListFilter):
    title, parameter_name = _("state"), "state"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        return [("unfinished", _("Not ended")), ("undoable", _("Can be undone"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        match self.value():
            case "unfinished":
                return queryset.unfinished()
            case "undoable":
                return queryset.undoable()
        return queryset


class UsualFilter(SimpleListFilter):
    """Filter whose choice without a value is not *All*, but has a text of its own."""

    usual: Text

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        without_value, *rest = super().choices(changelist)
        yield {**without_value, "display": self.usual}
        yield from rest

    def queryset(self, request: HttpRequest, queryset: Rows) -> Rows:
        """Return all rows. Some filters only say what a page shows of them."""
        return queryset


class OpenFilter(UsualFilter):
    """Show only open failures by default: the others have been dealt with."""

    title, parameter_name = _("state"), "state"
    usual = Failure.State.OPEN.label

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        others = [each for each in Failure.State.choices if each[0] != Failure.State.OPEN]
        return [*others, ("all", _("All"))]

    def queryset(self, request: HttpRequest, queryset: Rows) -> Rows:
        state = self.value() or Failure.State.OPEN
        return queryset if state == "all" else queryset.filter(state=state)


class WindowFilter(UsualFilter):
    """Offer the times in which failures are counted. ``FailureAdmin`` counts."""

    title, parameter_name = _("period"), "hours"
    usual = USUAL.label

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        return [(str(span.hours), span.label) for span in SPANS if span is not USUAL]


class FailureOrder(UsualFilter):
    """Offer the orders of a list of failures. ``FailureAdmin`` applies them."""

    title, parameter_name = _("order"), "order"
    usual = _("Most often in this time first")
    orders: ClassVar = {
        "seen": (_("Last seen first"), ("-last_seen", "-pk")),
        "count": (_("Most often ever first"), ("-count", "-pk")),
        "new": (_("Newest first"), ("-first_seen", "-pk")),
        "old": (_("Oldest first"), ("first_seen", "pk")),
    }

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        return [(name, text) for name, (text, _fields) in self.orders.items()]


class CalendarFilter(UsualFilter):
    """Offer the times that the calendar of recurring tasks can show."""

    title, parameter_name = _("calendar"), "calendar"
    usual = _("24 hours")

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        return [("7", _("7 days"))]


class IdFilter(SimpleListFilter):
    """Filter by the id of a row that links here from its page; shown only while in use."""

    model: type[Model]

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        value = self.value()
        if value is None:
            return []
        row = self.model._default_manager.filter(pk=self.pk).first()
        return [(value, row or value)]

    @property
    def pk(self) -> Any:
        value = self.value() or ""
        if not (value.isascii() and value.isdigit() and len(value) < 19):
            raise IncorrectLookupParameters
        return int(value)


class FailureFilter(IdFilter):
    title, parameter_name, model = _("failure"), "failure", Failure

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        if self.value() is None:
            return queryset
        return _with_attempt(request, queryset, failure=self.pk)


class ProcessFilter(IdFilter):
    title, parameter_name, model = _("process"), "process", Process

    def queryset(self, request: HttpRequest, queryset: Rows) -> Rows:
        if self.value() is None:
            return queryset
        return queryset.running().filter(process=self.pk)  # type: ignore[attr-defined,no-any-return]


class BatchFilter(IdFilter):
    title, parameter_name, model = _("batch"), "batch", Batch

    @property
    def pk(self) -> UUID:
        return _uuid(self.value() or "")

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        return queryset if self.value() is None else queryset.filter(batch=self.pk)


class BeforeFilter(IdFilter):
    """Show only jobs that are older than one, of which a window links to them."""

    title, parameter_name, model = _("older than"), BEFORE, Job

    @property
    def pk(self) -> UUID:
        return _uuid(self.value() or "")

    @classmethod
    def job(cls, request: HttpRequest) -> UUID | None:
        """Return the id in the address of a list; None without one."""
        value = request.GET.get(cls.parameter_name)
        return _uuid(value) if value else None

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        return queryset if self.value() is None else queryset.filter(pk__lt=self.pk)


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise IncorrectLookupParameters from None


class LimitFilter(Filter):
    """Filter by the limit that jobs are waiting on; shown only while in use."""

    title, parameter_name, column = _("waiting on limit"), "waits_for", "blocked_by"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        # All waiting jobs are blocked, and the index contains only blocked jobs.
        blocked = queryset if self.value() is None else queryset.filter(state=Job.State.BLOCKED)
        return super().queryset(request, blocked)


class WaitingJobsFilter(UsualFilter):
    """Show only limits with waiting jobs by default: there may be a limit for each customer."""

    title, parameter_name = _("limits"), "which"
    usual = _("With waiting jobs")

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        return [("all", _("All in use"))]

    def queryset(self, request: HttpRequest, queryset: Rows) -> Rows:
        return queryset if self.value() else queryset.waiting()  # type: ignore[attr-defined]


class FinishedFilter(SimpleListFilter):
    title, parameter_name = _("finished"), "finished"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Model]) -> Choices:
        return [("no", _("No")), ("yes", _("Yes"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Batch]) -> QuerySet[Batch]:
        if self.value() is None:
            return queryset
        return queryset.filter(finished_at__isnull=self.value() == "no")
