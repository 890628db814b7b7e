"""A shutdown request: graceful or immediate."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Shutdown:
    """Shutdown request, passed to every role.

    A role that waits for something else registers a callback with ``wakes`` that ends its wait.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._now = threading.Event()
        self._sleepers: list[Callable[[], object]] = []

    def ask(self, *, now: bool = False) -> None:
        if now:
            self._now.set()
        self._asked.set()
        for wake in self._sleepers:
            wake()

    def wakes(self, wake: Callable[[], object]) -> None:
        self._sleepers.append(wake)
        if self.asked:
            wake()

    def wait(self, seconds: float | None) -> bool:
        return self._asked.wait(seconds)

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def now(self) -> bool:
        return self._now.is_set()
