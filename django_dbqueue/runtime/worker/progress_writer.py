"""Writes how far the running tasks of a worker have said that they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from django.db import DatabaseError, InterfaceError

from ...core.progress_value import ProgressValue
from ...exceptions import JobLost
from ...models import Progress
from ..connections import discard
from ..logging_setup import Trouble
from .task_call import Call


class ProgressWriter:
    """No task waits for it, and none fails if the database does not take a note. The last one is written with its outcome."""

    # So many seconds lie between two writes, however often the tasks call.
    EVERY = 1.0

    def __init__(self, database: str, running: Callable[[], Sequence[Call]]) -> None:
        self._database, self._running = database, running
        self._progress = Progress.objects.using(database)
        self._written: dict[Call, ProgressValue] = {}
        self._looked_at = float("-inf")
        self._trouble = Trouble("Progress could not be written")

    def write(self) -> None:
        """If it is time, what is new. Who notes something for a job that is another process's now is interrupted."""
        now = time.monotonic()
        if now - self._looked_at < self.EVERY:
            return
        self._looked_at = now
        noted = {call: call.job.noted for call in self._running() if call.job.noted}
        self._written = {call: note for call, note in self._written.items() if call in noted}
        if new := {call: note for call, note in noted.items() if self._written.get(call) is not note}:
            self._write(new)

    def _write(self, new: dict[Call, ProgressValue]) -> None:
        try:
            recorded = self._progress.record([(call.job, note) for call, note in new.items()])
            self._trouble.over()
        except (DatabaseError, InterfaceError) as error:
            self._trouble.report(error)
            discard(self._database)
            return
        for call, note in new.items():
            if call.job.fence in recorded.written:
                self._written[call] = note
            elif call.job.fence in recorded.lost:
                call.ask(JobLost)
