"""When ``runqueue --drain`` is through."""

from __future__ import annotations

import logging

from django.db import DatabaseError, InterfaceError

from ..models import Job, Process, Queue
from ..models.expressions import Now
from ..models.jobs import JobQuerySet
from ..models.states import State
from ..options import Options
from ..selector import QueueSelector
from .connection import discard, snapshot
from .deadline import answered_within

logger = logging.getLogger("django_dbqueue")


class Drain:
    """Of the queues that ``supervisor``, a process that has been registered by then, serves."""

    def __init__(self, database: str, selector: QueueSelector, options: Options, supervisor: Process) -> None:
        self._jobs = Job.objects.using(database)
        self._selector, self._options, self._supervisor = selector, options, supervisor

    def is_over(self) -> bool:
        """Nothing is due in the served queues, and nothing runs here."""
        try:
            with answered_within(self._options.answer_limit), snapshot(self._jobs.db):
                return not self._any_left(self._jobs.all())
        except (DatabaseError, InterfaceError) as error:
            logger.warning("Whether there is more to do cannot be seen: %s", error)
            discard(self._jobs.db)
            return False

    def any_failed(self) -> bool:
        """Whether a job of the served queues was FAILED meanwhile."""
        failed = self._jobs.filter(state=State.FAILED, finished_at__gte=self._supervisor.started_at, finished_at__lte=Now())
        return any(self._selector.rank(queue) is not None for queue in failed.values_list("queue", flat=True).distinct())

    def _any_left(self, jobs: JobQuerySet) -> bool:
        paused = set(Queue.objects.using(jobs.db).paused().values_list("name", flat=True))
        due = {lane.queue for lane in jobs.lanes(self._selector.names())}
        due.update(jobs.due().values_list("queue", flat=True).distinct())
        if any(self._selector.rank(queue) is not None for queue in due - paused):
            return True
        others = Process.objects.using(jobs.db).alive().exclude(supervisor=self._supervisor.pk)
        return jobs.running().exclude(process__in=others).exists()  # Ours, or lost.
