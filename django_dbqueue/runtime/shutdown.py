"""A shutdown request: graceful or immediate."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Shutdown:
    """Shutdown request, passed to every role.

    A role that waits for something else registers a callback with ``on_request`` that ends its
    wait.
    """

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._immediate = threading.Event()
        self._callbacks: list[Callable[[], object]] = []

    def request(self, *, immediate: bool = False) -> None:
        if immediate:
            self._immediate.set()
        self._requested.set()
        for callback in self._callbacks:
            callback()

    def on_request(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` with each request; at once if there was one."""
        self._callbacks.append(callback)
        if self.requested:
            callback()

    def wait(self, seconds: float | None) -> bool:
        """Wait for a request, at most that long. Return whether there was one."""
        return self._requested.wait(seconds)

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    @property
    def immediate(self) -> bool:
        return self._immediate.is_set()
