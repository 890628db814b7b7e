"""Windows: how much of a huge table of jobs a list reads for filters that no index serves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.translation import gettext as _

from ..core.uuid7 import time_of
from ..models import Job
from ..models.enums import State
from ..models.job import JobQuerySet
from . import formatting

# Jobs that a list reads at most.
SIZE = 100_000
BEFORE = "before"
# Filters that an index serves, or that have a bound of their own.
_BOUNDED = ("batch", "failure", "error", "process", "waits_for", "source")
_UNBOUNDED = ("queue", "task", "attempts", "worker", "release")
# The jobs in these states are few, or have an index of their own.
_LONG = ("", State.SUCCESSFUL)


@dataclass(frozen=True)
class Window:
    """The newest jobs; with ``before``, the newest of those that are older than this one."""

    before: UUID | None

    def within(self, jobs: JobQuerySet) -> JobQuerySet:
        """Filter jobs that are in the window."""
        return jobs.filter(pk__gte=self.first) if self.first else jobs

    @cached_property
    def first(self) -> UUID | None:
        """The oldest id of the window; None if no job is older."""
        older = {"pk__lt": self.before} if self.before else {}
        ids = Job.objects.filter(**older).order_by("-pk").values_list("pk", flat=True)
        found = list(ids[SIZE - 1 : SIZE + 1])
        return found[0] if len(found) == 2 else None

    def text(self, request: HttpRequest) -> str:
        """Say how far the list goes back, with a link to the jobs before; empty if it has all."""
        if self.first is None:
            return ""
        said = _("Only the newest %(number)s jobs were searched, those since %(time)s.")
        if self.before:
            said = _("Only the next older %(number)s jobs were searched, those since %(time)s.")
        values = {"number": number_format(SIZE, force_grouping=True), "time": _time(self.first)}
        query = request.GET.copy()
        query.pop("p", None)
        query[BEFORE] = str(self.first)
        link = format_html('<a href="?{}">{}</a>', query.urlencode(), _("Search older jobs"))
        return format_html("{} {}", said % values, link)


def is_unbounded(request: HttpRequest) -> bool:
    """Return whether the filters of a list of jobs may have to read all jobs."""
    given = {name for name, value in request.GET.items() if value}
    return (
        request.GET.get("state", "") in _LONG
        and not given.intersection(_BOUNDED)
        and bool(given.intersection(_UNBOUNDED))
    )


def _time(pk: UUID) -> str:
    time = time_of(pk)
    return formatting.plain_time(time) if time else "–"
