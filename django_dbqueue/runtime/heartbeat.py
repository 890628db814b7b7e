"""A process says that it is alive, from a thread and a connection of its own: a busy interpreter must not look dead."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from typing import Any

from django.db import DatabaseError, InterfaceError

from ..models import Process
from ..models.expressions import Now, after
from ..options import Options
from .connection import close_connections, discard

logger = logging.getLogger("django_dbqueue")


class Heartbeat:
    """The registration of one running role, from ``start`` to ``stop``."""

    def __init__(self, kind: Process.Kind, database: str, options: Options, details: dict[str, Any]) -> None:
        self._options = options
        self._processes = Process.objects.using(database)
        self._ended = threading.Event()
        self._last = time.monotonic()
        hostname = socket.gethostname()[:150]
        self.process = Process(
            # A new name at each start: a restarted container often has its predecessor's host and process id.
            name=f"{kind.value}@{hostname}:{os.getpid()}:{secrets.token_hex(3)}",
            kind=kind,
            hostname=hostname,
            pid=os.getpid(),
            details=details,
        )
        self._thread = threading.Thread(target=self._run, name=f"{kind.value}-heartbeat", daemon=True)

    def start(self, supervisor: int | None = None) -> Process:
        self.process.supervisor_id = supervisor
        self._sign_on()
        self._last = time.monotonic()
        self._thread.start()
        return self.process

    def stop(self) -> None:
        """Stop beating and sign off."""
        self._ended.set()
        self._thread.join()
        discard(self._processes.db)  # It may have been lost since this thread used it.
        try:
            self._processes.filter(pk=self.process.pk).delete()
        except (DatabaseError, InterfaceError) as error:
            logger.warning("%s could not sign off, and will be taken for dead: %s", self.process, error)

    @property
    def healthy(self) -> bool:
        """Whether others still believe this process alive. By its own clock, with a third of the time to spare."""
        return time.monotonic() - self._last < self._options.dead_after * 2 / 3

    def _sign_on(self) -> None:
        self.process.heartbeat_at, self.process.expires_at = Now(), after(self._options.dead_after)
        self.process.save(using=self._processes.db, force_insert=True)

    def _signs_on_again(self) -> bool:
        """A supervisor owns no jobs: taken for dead by mistake, it has lost nothing."""
        if self.process.kind == Process.Kind.SUPERVISOR:
            self._sign_on()
            return True
        return False

    def _run(self) -> None:
        while not self._ended.wait(self._options.beat_interval):
            began = time.monotonic()
            try:
                if not self._processes.filter(pk=self.process.pk).beat(self._options.dead_after) and not self._signs_on_again():
                    logger.error(
                        "%s was declared dead by others; it claims nothing more.", self.process, extra=self.process.log_fields
                    )
                    self._last = -self._options.dead_after
                    break
                self._last = began
            except (DatabaseError, InterfaceError) as error:
                logger.warning("%s could not beat: %s", self.process, error, extra=self.process.log_fields)
                close_connections()
        close_connections()
