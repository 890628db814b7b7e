"""What operators do to jobs, one or very many: each verb leaves what is in another state as it is."""

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
        """Make failed and discarded jobs ready again, with all their attempts before them, and wake workers. Returns how many.

        They expire no more: whoever retries them wants them to run.
        """
        changes = {"failures": 0, "expires_at": None, "started_at": None, "finished_at": None, "stop_asked_at": None}
        queues = list(self.retriable().order_by().values_list("queue", flat=True).distinct())
        retried = self.retriable().update_in_parts(state=State.READY, run_after=Now(), **changes)
        self._wake(queues)
        return retried

    def discardable(self) -> OperatedJobs:
        return self.filter(state__in=[*WAITING, State.FAILED])

    def discard(self) -> int:
        """Call off jobs that wait or have failed; what runs or has ended stays as it is. Returns how many."""
        return self.discardable().update_in_parts(state=State.DISCARDED, blocked_by=None, finished_at=Now())

    def move(self, queue: str) -> int:
        """Have jobs that wait wait in another queue, and wake its workers. Returns how many were in others before.

        Raises ValueError for what is no name of a queue.
        """
        check_name(queue)
        if moved := self.waiting().exclude(queue=queue).update_in_parts(queue=queue):
            self._wake([queue])
        return moved

    def reprioritise(self, priority: int) -> int:
        """Give jobs that wait another priority; what runs or has ended keeps its own. Returns how many are changed.

        Raises ValueError for what is no whole number from -100 to 100.
        """
        if type(priority) is not int or abs(priority) > HIGHEST_PRIORITY:
            raise ValueError(f"priority={priority!r} is not a whole number from -100 to 100. Change it.")
        return self.waiting().exclude(priority=priority).update_in_parts(priority=priority)

    def stoppable(self) -> OperatedJobs:
        return self.filter(state=State.RUNNING, stop_asked_at__isnull=True)

    def stop(self) -> int:
        """Ask the processes that run them to stop them. Returns how many are asked for now.

        They are DISCARDED then, even if the attempt ends by itself before, is given back or would be tried again. A run that a
        key was asked for before the stop is discarded with it; one that is asked for after the stop runs.
        """
        return self.stoppable().update_in_parts(stop_asked_at=Now(), asked_again=False)

    def _wake(self, queues: Iterable[str]) -> None:
        notify_queues(router.db_for_write(self.model) if self._db is None else self._db, queues)  # type: ignore[attr-defined]
