"""Client-side deadline for statements on half-open TCP connections.

MySQL's driver has a timeout for this. PostgreSQL's has none, and neither the server nor TCP can
help: the server receives nothing, and a proxy in between may keep acknowledging data that is never
read.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

# Seconds between two checks of the deadlines.
_CHECK_SECONDS = 0.5

# By thread: its Django connection, and its deadline.
_connections: dict[int, BaseDatabaseWrapper] = {}
_ends: dict[int, float] = {}
_start = threading.Lock()
_started = False


def watch_socket(connection: BaseDatabaseWrapper) -> None:
    """Watch the socket of ``connection`` for the calling thread, from its first query on."""
    _connections[threading.get_ident()] = connection


def unwatch_socket() -> None:
    """Stop watching: the calling thread has closed its connection."""
    _connections.pop(threading.get_ident(), None)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Shut down the calling thread's socket if the statements inside exceed a deadline.

    The wait of the thread then ends in an error.
    """
    if not _started:
        _ensure_thread()
    thread = threading.get_ident()
    _ends[thread] = time.monotonic() + seconds
    try:
        yield
    finally:
        _ends.pop(thread, None)


def _ensure_thread() -> None:
    global _started
    with _start:
        if not _started:
            _started = True
            threading.Thread(target=_run, name="deadline", daemon=True).start()


def _run() -> None:
    while True:
        time.sleep(_CHECK_SECONDS)
        now = time.monotonic()
        for thread, end in list(_ends.items()):
            connection = _connections.get(thread)
            if end < now and connection and (driver := connection.connection):
                _ends.pop(thread, None)
                _cut(driver)


def _cut(driver: Any) -> None:
    """Shut down the socket. The driver's own close() would wait for the thread that uses it."""
    with suppress(Exception), socket.socket(fileno=os.dup(driver.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)
