"""Run times of each task in this process."""

from __future__ import annotations


class RunTimes:
    """EWMA (exponentially weighted moving average) of the run time per task, in seconds.

    The latest jobs weigh most.
    """

    WEIGHT = 0.2

    def __init__(self) -> None:
        self._usual: dict[str, float] = {}

    def observe(self, task: str, seconds: float) -> None:
        usual = self._usual.setdefault(task, seconds)
        self._usual[task] = usual + (seconds - usual) * self.WEIGHT

    def estimate(self, task: str) -> float | None:
        """Return the estimate, or None if no job of the task has run in this process."""
        return self._usual.get(task)
