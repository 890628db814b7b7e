"""End condition of ``runqueue --drain``."""

from __future__ import annotations

import logging

from django.db import DatabaseError, InterfaceError
from django.db.models import Exists, OuterRef

from ...core.options import Options
from ...core.queue_selector import QueueSelector
from ...models import Batch, Job, Process, Queue, Semaphore, TaskState
from ...models.enums import State
from ...models.expressions import Now
from ...models.job import JobQuerySet
from ..connections import discard, snapshot
from ..socket_watchdog import deadline

logger = logging.getLogger("django_dbqueue")


class Drain:
    """Drain of the queues that ``supervisor`` serves.

    The supervisor is registered before the first check.
    """

    def __init__(
        self, database: str, selector: QueueSelector, options: Options, supervisor: Process
    ) -> None:
        self._jobs = Job.objects.using(database)
        self._selector, self._options, self._supervisor = selector, options, supervisor

    def is_over(self) -> bool:
        """Return whether the drain has ended.

        No job is due in the served queues, no job runs here, and no batch is about to enqueue its
        callback.
        """
        try:
            with deadline(self._options.answer_limit), snapshot(self._jobs.db):
                return not self._any_left(self._jobs.all())
        except (DatabaseError, InterfaceError) as error:
            logger.warning("drain: could not check for remaining jobs: %s", error)
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
        return any(
            self._selector.position(queue) is not None
            for queue in failed.values_list("queue", flat=True).distinct()
        )

    def _any_left(self, jobs: JobQuerySet) -> bool:
        paused = set(Queue.objects.using(jobs.db).paused().values_list("name", flat=True))
        tasks = TaskState.objects.using(jobs.db).names_of_paused()
        wanted = jobs.exclude(task__in=tasks) if tasks else jobs
        due = {lane.queue for lane in wanted.lanes(self._selector.names())}
        due.update(wanted.due().values_list("queue", flat=True).distinct())
        if any(self._selector.position(queue) is not None for queue in due - paused):
            return True
        if any(
            self._selector.position(queue) is not None
            for queue in self._about_to_be_due(wanted) - paused
        ):
            return True
        others = Process.objects.using(jobs.db).alive().exclude(supervisor=self._supervisor.pk)
        return jobs.running().exclude(process__in=others).exists()  # Own jobs, or lost ones.


def _blocked_by_others(jobs: JobQuerySet) -> JobQuerySet:
    """Return the jobs that wait for others to end, and not for a time assigned by a rate."""
    timed = Semaphore.objects.using(jobs.db).filter(
        pk=OuterRef("blocked_by"), interval__isnull=False
    )
    return jobs.filter(state=State.BLOCKED).exclude(Exists(timed))
