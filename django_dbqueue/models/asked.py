"""Execution queries for people: the jobs that a failure has failed, and how they ended last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import Exists, F, OuterRef

from .counts import LIMIT, BoundedCount
from .failure import Failure
from .job import Job
from .jobs import JobQuerySet
from .primary import PrimaryQuerySet
from .states import State

if TYPE_CHECKING:
    from .execution import Execution


class AskedExecutions(PrimaryQuerySet["Execution"]):
    def failed_jobs(self, failures: Iterable[Any]) -> JobQuerySet:
        """Return the jobs that are failed now and were last failed by one of these failures."""
        last = self.filter(job=OuterRef("pk"), attempt=OuterRef("attempt"), failure__in=failures)
        return Job.objects.using(self._db).failed().filter(Exists(last))  # type: ignore[attr-defined]

    def count_failed_jobs(self, failures: Iterable[Any]) -> dict[int, int]:
        """Count the jobs that each of these failures has failed now.

        The counts are lower bounds if there are very many jobs in all.
        """
        last = self.filter(failure__in=failures, job__state=State.FAILED, attempt=F("job__attempt"))
        found = Counter(last.values_list("failure_id", flat=True)[: LIMIT + 1])
        number = BoundedCount if found.total() > LIMIT else int
        return {failure: number(found[failure]) for failure in failures}

    def last_of_each(self) -> models.QuerySet[Execution]:
        """Return each job's last attempt, for a subquery in a query of jobs."""
        return self.filter(job=OuterRef("pk")).order_by("-attempt")[:1]

    def newest_of(self, failure: Failure, limit: int) -> list[Execution]:
        """Return the most recent attempts of this failure, with their jobs.

        Attempts of deleted jobs are left out.
        """
        return list(self.filter(failure=failure).select_related("job").defer("log").order_by("-pk")[:limit])
