"""Operator actions on one job or very many. Jobs in another state are left unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from django.db import router

from ..core.notify import notify_queues
from ..core.queue_selector import check_name
from .expressions import Now
from .primary import PrimaryQuerySet
from .states import HIGHEST_PRIORITY, UNSUCCESSFUL, WAITING, State

if TYPE_CHECKING:
    from .job import Job  # noqa: F401


class OperatedJobs(PrimaryQuerySet["Job"]):
    def waiting(self) -> OperatedJobs:
        return self.filter(state__in=WAITING)

    def retriable(self) -> OperatedJobs:
        return self.filter(state__in=UNSUCCESSFUL)

    def retry(self) -> int:
        """Make failed and discarded jobs ready again, with all their attempts, and wake workers.

        Return the number of jobs. They no longer expire: a retry means that they are to run.
        """
        changes = {"failures": 0, "expires_at": None, "started_at": None, "finished_at": None, "stop_asked_at": None}
        queues = list(self.retriable().order_by().values_list("queue", flat=True).distinct())
        retried = self.retriable().update_in_parts(state=State.READY, run_after=Now(), **changes)
        self._wake(queues)
        return retried

    def discardable(self) -> OperatedJobs:
        return self.filter(state__in=[*WAITING, State.FAILED])

    def discard(self) -> int:
        """Discard waiting and failed jobs; running and finished ones stay. Return their number."""
        return self.discardable().update_in_parts(state=State.DISCARDED, blocked_by=None, finished_at=Now())

    def move(self, queue: str) -> int:
        """Move waiting jobs to another queue, and wake its workers.

        Return the number of jobs that were in another queue. Raises ValueError for an invalid name.
        """
        check_name(queue)
        if moved := self.waiting().exclude(queue=queue).update_in_parts(queue=queue):
            self._wake([queue])
        return moved

    def reprioritise(self, priority: int) -> int:
        """Change the priority of waiting jobs; running and finished jobs keep theirs.

        Return the number of changed jobs. Raises ValueError unless ``priority`` is a whole number
        from -100 to 100.
        """
        if type(priority) is not int or abs(priority) > HIGHEST_PRIORITY:
            raise ValueError(f"priority={priority!r} is not a whole number from -100 to 100. Change it.")
        return self.waiting().exclude(priority=priority).update_in_parts(priority=priority)

    def stoppable(self) -> OperatedJobs:
        return self.filter(state=State.RUNNING, stop_asked_at__isnull=True)

    def stop(self) -> int:
        """Request that running jobs stop. Return the number of new requests.

        The jobs become DISCARDED, even if the attempt ends by itself first, is released or would
        be retried. A rerun of a key that was enqueued before the stop is discarded with the job;
        a rerun enqueued after the stop runs.
        """
        return self.stoppable().update_in_parts(stop_asked_at=Now(), asked_again=False)

    def _wake(self, queues: Iterable[str]) -> None:
        notify_queues(router.db_for_write(self.model) if self._db is None else self._db, queues)  # type: ignore[attr-defined]
