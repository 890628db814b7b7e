"""Ctrl-C and other end signals as KeyboardInterrupt, deferred in critical sections."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


def end_on_signals() -> None:
    """Raise KeyboardInterrupt for each of the signals that end a process."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Defer KeyboardInterrupt until the end of the block."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt
