"""The wish that a role ends: in peace, or now."""

from __future__ import annotations

import threading


class Stop:
    """Passed to every role; whoever sleeps on an event of its own registers it with ``wakes``."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._now = threading.Event()
        self._sleepers: list[threading.Event] = []

    def ask(self, *, now: bool = False) -> None:
        if now:
            self._now.set()
        self._asked.set()
        for event in self._sleepers:
            event.set()

    def wakes(self, event: threading.Event) -> None:
        self._sleepers.append(event)
        if self.asked:
            event.set()

    def wait(self, seconds: float | None) -> bool:
        return self._asked.wait(seconds)

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def now(self) -> bool:
        return self._now.is_set()
