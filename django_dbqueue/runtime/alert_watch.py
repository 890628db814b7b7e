"""Alert watch: sends what the queue's checks find to the targets of ``OPTIONS["alerts"]``.

It runs beside a dispatcher, so it can also report that no worker is alive.
"""

from __future__ import annotations

import random
import threading
import time

from django.db import DatabaseError, InterfaceError

from ..backend import DatabaseBackend
from ..core.alert_targets import AlertTarget
from ..core.internal_errors import report
from ..core.options import Options
from ..core.safe_log import logger
from ..core.transactions import is_conflict
from ..doctor.database import QueueDatabase, database_of
from ..doctor.finding import Finding
from ..doctor.runner import of_the_queue
from ..engine.alerts import note, note_sent, note_unsent, take_due
from .alert_delivery import deliver
from .connections import close_connections, discard, leave_old_connections, prepare
from .logging_setup import RepeatedProblem
from .socket_watchdog import deadline


class AlertWatch:
    """One thread for each target: a mail server that hangs must not delay a webhook."""

    # Seconds between two runs of the checks, and that a thread has to end.
    EVERY, LAST = 15.0, 1.0

    def __init__(self, backend: DatabaseBackend, options: Options) -> None:
        self._backend, self._options = backend, options
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(target,), name="alerts", daemon=True)
            for target in options.alert_targets
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads. One that waits for a server is left behind."""
        self._ended.set()
        end = time.monotonic() + self.LAST
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, target: AlertTarget) -> None:
        database = self._backend.database
        prepare(database, self._options.statement_limit)
        problem = RepeatedProblem(f"alerts: the queue could not be examined for {target.name}")
        while not self._ended.is_set():
            leave_old_connections()
            try:
                # By the alias of the backend: the connection of this one is prepared.
                queue = QueueDatabase(database, database_of(self._backend).backends)
                with deadline(self._options.answer_limit):
                    self._examine(queue, target)
                self._send(database, target)
                problem.over()
            except (DatabaseError, InterfaceError) as error:
                discard(database)
                if not is_conflict(error):
                    problem.report(error)
            except Exception as error:
                report(error, "alerts: problems are not sent by %s: %s", target.name, error)
            self._ended.wait(self.EVERY * random.uniform(0.8, 1.2))
        close_connections()

    @staticmethod
    def _examine(queue: QueueDatabase, target: AlertTarget) -> None:
        results = list(of_the_queue(queue, target.checks))
        unknown = {name for name, each in results if not isinstance(each, Finding)}
        found = {
            (name, each.subject[:255]): each
            for name, each in results
            if isinstance(each, Finding) and target.wants(name, each.severity)
        }
        further = {
            (name, subject[:255])
            for name, each in results
            if isinstance(each, Finding)
            for subject in each.further
        }
        note(queue.alias, target, found, unknown, further)

    def _send(self, database: str, target: AlertTarget) -> None:
        with deadline(self._options.answer_limit):
            alerts = take_due(database, target)
        if not alerts:
            return
        error = deliver(target, alerts)
        with deadline(self._options.answer_limit):
            if error:
                note_unsent(database, alerts, error)
            else:
                note_sent(database, alerts)
        if error:
            logger.error("alerts: %d not sent by %s: %s", len(alerts), target.name, error)
        else:
            logger.info("alerts: %d sent by %s", len(alerts), target.name)
