"""Takes ready jobs for one worker process, lane by lane in the worker's order."""

from __future__ import annotations

import time

from ..models import Job, Process, Queue
from ..models.jobs import JobQuerySet
from ..models.states import Lane
from ..selector import QueueSelector


class Claimer:
    """Keeps the list of lanes for a second: a claim then costs its own statements and nothing else."""

    FRESH = 1.0
    # So long, in seconds, jobs of a task that is not known here are left to others.
    LEFT = 30.0

    def __init__(self, database: str, process: Process, queues: QueueSelector) -> None:
        self._jobs = Job.objects.using(database)
        self._queues = Queue.objects.using(database)
        self._process, self._selector = process, queues
        self._lanes: list[Lane] = []
        self._order: dict[Lane, tuple[int, int]] = {}
        self._read_at = float("-inf")
        self._known: set[str] = set()
        self._left: dict[str, float] = {}

    def claim(self, limit: int) -> list[Job]:
        """Up to ``limit`` jobs, now owned by the process; fewer only if no lane has more."""
        jobs = self._claim(limit) if time.monotonic() - self._read_at < self.FRESH else []
        if len(jobs) < limit:
            self._read_lanes()
            jobs += self._claim(limit - len(jobs))
        return jobs

    def leave(self, task: str) -> None:
        """Leave the jobs of a task to other workers for a while."""
        self._left[task] = time.monotonic() + self.LEFT

    def _wanted(self) -> JobQuerySet:
        if not self._left:
            return self._jobs.all()
        self._left = {task: end for task, end in self._left.items() if end > time.monotonic()}
        return self._jobs.exclude(task__in=list(self._left))

    def _claim(self, limit: int) -> list[Job]:
        jobs: list[Job] = []
        wanted = self._wanted()
        for lane in self._lanes:
            if len(jobs) < limit:
                jobs += wanted.claim(lane, self._process, limit - len(jobs))
        # Lanes of the same rank take turns: a full one must not starve its neighbours.
        self._lanes = sorted([*self._lanes[1:], *self._lanes[:1]], key=self._order.__getitem__)
        return jobs

    def _read_lanes(self) -> None:
        ranks = {lane: self._selector.rank(lane.queue) for lane in self._jobs.lanes(self._selector.names())}
        served = {lane: (rank, -lane.priority) for lane, rank in ranks.items() if rank is not None}
        paused = self._paused({lane.queue for lane in served})
        self._order = {lane: order for lane, order in served.items() if lane.queue not in paused}
        self._lanes = sorted(self._order, key=self._order.__getitem__)
        self._read_at = time.monotonic()

    def _paused(self, names: set[str]) -> set[str]:
        if new := names - self._known:
            self._queues.know(new)
            self._known |= new
        return set(self._queues.filter(name__in=names).paused().values_list("name", flat=True)) if names else set()
