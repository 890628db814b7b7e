"""Ends the wait for an answer on a line that is silent and was never closed.

MySQL's driver has a timeout for that. PostgreSQL's has none, and neither the server nor TCP can help: the one does not hear,
and a proxy in between may go on to acknowledge what nobody reads.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LOOK = 0.5

# By thread: its connection, of Django's, and until when it waits.
_lines: dict[int, Any] = {}
_ends: dict[int, float] = {}
_start = threading.Lock()
_started = False


def watch_socket(line: Any) -> None:
    """The calling thread waits on the driver's connection of this one, from the first question that is asked on it."""
    _lines[threading.get_ident()] = line


def unwatch_socket() -> None:
    """The calling thread has closed it."""
    _lines.pop(threading.get_ident(), None)


@contextmanager
def answered_within(seconds: float) -> Iterator[None]:
    """Cut the calling thread's line if what is asked inside has no answer by then: its wait ends in an error."""
    _watch()
    thread = threading.get_ident()
    _ends[thread] = time.monotonic() + seconds
    try:
        yield
    finally:
        _ends.pop(thread, None)


def _watch() -> None:
    global _started
    with _start:
        if not _started:
            _started = True
            threading.Thread(target=_run, name="deadline", daemon=True).start()


def _run() -> None:
    while True:
        time.sleep(_LOOK)
        now = time.monotonic()
        for thread, end in list(_ends.items()):
            if end < now and (line := _lines.get(thread)) and (driver := line.connection):
                _ends.pop(thread, None)
                _cut(driver)


def _cut(driver: Any) -> None:
    """The driver's own close() would wait for the thread that uses it."""
    with suppress(Exception), socket.socket(fileno=os.dup(driver.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)
