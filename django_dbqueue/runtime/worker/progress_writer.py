"""Writes the progress that a worker's running tasks report."""

from __future__ import annotations

import time

from django.db import DatabaseError, InterfaceError

from ...core.progress_value import ProgressValue
from ...exceptions import JobLost
from ...models import Progress
from ..connections import discard
from ..logging_setup import RepeatedProblem
from .services import WorkerServices
from .task_call import Call


class ProgressWriter:
    """Writes progress in the background.

    No task waits for a write, and no task fails if the database refuses one. The last progress is
    written with the attempt's outcome.
    """

    # Minimum seconds between two writes, regardless of how often tasks report progress.
    EVERY = 1.0

    def __init__(self, database: str, services: WorkerServices) -> None:
        self._database, self._services = database, services
        self._progress = Progress.objects.using(database)
        self._written: dict[Call, ProgressValue] = {}
        self._checked_at = float("-inf")
        self._problem = RepeatedProblem("progress writer: progress could not be written")

    def write(self) -> None:
        """Write new progress if a write is due.

        A task that reports progress for a job that now belongs to another process is interrupted.
        """
        now = time.monotonic()
        if now - self._checked_at < self.EVERY:
            return
        self._checked_at = now
        noted = {
            call: call.job.progress_value
            for call in self._services.running()
            if call.job.progress_value
        }
        self._written = {call: note for call, note in self._written.items() if call in noted}
        if new := {
            call: note for call, note in noted.items() if self._written.get(call) is not note
        }:
            self._write(new)

    def _write(self, new: dict[Call, ProgressValue]) -> None:
        try:
            recorded = self._progress.record([(call.job, note) for call, note in new.items()])
            self._problem.over()
        except (DatabaseError, InterfaceError) as error:
            self._problem.report(error)
            discard(self._database)
            return
        for call, note in new.items():
            if call.job.fence in recorded.written:
                self._written[call] = note
            elif call.job.fence in recorded.lost:
                call.interrupt(JobLost)
