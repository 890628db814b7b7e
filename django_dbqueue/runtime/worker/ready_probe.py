"""Looks for ready jobs at little cost, on databases without NOTIFY."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from selectors import EVENT_READ, BaseSelector
from typing import Any

from django.db import connections

from ...core.queue_selector import QueueSelector
from ...models.enums import Lane
from ...models.expressions import composed
from ...models.job import JobQuerySet


class ReadyProbe:
    """Tells whether a worker's queues have ready jobs, by one lookup in the lane index.

    ``found`` is called with the lane of such a job: the most urgent one of its queue.

    It is meant for workers that know of no ready job. On SQLite, it first asks whether another
    connection has written to the file. Linux tells of writes to the file: then it asks only after
    one, and an idle worker asks nothing.
    """

    # Seconds between two lookups where nothing tells of a write: soon after a job, and later. Half
    # of it is the usual wait of a job. To wake up more often would take an idle worker more than
    # 1 % of a core.
    SOON, LATER = 0.008, 0.02
    # Seconds after the last job for which another one is expected soon.
    LINGER = 1.0
    # Seconds after a write until the first and the last lookup: the write comes before the end of
    # its transaction, and a lookup before that end finds nothing. The pause doubles.
    FIRST, LAST = 0.0005, 0.1

    def __init__(
        self, jobs: JobQuerySet, selector: QueueSelector, found: Callable[[Lane], None]
    ) -> None:
        self._found = found
        names, ready = selector.names(), jobs.ready().order_by("-state", "-queue", "-priority")
        wanted = ready if names is None else ready.filter(queue__in=names)
        self._statement, self._values = composed(wanted.values_list("queue", "priority")[:1])
        self._database, self._version = jobs.db, 0
        self._is_sqlite = connections[jobs.db].vendor == "sqlite"
        # The time of the next lookup, the pause after it, and the time at which a job was found.
        self.due, self._pause, self._found_at = 0.0, self.LATER, 0.0
        self._watch = FileWatch.of(jobs.db) if self._is_sqlite else None

    @contextmanager
    def watching(self, selector: BaseSelector) -> Iterator[None]:
        """Let the selector tell of writes during a wait. It begins with a lookup."""
        self._look_soon()
        if self._watch is None:
            yield
            return
        self._watch.renew()
        selector.register(self._watch.number, EVENT_READ, self._note_write)
        try:
            yield
        finally:
            selector.unregister(self._watch.number)

    def _note_write(self, number: int) -> bool:
        """Handle writes to the file. They are no reason to poll before a lookup has found a job."""
        os.read(number, 65536)
        self._look_soon()
        return False

    def _look_soon(self) -> None:
        self._pause = self.FIRST if self._watch else self._interval
        self.due = min(self.due, time.monotonic() + self._pause)

    @property
    def _interval(self) -> float:
        return self.SOON if time.monotonic() - self._found_at < self.LINGER else self.LATER

    def finds(self) -> bool:
        """Return whether there may be a ready job. Raises DatabaseError or InterfaceError."""
        if self._watch is None:
            self._pause = self._interval
        else:
            self._pause = self._pause * 2 if self._pause < self.LAST else float("inf")
        self.due = time.monotonic() + self._pause
        found = self._has_changed() and self._has_ready()
        if found:
            self._found_at = time.monotonic()
        return found

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _has_changed(self) -> bool:
        if not self._is_sqlite:
            return True
        connection = connections[self._database]
        connection.ensure_connection()
        before = self._version
        # Not by a cursor of Django's: without a watch, this is done fifty times a second.
        (self._version,) = connection.connection.execute("PRAGMA data_version").fetchone()
        return self._version != before

    def _has_ready(self) -> bool:
        with connections[self._database].cursor() as cursor:
            cursor.execute(self._statement, self._values)
            row = cursor.fetchone()
        if row:
            self._found(Lane(*row))
        return row is not None


class FileWatch:
    """Writes to a SQLite database, as Linux tells of them by inotify(7)."""

    _MODIFY = 0x2

    def __init__(self, number: int, path: str) -> None:
        self.number, self._path = number, path

    @classmethod
    def of(cls, database: str) -> FileWatch | None:
        """Return a watch; None if the system has none, or the database is not in a file."""
        if sys.platform != "linux":
            return None
        with connections[database].cursor() as cursor:
            cursor.execute("PRAGMA database_list")
            path = next(path for _number, name, path in cursor.fetchall() if name == "main")
        if not path:
            return None
        number = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        return cls(number, path) if number >= 0 else None

    def renew(self) -> None:
        """Watch the files that the database has now: the log may have been made anew."""
        for path in (self._path, f"{self._path}-wal"):
            _libc().inotify_add_watch(self.number, os.fsencode(path), self._MODIFY)

    def close(self) -> None:
        os.close(self.number)


def _libc() -> Any:
    return ctypes.CDLL(None)
