"""Operating system signals as shutdown requests."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from queue import SimpleQueue
from types import FrameType
from typing import TypeVar

from .shutdown import Shutdown

R = TypeVar("R")

# Windows has no SIGQUIT.
NOW = getattr(signal, "SIGQUIT", signal.SIGTERM)
# Nor SIGHUP.
HANGUP = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []

# Signals with a handler of this module, and each thread's mask before its fork.
_handled: set[int] = set()
_mask = threading.local()


def obey_signals(stop: Shutdown) -> None:
    """Request shutdown on signals.

    SIGTERM and SIGINT: graceful. A second one, or SIGQUIT: immediate.
    """

    _pass_on(
        (signal.SIGTERM, signal.SIGINT, NOW),
        lambda number: stop.request(immediate=stop.requested or number == NOW),
    )


def obey_hangup(stop: Shutdown, reload: Callable[[], object]) -> None:
    """Call ``reload`` on SIGHUP; if the process has lost its terminal, request graceful shutdown.

    The kernel sends SIGHUP when a terminal is closed.
    """
    had_terminal = os.isatty(0)
    for number in HANGUP:
        # Signals to the process group reach multiprocessing's tracker too, which inherits this.
        signal.signal(number, signal.SIG_IGN)
        resource_tracker.ensure_running()

    def act(number: int) -> None:
        if had_terminal and not os.isatty(0):
            stop.request()
        else:
            reload()

    _pass_on(HANGUP, act)


def obey_supervisor(stop: Shutdown) -> None:
    """Request graceful shutdown on SIGTERM, immediate on SIGQUIT. The supervisor decides which.

    A signal that a terminal or a service manager sends to the whole process group reaches the
    supervisor too. SIGINT and SIGHUP are left to the supervisor. A SIGTERM that arrives twice, once
    from each, counts as one.
    """

    for number in (signal.SIGINT, *HANGUP):
        _handle(number, ignore)
    _pass_on((signal.SIGTERM, NOW), lambda number: stop.request(immediate=number == NOW))


def ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. Programs that the process starts do not inherit this, as they do SIG_IGN."""


def _pass_on(numbers: Iterable[int], ask: Callable[[int], None]) -> None:
    """Call ``ask`` on a thread for each signal received.

    A handler may interrupt itself, so it must take no lock: SimpleQueue.put() takes none.
    """
    received: SimpleQueue[int] = SimpleQueue()

    def listen() -> None:
        while True:
            ask(received.get())

    threading.Thread(target=listen, name="signals", daemon=True).start()
    for number in numbers:
        _handle(number, lambda number, frame: received.put(number))


def _handle(number: int, handler: Callable[[int, FrameType | None], object]) -> None:
    signal.signal(number, handler)
    _handled.add(number)


# A forked process has no thread that acts on signals, so it has the default handlers. Until it has
# them, signals are blocked: of those sent right after the fork, 3 of 4 were lost.
def _before_fork() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _after_fork_in_child() -> None:
    for number in _handled:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    _handled.clear()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )


def run_beside_signals(
    target: Callable[[], R], mark_gil_alive: Callable[[], object] = lambda: None
) -> R:
    """Run ``target`` on another thread and return its result.

    Meanwhile, ``mark_gil_alive`` is called twice a second. The main thread does nothing else, so
    that a signal handler never finds a lock held by the thread that it interrupts.
    """
    results: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(target())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="runqueue", daemon=True)
    thread.start()
    while thread.is_alive():
        mark_gil_alive()
        thread.join(0.5)
    if errors:
        raise errors[0]
    return results[0]
