"""List filters. Choices come from small or cheap sources, never from a column of a huge table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from django.contrib.admin import ModelAdmin, SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..models import Batch, Execution, Failure, Job, Process, Queue

Choices = Iterable[tuple[Any, Any]]


class Filter(SimpleListFilter):
    """Filter by one value of one field. Values that are not among the choices are valid too."""

    field: str

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> Choices:
        choices = list(self.found())
        value = self.value()
        return (
            choices
            if value in (None, *(choice for choice, word in choices))
            else [(value, value), *choices]
        )

    def found(self) -> Choices:
        raise NotImplementedError

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(**{self.field: self.value()})


class JobStateFilter(Filter):
    title, parameter_name, field = _("state"), "state", "state"

    def found(self) -> Choices:
        return Job.State.choices


class QueueFilter(Filter):
    title, parameter_name, field = _("queue"), "queue", "queue"

    def found(self) -> Choices:
        return [
            (name, name)
            for name in Queue.objects.order_by("name").values_list("name", flat=True)[:100]
        ]


class TaskFilter(Filter):
    title, parameter_name, field = _("task"), "task", "task"

    def found(self) -> Choices:
        named = [(task, task.rpartition(".")[2]) for task in Job.objects.recent_tasks()]
        return sorted(named, key=lambda choice: choice[1])


class IdFilter(SimpleListFilter):
    """Filter by an object that other pages link to by its id; shown only while in use."""

    model: Any

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> Choices:
        if self.value() is None:
            return []
        return [(self.value(), self.model.objects.filter(pk=self.number).first() or self.value())]

    @property
    def number(self) -> Any:
        value = self.value() or ""
        if not (value.isascii() and value.isdigit() and len(value) < 19):
            raise IncorrectLookupParameters
        return int(value)


class FailureFilter(IdFilter):
    title, parameter_name, model = _("failure"), "failure", Failure

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        if self.value() is None:
            return queryset
        return queryset.filter(pk__in=Execution.objects.filter(failure=self.number).values("job"))


class ProcessFilter(IdFilter):
    title, parameter_name, model = _("process"), "process", Process

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.running().filter(process=self.number)  # type: ignore[attr-defined]


class BatchFilter(IdFilter):
    title, parameter_name, model = _("batch"), "batch", Batch

    @property
    def number(self) -> Any:
        try:
            return UUID(self.value() or "")
        except ValueError:
            raise IncorrectLookupParameters from None

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        return queryset if self.value() is None else queryset.filter(batch=self.number)


class LimitFilter(Filter):
    """Filter by the key of a limit that jobs wait for; shown only while in use."""

    title, parameter_name, field = _("waits for"), "waits_for", "blocked_by"

    def found(self) -> Choices:
        return []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        # Only blocked jobs wait for a limit, and the index contains no others.
        return super().queryset(
            request, queryset if self.value() is None else queryset.filter(state=Job.State.BLOCKED)
        )


class WaitedForFilter(SimpleListFilter):
    """Show only the limits that jobs wait for, unless another choice is made.

    There may be one of the other limits for each customer.
    """

    title, parameter_name = _("which"), "which"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> Choices:
        return [("all", _("All in use"))]

    def choices(self, changelist: Any) -> Iterator[Any]:
        of_all, *rest = super().choices(changelist)
        yield {**of_all, "display": _("Waited for")}
        yield from rest

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() else queryset.waiting()  # type: ignore[attr-defined]


class FinishedFilter(SimpleListFilter):
    title, parameter_name = _("finished"), "finished"

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> Choices:
        return [("no", _("No")), ("yes", _("Yes"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return (
            queryset
            if self.value() is None
            else queryset.filter(finished_at__isnull=self.value() == "no")
        )


class FailureStateFilter(Filter):
    title, parameter_name, field = _("state"), "state", "state"

    def found(self) -> Choices:
        return Failure.State.choices


class LastSeenFilter(SimpleListFilter):
    title, parameter_name = _("last seen"), "seen"
    seconds = {"1h": 3600, "24h": 86400, "7d": 7 * 86400}

    def lookups(self, request: HttpRequest, model_admin: ModelAdmin[Any]) -> Choices:
        return [
            ("1h", _("In the last hour")),
            ("24h", _("In the last 24 hours")),
            ("7d", _("In the last 7 days")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        seconds = self.seconds.get(self.value() or "")
        return queryset.seen_within(seconds) if seconds else queryset  # type: ignore[attr-defined]
