"""Writes outcomes in groups: those that come while one group is being written make the next."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from django.db import InterfaceError, OperationalError

from .. import errors
from ..models import Execution, Job, Settlement
from .connection import close_connections, discard, prepare

logger = logging.getLogger("django_dbqueue")


class Settler:
    """A thread with a buffer. ``healthy`` tells whether what the process has claimed is still its own."""

    LARGEST_GROUP = 500

    def __init__(self, database: str, healthy: Callable[[], bool]) -> None:
        self._database, self._healthy = database, healthy
        self._executions = Execution.objects.using(database)
        self._waiting: list[Settlement] = []
        self._writing: list[Settlement] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="settler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, settlement: Settlement) -> None:
        with self._changed:
            self._waiting.append(settlement)
            if len(self._waiting) == 1:
                self._changed.notify()

    def unsettled(self) -> list[Settlement]:
        with self._changed:
            return [*self._writing, *self._waiting]

    def close(self, timeout: float) -> None:
        """Write what is there, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        prepare(self._database)
        pause = 0.0
        while group := self._take(pause):
            left = self._write(group)
            pause = min(2.0, pause * 2 or 0.02) * random.uniform(0.5, 1.0) if left else 0.0
            self._put_back(left)
        close_connections()

    def _take(self, pause: float) -> list[Settlement]:
        """The next group; empty once the settler is closed and has written all."""
        time.sleep(pause)
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            self._writing, self._waiting = self._waiting[: self.LARGEST_GROUP], self._waiting[self.LARGEST_GROUP :]
            return self._writing

    def _put_back(self, settlements: list[Settlement]) -> None:
        with self._changed:
            self._writing, self._waiting[:0] = [], settlements

    def _write(self, group: list[Settlement]) -> list[Settlement]:
        """Settle a group. Returns what must be tried again."""
        try:
            settled = self._executions.settle(group)
        except (OperationalError, InterfaceError) as error:
            return self._after_outage(group, error)
        except Exception as error:
            return self._without_the_culprit(group, error)
        for settlement in settled.lost:
            logger.error(
                "Job %s (attempt %s) was lost to another process; its outcome is dropped.",
                *settlement.fence,
                extra=settlement.execution.job.log_fields,
            )
        return settled.held

    def _after_outage(self, group: list[Settlement], error: Exception) -> list[Settlement]:
        discard(self._database)
        if self._healthy():
            logger.warning("%d outcomes could not be written and are tried again: %s", len(group), error)
            return group
        logger.error("%d outcomes are dropped: this process is taken for dead. %s", len(group), error)
        return []

    def _without_the_culprit(self, group: list[Settlement], error: Exception) -> list[Settlement]:
        """An outcome that the database refuses must not hold up its neighbours."""
        if len(group) > 1:
            return [left for settlement in group for left in self._write([settlement])]
        execution = group[0].execution
        logger.error("The database refused the outcome of job %s: %s", execution.job_id, error, extra=execution.job.log_fields)
        if group[0].state == Job.State.FAILED:
            return []  # Refused twice: the job stays RUNNING, and is recovered.
        failed = Settlement.of(
            execution.job,
            Execution.Outcome.FAILED,
            Job.State.FAILED,
            started_at=execution.started_at,
            error=errors.report(error),
        )
        return self._write([failed])
