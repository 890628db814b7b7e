"""When ``runqueue --drain`` is through."""

from __future__ import annotations

import logging

from django.db import DatabaseError, InterfaceError

from ...core.options import Options
from ...core.queue_selector import QueueSelector
from ...models import Batch, Job, KnownTask, Process, Queue
from ...models.expressions import Now
from ...models.jobs import JobQuerySet
from ...models.states import State
from ..connections import discard, snapshot
from ..socket_watchdog import answered_within

logger = logging.getLogger("django_dbqueue")


class Drain:
    """Of the queues that ``supervisor``, a process that has been registered by then, serves."""

    def __init__(self, database: str, selector: QueueSelector, options: Options, supervisor: Process) -> None:
        self._jobs = Job.objects.using(database)
        self._selector, self._options, self._supervisor = selector, options, supervisor

    def is_over(self) -> bool:
        """Nothing is due in the served queues, nothing runs here, and no batch is about to enqueue what follows it."""
        try:
            with answered_within(self._options.answer_limit), snapshot(self._jobs.db):
                return not self._any_left(self._jobs.all())
        except (DatabaseError, InterfaceError) as error:
            logger.warning("Whether there is more to do cannot be seen: %s", error)
            discard(self._jobs.db)
            return False

    def _about_to_be_due(self, jobs: JobQuerySet) -> set[str]:
        """The queues of jobs that wait for others to end, and of what follows when a batch has."""
        blocked = jobs.blocked_by_others().values_list("queue", flat=True).distinct()
        return {*blocked, *Batch.objects.using(jobs.db).due().queues()}

    def any_failed(self) -> bool:
        """Whether a job of the served queues was FAILED meanwhile."""
        failed = self._jobs.filter(state=State.FAILED, finished_at__gte=self._supervisor.started_at, finished_at__lte=Now())
        return any(self._selector.rank(queue) is not None for queue in failed.values_list("queue", flat=True).distinct())

    def _any_left(self, jobs: JobQuerySet) -> bool:
        paused = set(Queue.objects.using(jobs.db).paused().values_list("name", flat=True))
        tasks = KnownTask.objects.using(jobs.db).names_of_paused()
        wanted = jobs.exclude(task__in=tasks) if tasks else jobs
        due = {lane.queue for lane in wanted.lanes(self._selector.names())}
        due.update(wanted.due().values_list("queue", flat=True).distinct())
        if any(self._selector.rank(queue) is not None for queue in due - paused):
            return True
        if any(self._selector.rank(queue) is not None for queue in self._about_to_be_due(wanted) - paused):
            return True
        others = Process.objects.using(jobs.db).alive().exclude(supervisor=self._supervisor.pk)
        return jobs.running().exclude(process__in=others).exists()  # Ours, or lost.
