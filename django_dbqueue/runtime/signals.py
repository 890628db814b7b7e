"""The operating system's signals, as the wish to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from .stop import Stop

# Windows has no SIGQUIT.
NOW = getattr(signal, "SIGQUIT", signal.SIGTERM)


def obey_signals(stop: Stop) -> None:
    """SIGTERM and SIGINT: end in peace; a second one, or SIGQUIT: end now."""

    def ask(number: int, frame: Any) -> None:
        stop.ask(now=stop.asked or number == NOW)

    for number in (signal.SIGTERM, signal.SIGINT, NOW):
        signal.signal(number, ask)


def obey_supervisor(stop: Stop) -> None:
    """SIGTERM: end in peace; SIGQUIT: end now. The supervisor decides which.

    What a terminal or a service manager sends to the whole group reaches the supervisor too: SIGINT is left to it, and a
    SIGTERM that comes twice, once from each, means no more than one.
    """

    def ask(number: int, frame: Any) -> None:
        stop.ask(now=number == NOW)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, NOW):
        signal.signal(number, ask)


def run_beside_signals(target: Callable[[], Any]) -> Any:
    """Run ``target`` on another thread, and return what it returns.

    The main thread only waits, so that a signal handler never finds a lock held by the very thread it interrupts.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(target())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="runqueue", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(1.0)
    if errors:
        raise errors[0]
    return results[0]
