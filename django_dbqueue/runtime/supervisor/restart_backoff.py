"""Backoff before a child that has crashed is started again."""

from __future__ import annotations

import time

from .child_spec import ChildSpec

# A child that dies within this number of seconds after its start is in a crash loop.
SOON = 10.0


class RestartBackoff:
    """Exponential backoff for each specification, so that one group's crashes delay no other."""

    # Seconds after the first crash, and at most.
    FIRST, LONGEST = 0.1, 30.0

    def __init__(self) -> None:
        self._crashes: dict[str, int] = {}
        self._start_at: dict[str, float] = {}

    def record(self, spec: ChildSpec, *, born: float) -> int:
        """Record a crash of a child that was born then. Return the number of crashes in a row."""
        key, now = _key(spec), time.monotonic()
        self._crashes[key] = number = self._crashes.get(key, 0) + 1 if now - born < SOON else 1
        self._start_at[key] = now + min(self.LONGEST, self.FIRST * 2 ** min(number - 1, 10))
        return number

    def may_start(self, spec: ChildSpec) -> bool:
        return time.monotonic() >= self._start_at.get(_key(spec), 0.0)

    @property
    def is_waiting(self) -> bool:
        """True while a child waits for its start."""
        return time.monotonic() < max(self._start_at.values(), default=0.0)


def _key(spec: ChildSpec) -> str:
    """Return a name of the specification, which stays the same if other options change."""
    return f"{spec.role} {spec.changes}"
