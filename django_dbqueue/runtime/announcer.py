"""Send ``task_finished`` for lost jobs that are not retried, and call the middleware for them.

Receivers and middleware are project code. They run on a separate thread, in a process that has
imported the tasks, and never in the supervisor. One that hangs does not delay recovery.
"""

from __future__ import annotations

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
from ..core.safe_log import logger
from ..exceptions import ProcessLost, TimedOut
from ..middleware import Ending
from ..models import Execution, Job
from ..models.enums import Outcome, State

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
    """Send ``task_finished`` for finished jobs, except re-enqueued ones, and call the middleware.

    Exceptions of receivers and of middleware are logged.
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
        if backend.middleware:
            try:
                _call_middleware(backend, job)
            except Exception as error:
                report(error, "announcer: middleware not called for job %s: %s", job, error)


def _call_middleware(backend: DatabaseBackend, pk: UUID) -> None:
    """Call ``failed_outside_run`` of the middleware, the innermost first, for a failed job."""
    job = Job.objects.using(backend.database).filter(pk=pk, state=State.FAILED).first()
    attempts = Execution.objects.using(backend.database)
    last = attempts.filter(job=job, attempt=job.attempt).first() if job else None
    if job is None or last is None:
        return
    error = (TimedOut if last.outcome == Outcome.TIMED_OUT else ProcessLost)(last.message)
    ending = Ending(outcome=Outcome(last.outcome), state=State.FAILED, error=error)
    for middleware in reversed(backend.middleware):
        try:
            middleware.failed_outside_run(job, ending)
        except BaseException as another:
            report(
                another,
                "announcer: job %s of %s: %s failed: %s",
                job.pk,
                job.task,
                type(middleware).__qualname__,
                another,
            )


def _start(run: Callable[[], object]) -> None:
    threading.Thread(target=run, name="announcer", daemon=True).start()
