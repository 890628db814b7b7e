"""Heartbeat of a process, sent from its own thread and connection.

A busy interpreter must not look dead.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable

from django import get_version
from django.db import DatabaseError, InterfaceError

from .. import __version__
from ..core import internal_errors
from ..core.options import Options
from ..core.safe_log import logger
from ..models import Process
from ..models.expressions import Now, now_plus
from . import process_identity
from .connections import close_connections, discard, note_outage, prepare
from .resident_memory import MB, resident_mb
from .shared_status import SharedStatus
from .socket_watchdog import deadline


class Heartbeat:
    """Registration of one running role, from ``start`` to ``stop``.

    A heartbeat vouches for progress. If the main loop makes no progress, according to ``status``,
    the supervisor ends the role, after it has let its jobs end. A role that still exists after
    that sends no more heartbeats.

    ``back`` is called on the heartbeat thread when a heartbeat succeeds after a failed one.
    """

    # Seconds between two log lines about one outage.
    SAY_AGAIN = 60.0

    def __init__(
        self,
        kind: Process.Kind,
        database: str,
        options: Options,
        status: SharedStatus,
        details: dict[str, object],
        back: Callable[[], object] = lambda: None,
    ) -> None:
        self._options, self._status, self._back = options, status, back
        self._processes = Process.objects.using(database)
        self._ended = threading.Event()
        self._last = time.monotonic()
        self._is_away = self.declared_dead = False
        self._said_at = 0.0
        # What an operator asks of the process, as of the last heartbeat.
        self._request = ""
        hostname = socket.gethostname()[:150]
        label = f"{kind.value}-{options.name}" if options.name else kind.value
        host = hostname[: 150 - len(options.name)]
        self.process = Process(
            # A new name at each start: a restarted container often has the hostname and process id
            # of its predecessor.
            name=f"{label}@{host}:{os.getpid()}:{secrets.token_hex(3)}",
            kind=kind,
            hostname=hostname,
            pid=os.getpid(),
            release=options.current_release,
            details={
                **details,
                "shared_status": status.name,
                "version": __version__,
                "django": get_version(),
                **process_identity.identity(),
            },
        )
        self._thread = threading.Thread(
            target=self._run, name=f"{kind.value}-heartbeat", daemon=True
        )

    @property
    def is_quiet(self) -> bool:
        """Return whether an operator wants this process to claim no more jobs."""
        return self._request != ""

    @property
    def is_to_stop(self) -> bool:
        """Return whether an operator wants this process to end."""
        return self._request == Process.Request.STOP

    def start(self, supervisor: int | None = None) -> Process:
        self.process.supervisor_id = supervisor
        with deadline(self._options.answer_limit):
            self._register()
            # A worker that replaces one of a quiet supervisor is quiet, too.
            self._request = self._processes.request_of(self.process)
        self._last = time.monotonic()
        self._thread.start()
        if internal_errors.note_process(self.process) and self._options.name:
            process_identity.show_title(f"runqueue {self.process}")
        return self.process

    def stop(self, *, deregister: bool = True) -> None:
        """Stop the heartbeat and deregister. A process that still runs jobs does not deregister."""
        self._ended.set()
        self._thread.join(1.0)
        internal_errors.forget_process(self.process)
        if not deregister:
            return
        discard(self._processes.db)  # It may have been lost since its last use by this thread.
        try:
            with deadline(self._options.answer_limit):
                self._processes.filter(pk=self.process.pk).erase()
            SharedStatus.remove(self._status.name)
        except (DatabaseError, InterfaceError) as error:
            internal_errors.report(
                error,
                "%s could not deregister and will be declared dead: %s",
                self.process,
                error,
                level=logging.WARNING,
            )

    @property
    def healthy(self) -> bool:
        """Return whether other processes still consider this one alive.

        Measured by its own clock, with a third of the time to spare.
        """
        return not self.declared_dead and self.silent_for < self._options.patience

    @property
    def silent_for(self) -> float:
        """Seconds since the last successful heartbeat."""
        return time.monotonic() - self._last

    def _register(self) -> None:
        # What was asked of a supervisor holds when it registers again.
        self.process.request = self._request
        self.process.heartbeat_at, self.process.expires_at = (
            Now(),
            now_plus(self._options.dead_after),
        )
        self._processes.register(self.process)

    def _register_again(self) -> bool:
        """Register a supervisor again. Return False for other processes.

        A supervisor owns no jobs: if it was declared dead by mistake, it has lost nothing.
        """
        if self.process.kind == Process.Kind.SUPERVISOR:
            self._register()
            return True
        return False

    def _run(self) -> None:
        prepare(self._processes.db, self._options.statement_limit)
        while (
            not self._ended.wait(self._options.beat_interval * random.uniform(0.95, 1.0))
            and not self.declared_dead
        ):
            if (
                self._status.since_loop_tick()
                < self._options.patience + self._options.longest_shutdown
            ):
                with deadline(self._options.answer_limit):
                    self._beat()
            else:
                logger.error(
                    "%s makes no progress and sends no heartbeat.",
                    self.process,
                    extra=self.process.log_fields,
                )
        close_connections()

    def _obey(self, request: str) -> None:
        if request == self._request:
            return
        self._request = request
        wanted = {"": "claim jobs again", Process.Request.QUIET: "claim no more jobs"}
        logger.info(
            "%s was asked by an operator to %s.",
            self.process,
            wanted.get(request, request),
            extra=self.process.log_fields,
        )
        self._back()

    def _beat(self) -> None:
        began = time.monotonic()
        try:
            memory = resident_mb(os.getpid())
            request = self._processes.beat_and_ask(
                self.process,
                self._options.dead_after,
                round(memory * MB) if memory else None,
                before=self._request,
            )
            if request is not None or self._register_again():
                self._last = began
                self._obey(self._request if request is None else request)
                if self._is_away:
                    logger.warning("%s beats again.", self.process, extra=self.process.log_fields)
                    self._is_away = False
                    note_outage()
                    self._back()
            else:
                logger.error(
                    "%s was declared dead by others; it stops claiming jobs.",
                    self.process,
                    extra=self.process.log_fields,
                )
                self.declared_dead = True
        except (DatabaseError, InterfaceError) as error:
            if not self._is_away or time.monotonic() - self._said_at > self.SAY_AGAIN:
                internal_errors.report(
                    error,
                    "%s could not beat: %s",
                    self.process,
                    error,
                    level=logging.WARNING,
                    extra=self.process.log_fields,
                )
                self._said_at = time.monotonic()
            self._is_away = True
            close_connections()
