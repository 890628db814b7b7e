"""Ready jobs with limits, which will take the free slots that a sweep finds."""

from __future__ import annotations

from collections import Counter
from time import monotonic
from uuid import UUID

from ..limits import are_readable
from ..models import Job

# The lane, the task and the keys of the limits of a job: workers do not prefer one to another.
Kind = tuple[str, int, str, tuple[str, ...]]


def kind_of(job: Job) -> Kind:
    """Return the kind of a job with limits."""
    keys = tuple(sorted(each["key"] for each in job.limits or ()))
    return job.queue, job.priority, job.task, keys


class ReadyJobs:
    """Counts ready jobs with limits, for the sweeps of one dispatcher.

    A job that has been ready for STUCK seconds does not count: its row may be locked by a
    transaction that takes long, and its slot must not stay free as long as that.
    """

    STUCK = 3.0
    # The most ready jobs that are read, with and without limits.
    MOST = 5000

    def __init__(self, database: str) -> None:
        self._rows = Job.objects.using(database).ready()
        # The time at which each was first seen.
        self._since: dict[UUID, float] = {}

    def count(self) -> Counter[Kind]:
        """Return the number of jobs of each kind, as far as there are not too many to read."""
        now = monotonic()
        read = self._rows.only("queue", "priority", "task", "limits")[: self.MOST]
        jobs = [job for job in read if are_readable(job.limits)]
        self._since = {job.pk: self._since.get(job.pk, now) for job in jobs}
        return Counter(kind_of(job) for job in jobs if now - self._since[job.pk] < self.STUCK)
