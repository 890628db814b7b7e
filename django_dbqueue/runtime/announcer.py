"""Send ``task_finished`` for lost jobs that are not retried.

Receivers are project code. They run on a separate thread, in a process that has imported the tasks,
and never in the supervisor. A receiver that hangs does not delay recovery.
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
from ..core.internal_errors import report

logger = logging.getLogger("django_dbqueue")

_ID = 16


class Announcements:
    """Pipe from a supervisor to all its children. The first child to read an id sends the signal.

    A child that dies before it reads therefore loses no id. Writes and reads of 16 bytes are atomic
    on a pipe.
    """

    def __init__(self) -> None:
        self.reader, self._writer = multiprocessing.Pipe(duplex=False)
        os.set_blocking(self._writer.fileno(), False)

    def put(self, jobs: Iterable[UUID]) -> None:
        """Write the ids of finished jobs to the pipe. Does not block."""
        for job in jobs:
            try:
                os.write(self._writer.fileno(), job.bytes)
            except OSError as error:
                report(
                    error,
                    "announcer: task_finished not sent for job %s: receivers are too slow (%s).",
                    job,
                    error,
                )

    def close(self) -> None:
        """Close the write end. Readers end once they have read the remaining ids."""
        self._writer.close()


def announce_from(reader: Connection, backend: DatabaseBackend) -> None:
    """Announce, on a thread, the jobs that a supervisor writes, until it closes its end."""

    def run() -> None:
        while job := os.read(reader.fileno(), _ID):
            announce(backend, [UUID(bytes=job)])
            connections.close_all()

    _start(run)


def announce_beside(backend: DatabaseBackend, jobs: list[UUID]) -> None:
    """Announce finished jobs on a separate thread."""

    def run() -> None:
        announce(backend, jobs)
        connections.close_all()

    if jobs:
        _start(run)


def announce(backend: DatabaseBackend, jobs: Iterable[UUID]) -> None:
    """Send ``task_finished`` for finished jobs, except re-enqueued ones.

    Exceptions of its receivers are logged.
    """
    for job in jobs:
        try:
            result = backend.get_result(str(job))
            if result.is_finished:
                signals.task_finished.send_robust(type(backend), task_result=result)
        except TaskResultDoesNotExist:
            logger.warning(
                "announcer: task_finished not sent for job %s: it has been deleted.", job
            )
        except Exception as error:
            report(error, "announcer: task_finished not sent for job %s.", job)


def _start(run: Callable[[], object]) -> None:
    threading.Thread(target=run, name="announcer", daemon=True).start()
