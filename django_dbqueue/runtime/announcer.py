"""Send ``task_finished`` for lost jobs that will not be tried again.

Its receivers are the project's code: they run on a thread of their own, in a process that has imported the tasks, and never in
the supervisor. A receiver that hangs holds up no recovery.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from uuid import UUID

from django.db import connections

from ..backend import DatabaseBackend
from ..compat import TaskResultDoesNotExist, signals

logger = logging.getLogger("django_dbqueue")

_ID = 16


class Announcements:
    """A pipe from a supervisor to all its members. The first one that is there takes an id and sends the signal.

    So no id is lost with a member that dies before it reads. Writes and reads of 16 bytes are atomic on a pipe.
    """

    def __init__(self) -> None:
        self.reader, self._writer = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._writer.fileno(), False)

    def put(self, jobs: Iterable[UUID]) -> None:
        """Hand over finished jobs. Does not block."""
        for job in jobs:
            try:
                os.write(self._writer.fileno(), job.bytes)
            except OSError as error:
                logger.error("task_finished is not sent for job %s: its receivers do not keep up (%s).", job, error)

    def close(self) -> None:
        """End the readers once they have read what is there."""
        self._writer.close()


def announce_from(reader: Connection, backend: DatabaseBackend) -> None:
    """Announce on a thread what a supervisor hands over, until it closes its end."""

    def run() -> None:
        while job := os.read(reader.fileno(), _ID):
            announce(backend, [UUID(bytes=job)])
            connections.close_all()

    _start(run)


def announce_beside(backend: DatabaseBackend, jobs: list[UUID]) -> None:
    """Announce finished jobs on a thread."""

    def run() -> None:
        announce(backend, jobs)
        connections.close_all()

    if jobs:
        _start(run)


def announce(backend: DatabaseBackend, jobs: Iterable[UUID]) -> None:
    """Send ``task_finished`` for finished jobs, but those that were asked for again. What its receivers raise is logged."""
    for job in jobs:
        try:
            result = backend.get_result(str(job))
            if result.is_finished:
                signals.task_finished.send_robust(type(backend), task_result=result)
        except TaskResultDoesNotExist:
            logger.warning("task_finished is not sent for job %s: it has been deleted.", job)
        except Exception:
            logger.exception("task_finished is not sent for job %s.", job)


def _start(run: Callable[[], object]) -> None:
    threading.Thread(target=run, name="announcer", daemon=True).start()
