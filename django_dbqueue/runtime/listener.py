"""Hears PostgreSQL's NOTIFY, so that an idle worker starts at once. Elsewhere there is nothing to hear."""

from __future__ import annotations

import logging
import selectors
import threading
from collections.abc import Callable
from typing import Any

from django.db import connections

from ..wakeup import CHANNEL
from .stop import Stop

# While a worker would be told of jobs, it looks for them so many times less often.
TOLD = 10

logger = logging.getLogger("django_dbqueue")


def can_listen(database: str) -> bool:
    connection: Any = connections[database]
    return connection.vendor == "postgresql" and getattr(connection.Database, "__name__", "") == "psycopg"


class Listener:
    """A thread with a connection of its own; calls ``heard`` with what it is told, and ``began`` whenever it begins to hear,
    or hears no more: of what comes meanwhile, it is not told.
    """

    def __init__(self, database: str, stop: Stop, heard: Callable[[str], None], began: Callable[[], None]) -> None:
        self._database, self._stop, self._heard, self._began = database, stop, heard, began
        # So many times less often one needs to look for jobs.
        self.patience = 1

    def start(self) -> None:
        if can_listen(self._database):
            threading.Thread(target=self._run, name="listener", daemon=True).start()

    def _run(self) -> None:
        while not self._stop.asked:
            try:
                self._listen()
            except Exception as error:
                logger.warning("Listening for new jobs is interrupted, polling goes on: %s", error)
                self._stop.wait(1.0)

    def _listen(self) -> None:
        connection: Any = connections.create_connection(self._database)
        connection.set_autocommit(True)
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                (server,) = cursor.fetchone()
                cursor.execute(f"LISTEN {CHANNEL}")
            # A pool by transactions takes LISTEN, and passes on nothing.
            self.patience = TOLD if server == connection.connection.info.backend_pid else 1
            self._began()
            # The driver's own way to wait would look ten times a second, and starts jobs 0.07 ms later.
            line = connection.connection.pgconn
            with selectors.DefaultSelector() as selector:
                selector.register(line.socket, selectors.EVENT_READ)
                while not self._stop.asked:
                    line.consume_input()
                    while notice := line.notifies():
                        self._heard(notice.extra.decode())
                    selector.select(1.0)
        finally:
            self.patience = 1
            connection.close()
            self._began()
