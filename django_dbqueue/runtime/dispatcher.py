"""The role that makes due jobs ready and recovers those of dead processes."""

from __future__ import annotations

import logging
import random

from django.db import DatabaseError, InterfaceError

from ..backend import DatabaseBackend
from ..models import Job, Process
from ..options import Options
from ..wakeup import wake
from . import recovery
from .connection import close_connections, discard, prepare
from .heartbeat import Heartbeat
from .stop import Stop

logger = logging.getLogger("django_dbqueue")


class Dispatcher:
    """Any number of them may run, on any hosts: each step is safe beside another's."""

    BATCH = 1000

    def __init__(self, backend: DatabaseBackend, options: Options) -> None:
        self._database, self._options = backend.database, options
        self._jobs = Job.objects.using(backend.database)
        self._heartbeat = Heartbeat(Process.Kind.DISPATCHER, backend.database, options, {})

    def run(self, stop: Stop, supervisor: int | None = None) -> None:
        """Work until ``stop`` is asked for."""
        prepare(self._database)
        process = self._heartbeat.start(supervisor)
        logger.info("%s looks for due jobs every %g s.", process, self._options.poll_interval, extra=process.log_fields)
        while not stop.asked and self._heartbeat.healthy:
            if not self._work():
                stop.wait(self._options.poll_interval * random.uniform(0.8, 1.0))
        self._heartbeat.stop()
        close_connections()

    def _work(self) -> bool:
        """Returns whether there is more to do at once."""
        try:
            queues = self._jobs.dispatch(self.BATCH)
            for queue in set(queues):
                wake(self._database, queue)
            recovery.recover(self._database, Process.objects.silent())
            return len(queues) == self.BATCH
        except (DatabaseError, InterfaceError) as error:
            logger.warning("Due jobs could not be made ready: %s", error)
            discard(self._database)
            return False
