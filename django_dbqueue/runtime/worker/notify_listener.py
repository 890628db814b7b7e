"""Where a worker waits: until something wakes it, or PostgreSQL's NOTIFY tells it of jobs. Elsewhere there is nothing to hear."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from django.db import connections

from ...core.notify import CHANNEL
from ..logging_setup import Trouble

logger = logging.getLogger("django_dbqueue")

# While a worker would be told of jobs, it looks for them so many times less often.
TOLD = 10


def can_listen(database: str) -> bool:
    connection: Any = connections[database]
    return connection.vendor == "postgresql" and getattr(connection.Database, "__name__", "") == "psycopg"


class NotifyListener:
    """Calls ``heard`` with what it is told, which returns whether that is a reason to look for jobs; and ``began`` whenever it
    begins to hear, or hears no more: of what comes meanwhile, it is not told.

    A thread of its own connects, as that may take long. But who waits hears by itself: to be told by another thread took 0.1 ms
    of the 2.1 from a job's commit to its start.
    """

    def __init__(self, database: str, heard: Callable[[str], bool], began: Callable[[], None]) -> None:
        self._database, self._heard, self._began = database, heard, began
        # So many times less often one needs to look for jobs.
        self.patience = 1
        # The driver's connection, the number of its socket, and the patience with it: until the one who waits takes them.
        self._made: tuple[Any, int, int] | None = None
        # The one who waits has it: nobody else touches it until it is lost.
        self._line: Any = None
        self._number = -1
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._is_woken = self._is_pooled = False
        self._trouble = Trouble("Listening for new jobs is interrupted, and polling goes on")
        self._bell, self._cord = socket.socketpair()
        # Not epoll, which goes on to tell of a socket that was closed here, if a task has forked the process.
        self._ready = getattr(selectors, "PollSelector", selectors.SelectSelector)()
        self._ready.register(self._bell, selectors.EVENT_READ, self._wake_up)

    def start(self) -> None:
        if can_listen(self._database):
            threading.Thread(target=self._run, name="listener", daemon=True).start()

    def wake(self) -> None:
        """End the wait that is under way, or else the next. From any thread."""
        if not self._is_woken:
            self._is_woken = True
            try:
                self._cord.send(b"!")
            except OSError:
                self._is_woken = False

    def wait(self, seconds: float) -> None:
        """Until there is a reason to look for jobs, or for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if [key for key, _events in self._ready.select(left) if key.data(key.fd)]:
                return

    def close(self) -> None:
        """Nobody waits any more, and whatever tells of jobs may stop."""
        self._closed.set()
        self._lost.set()
        for each in (self._ready, self._bell, self._cord):
            each.close()

    def listen_anew(self) -> None:
        """On another connection. For the one who waits."""
        if self._line is not None and not self._lost.is_set():
            self._ready.unregister(self._number)
            self.patience = 1
            self._lost.set()
            self._began()

    def _wake_up(self, bell: int) -> bool:
        self._bell.recv(64)
        # Not before: a byte that was read while this is set would be the last one.
        self._is_woken = False
        if self._made:
            (self._line, self._number, self.patience), self._made = self._made, None
            self._ready.register(self._number, selectors.EVENT_READ, self._hear)
            self._began()
        return True

    def _hear(self, number: int) -> bool:
        is_reason = False
        try:
            self._line.consume_input()
            while notice := self._line.notifies():
                is_reason |= self._heard(notice.extra.decode(errors="replace"))
        except Exception as error:
            self.listen_anew()
            self._trouble.report(error)
            return True
        return is_reason

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except Exception as error:
                self._trouble.report(error)
            self._closed.wait(1.0)

    def _listen(self) -> None:
        connection: Any = connections.create_connection(self._database)
        connection.set_autocommit(True)
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                (server,) = cursor.fetchone()
                cursor.execute(f"LISTEN {CHANNEL}")
            line = connection.connection.pgconn
            # A pool by transactions takes LISTEN, and passes on nothing.
            patience = TOLD if server == connection.connection.info.backend_pid else 1
            if patience == 1 and not self._is_pooled:
                self._is_pooled = True
                logger.info(
                    "LISTEN goes through a pool of connections. Behind one by transactions, jobs are found by polling alone."
                )
            self._lost.clear()
            self._trouble.over()
            self._made = line, line.socket, patience
            self.wake()
            if not self._closed.is_set():
                self._lost.wait()
        finally:
            connection.close()
