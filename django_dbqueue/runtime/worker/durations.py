"""How long the jobs of each task usually take in this process."""

from __future__ import annotations


class RunTimes:
    """The last jobs count most. In seconds."""

    WEIGHT = 0.2

    def __init__(self) -> None:
        self._usual: dict[str, float] = {}

    def observe(self, task: str, seconds: float) -> None:
        usual = self._usual.setdefault(task, seconds)
        self._usual[task] = usual + (seconds - usual) * self.WEIGHT

    def estimate(self, task: str) -> float | None:
        """None, if none has run here."""
        return self._usual.get(task)
