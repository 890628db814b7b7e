"""Reports of errors inside the queue: a log line with the traceback, and ``internal_error``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from django.db import connections
from django.dispatch import Signal

from ..signals import internal_error
from .safe_log import logger

# The largest number of signals whose receivers run. Receivers that hang must not use up threads.
MOST_THREADS = 20
_threads: set[threading.Thread] = set()
# The row of this operating system process: of the first role that has registered in it.
_own: list[object] = []


def report(
    error: BaseException,
    message: str,
    *args: object,
    level: int = logging.ERROR,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Log an error inside the queue, and send ``internal_error`` without waiting for receivers."""
    logger.log(level, message, *args, exc_info=error, extra=extra, stacklevel=2)
    send_beside(internal_error, type(error), exception=error, process=_own[0] if _own else None)


def note_process(process: object) -> bool:
    """Record the row of a role that has registered here. Return whether it is the only one."""
    _own.append(process)
    return len(_own) == 1


def forget_process(process: object) -> None:
    """Forget a role that has ended, if it is recorded."""
    with suppress(ValueError):
        _own.remove(process)


def send_beside(signal: Signal, sender: type, **named: Any) -> threading.Thread | None:
    """Send a signal on a new thread. Return the thread, or None if there are no receivers."""
    if not signal.has_listeners(sender):
        return None
    if len(_threads) >= MOST_THREADS:
        logger.error("signals: not sent: receivers of %d earlier ones still run.", MOST_THREADS)
        return None

    def run() -> None:
        try:
            for receiver, answer in signal.send_robust(sender, **named):
                if isinstance(answer, Exception):
                    name = getattr(receiver, "__qualname__", repr(receiver))
                    path = f"{getattr(receiver, '__module__', '')}.{name}"
                    logger.error("signals: receiver %s failed.", path, exc_info=answer)
        except BaseException:  # send_robust() handles all subclasses of Exception.
            logger.exception("signals: a receiver failed; those after it were not called.")
        finally:
            connections.close_all()
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="signals-receivers", daemon=True)
    _threads.add(thread)
    try:
        thread.start()
    except RuntimeError:  # The interpreter shuts down, or the system has no more threads.
        _threads.discard(thread)
        return None
    return thread


def wait_for_receivers(seconds: float) -> None:
    """Wait until the receivers of all signals have returned, before the process exits."""
    end = time.monotonic() + seconds
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
