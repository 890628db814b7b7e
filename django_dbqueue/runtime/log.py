"""Log lines for people: where they go if the project has not said it, and not more of them than say something."""

from __future__ import annotations

import logging
import time


def log_to_console(level: int | None = None) -> None:
    """Show this package's log on the console if the project's ``LOGGING`` handles it nowhere."""
    logger = logging.getLogger("django_dbqueue")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    if level is not None:
        logger.setLevel(level)


class Trouble:
    """Something that goes wrong again and again: it is said at first, then once a minute, and when it is over."""

    AGAIN = 60.0

    def __init__(self, what: str) -> None:
        self._what, self._logger = what, logging.getLogger("django_dbqueue")
        self._since = self._said = 0.0

    def report(self, error: Exception) -> None:
        now = time.monotonic()
        self._since = self._since or now
        if not self._said or now - self._said > self.AGAIN:
            self._said = now
            self._logger.warning("%s: %s", self._what, error)

    def over(self) -> None:
        if self._since:
            self._logger.info("%s for %.1f s; it is over.", self._what, time.monotonic() - self._since)
            self._since = self._said = 0.0
