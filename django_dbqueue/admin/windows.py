"""Windows: how much of a huge table of jobs a list reads for filters that no index serves."""

from __future__ import annotations

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
# Filters that an index serves, and those that none does.
_SERVED = ("batch", "process", "waits_for")
_NOT_SERVED = ("queue", "task", "attempts", "worker", "release", "source", "ended")
# Filters by attempts, which none serves in any state: a failure may have very many attempts.
_BY_ATTEMPTS = ("failure", "error")
# The jobs in other states are few, or have an index of their own.
_MANY = ("", State.SUCCESSFUL)


class Window:
    """The newest jobs; with ``before``, the newest of those that are older than this one.

    is_open: it has no end. For an action on all jobs that match, which takes its time.
    """

    def __init__(self, before: UUID | None, *, is_open: bool = False) -> None:
        self._before, self.is_open = before, is_open
        # The largest number of matches, if that has ended the window.
        self.most = 0

    def within(self, jobs: JobQuerySet) -> JobQuerySet:
        """Filter jobs that are in the window."""
        return jobs.filter(pk__gte=self.first) if self.first else jobs

    def bounds(self, name: str) -> dict[str, UUID]:
        """Return the filters for an id in the window, such as that of an attempt's job."""
        return {
            **({f"{name}__gte": self.first} if self.first else {}),
            **({f"{name}__lt": self._before} if self._before else {}),
        }

    @cached_property
    def first(self) -> UUID | None:
        """The oldest id of the window; None if no job is older."""
        if self.is_open:
            return None
        older = {"pk__lt": self._before} if self._before else {}
        ids = Job.objects.filter(**older).order_by("-pk").values_list("pk", flat=True)
        found = list(ids[SIZE - 1 : SIZE + 1])
        return found[0] if len(found) == 2 else None

    def end_at(self, pk: UUID, most: int) -> None:
        """End the window at a job: it is the last of the ``most`` matches that are listed."""
        self.first, self.most = pk, most

    def text(self, request: HttpRequest) -> str:
        """Say how far the list goes back, with a link to the jobs before; empty if it has all."""
        if self.first is None:
            return ""
        said = _("Only the newest %(number)s jobs were searched, those since %(time)s.")
        if self._before:
            said = _("Only the next older %(number)s jobs were searched, those since %(time)s.")
        if self.most:
            said = _("Only the newest %(number)s matches are listed, those since %(time)s.")
        number = number_format(self.most or SIZE, force_grouping=True)
        query = request.GET.copy()
        query.pop("p", None)
        query[BEFORE] = str(self.first)
        link = format_html('<a href="?{}">{}</a>', query.urlencode(), _("Search older jobs"))
        return format_html("{} {}", said % {"number": number, "time": _time(self.first)}, link)


def is_unbounded(request: HttpRequest) -> bool:
    """Return whether the filters of a list of jobs may have to read all jobs."""
    given = {name for name, value in request.GET.items() if value}
    if request.GET.get("source", "").startswith("job:"):  # It has a bound of its own.
        return False
    if given.intersection(_SERVED):
        return False
    if given.intersection(_BY_ATTEMPTS):
        return True
    return request.GET.get("state", "") in _MANY and bool(given.intersection(_NOT_SERVED))


def _time(pk: UUID) -> str:
    time = time_of(pk)
    return formatting.plain_time(time) if time else "–"
