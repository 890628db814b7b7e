"""Progress of the indexing, from the states of its jobs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from django.db.models import Count

from django_dbqueue.models import Job

from .tasks import INDEX


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Number of indexing jobs (one per file) that wait, run, are done, failed or discarded."""

    waiting: int
    running: int
    done: int
    failed: int
    discarded: int

    @classmethod
    def now(cls) -> Progress:
        states = Job.objects.filter(queue=INDEX).values_list("state").annotate(jobs=Count("pk"))
        jobs = Counter(dict(states.order_by()))
        return cls(
            waiting=jobs[Job.State.SCHEDULED] + jobs[Job.State.BLOCKED] + jobs[Job.State.READY],
            running=jobs[Job.State.RUNNING],
            done=jobs[Job.State.SUCCESSFUL],
            failed=jobs[Job.State.FAILED],
            discarded=jobs[Job.State.DISCARDED],
        )

    @property
    def unfinished(self) -> int:
        return self.waiting + self.running

    @property
    def finished(self) -> int:
        return self.done + self.failed + self.discarded

    @property
    def total(self) -> int:
        return self.unfinished + self.finished
