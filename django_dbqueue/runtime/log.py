"""Log lines for people, where the project has not said where its log goes."""

from __future__ import annotations

import logging


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
