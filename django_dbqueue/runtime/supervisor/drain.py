"""End condition of ``runqueue --drain``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from django.db import DatabaseError, InterfaceError
from django.db.models import Exists, OuterRef

from ...core.internal_errors import report
from ...core.options import Options
from ...core.queue_selector import QueueSelector
from ...models import Batch, Job, Process, Queue, Semaphore, TaskState
from ...models.enums import State
from ...models.expressions import Now
from ...models.job import JobQuerySet
from ..connections import discard, snapshot
from ..socket_watchdog import deadline

# The number of jobs that each child of a supervisor has claimed, by the name of its status.
Claims = Mapping[str, int]


class Drain:
    """Drain of the queues that ``supervisor`` serves: those of all its ``selectors``.

    The supervisor is registered before the first check.
    """

    def __init__(
        self,
        database: str,
        selectors: Sequence[QueueSelector],
        options: Options,
        supervisor: Process,
    ) -> None:
        self._jobs = Job.objects.using(database)
        self._selectors, self._options, self._supervisor = selectors, options, supervisor

    def is_over(self) -> bool:
        """Return whether the drain has ended.

        No job is due in the served queues, no job runs here, and no batch is about to enqueue its
        callback.
        """
        try:
            with deadline(self._options.answer_limit), snapshot(self._jobs.db):
                return not self._any_left()
        except (DatabaseError, InterfaceError) as error:
            report(
                error, "drain: could not check for remaining jobs: %s", error, level=logging.WARNING
            )
            discard(self._jobs.db)
            return False

    def _about_to_be_due(self, jobs: JobQuerySet) -> set[str]:
        """Return the queues of jobs that wait for others, and of callbacks of ended batches."""
        blocked = _blocked_by_others(jobs).values_list("queue", flat=True).distinct()
        return {*blocked, *Batch.objects.using(jobs.db).due().queues()}

    def any_failed(self) -> bool:
        """Return whether a job of the served queues has become FAILED meanwhile."""
        failed = self._jobs.filter(
            state=State.FAILED, finished_at__gte=self._supervisor.started_at, finished_at__lte=Now()
        )
        return any(map(self._serves, failed.values_list("queue", flat=True).distinct()))

    def _any_left(self) -> bool:
        jobs = self._jobs
        paused = set(Queue.objects.using(jobs.db).paused().values_list("name", flat=True))
        tasks = TaskState.objects.using(jobs.db).names_of_paused()
        wanted = jobs.exclude(task__in=tasks) if tasks else jobs
        ready = {lane.queue for lane in jobs.lanes(self._names())}
        if tasks:
            ready = {queue for queue in ready if wanted.ready().filter(queue=queue).exists()}
        due = ready.union(wanted.due().values_list("queue", flat=True).distinct())
        if any(map(self._serves, due - paused)):
            return True
        if any(map(self._serves, self._about_to_be_due(wanted) - paused)):
            return True
        others = Process.objects.using(jobs.db).alive().exclude(supervisor=self._supervisor.pk)
        return jobs.running().exclude(process__in=others).exists()  # Own jobs, or lost ones.

    def _serves(self, queue: str) -> bool:
        return any(selector.position(queue) is not None for selector in self._selectors)

    def _names(self) -> list[str] | None:
        names: set[str] = set()
        for selector in self._selectors:
            if (own := selector.names()) is None:
                return None
            names.update(own)
        return sorted(names)


class JointDrain:
    """Drains of several backends, which end together: a job of one may enqueue a job of another.

    Each backend must be found drained and, once all have been, found so again, with no job claimed
    in between: then all were drained at one moment. A single backend must be found so once.
    """

    def __init__(self, backends: Iterable[str]) -> None:
        self._backends = set(backends)
        # What each backend had claimed when it was found drained, and those found so again.
        self._drained: dict[str, Claims] = {}
        self._again: set[str] = set()
        self._lock, self._is_over = threading.Lock(), False

    def is_over(
        self, backend: str, is_drained: Callable[[], bool], claims: Callable[[], Claims]
    ) -> bool:
        """Check a backend, and return whether all drains have ended.

        A job that came and went between two checks shows only in ``claims``.
        """
        before = claims()
        drained = is_drained()
        unchanged = before == claims()
        with self._lock:
            if not drained or not unchanged:
                self._drained, self._again = {}, set()
            elif self._drained.keys() != self._backends:
                self._drained[backend] = before
            elif self._drained[backend] == before:
                self._again.add(backend)
            else:
                self._drained, self._again = {backend: before}, set()
            found = self._again if len(self._backends) > 1 else self._drained.keys()
            self._is_over |= found == self._backends
            return self._is_over


def _blocked_by_others(jobs: JobQuerySet) -> JobQuerySet:
    """Return the jobs that wait for others to end, and not for a time assigned by a rate."""
    timed = Semaphore.objects.using(jobs.db).filter(
        pk=OuterRef("blocked_by"), interval__isnull=False
    )
    return jobs.filter(state=State.BLOCKED).exclude(Exists(timed))
