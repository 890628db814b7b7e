"""Decide which jobs at least one worker would take, if it had room."""

from __future__ import annotations

from functools import cached_property

from ..models import Job, Process, Queue, TaskState


class Served:
    """Paused queues and tasks, and the queues of live workers, as the database has them now."""

    def __init__(self, database: str) -> None:
        self.database = database
        self._queues: dict[str, bool] = {}

    def takes(self, job: Job) -> bool:
        """Return True if the job's queue is served, and neither queue nor task is paused."""
        if job.queue not in self._queues:
            # Without any live worker, all queues count as served.
            is_served = not self._workers or any(
                worker.serves(job.queue) for worker in self._workers
            )
            self._queues[job.queue] = is_served and job.queue not in self._paused_queues
        return self._queues[job.queue] and job.task not in self._paused_tasks

    @cached_property
    def _workers(self) -> list[Process]:
        return list(
            Process.objects.using(self.database)
            .workers()
            .only("details", "request", "supervisor__request")
        )

    @cached_property
    def _paused_queues(self) -> set[str]:
        return set(Queue.objects.using(self.database).names_of_paused())

    @cached_property
    def _paused_tasks(self) -> set[str]:
        return set(TaskState.objects.using(self.database).names_of_paused())
