"""Logging setup: a console handler if the project configures none, and no redundant lines."""

from __future__ import annotations

import logging
import time

from django.conf import settings
from django.utils.log import AdminEmailHandler, RequireDebugTrue

from ..core.internal_errors import report
from ..core.safe_log import logger
from ..log import JobFields, JsonFormatter
from .connections import is_prepared


def log_to_console(level: int | None = None, as_json: bool = False) -> None:
    """Log to the console if the project's ``LOGGING`` has no handler for this package's logger.

    as_json: log all lines of the process there, also the project's, as JSON.
    """
    own, root = logging.getLogger("django_dbqueue"), logging.getLogger()
    if as_json and not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        handler.addFilter(JobFields())
        root.addHandler(handler)
        root.setLevel(logging.INFO)
    if not own.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(
            _ConsoleFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        )
        own.addHandler(handler)
        own.setLevel(logging.INFO)
    if level is not None:
        own.setLevel(level)


def logs_json() -> bool:
    """Return whether the lines of this process are written as JSON."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)


class _ConsoleFormatter(logging.Formatter):
    """Tracebacks of errors only: a warning, as in an outage, has its cause in the message."""

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info and record.levelno < logging.ERROR:
            record = logging.makeLogRecord({**vars(record), "exc_info": None, "exc_text": None})
        return super().format(record)


def silence_polling() -> None:
    """Keep the statements of the queue's own threads out of Django's SQL log.

    Those of tasks, which run on other threads, stay in it.
    """
    logging.getLogger("django.db.backends").addFilter(_is_no_poll)


def _is_no_poll(record: logging.LogRecord) -> bool:
    return not is_prepared()


def skip_unheard_lines(logger: logging.Logger) -> None:
    """Create no records below WARNING if no handler takes them.

    This is the case with Django's own settings without DEBUG. A level that the project gives the
    logger is kept. With eight threads and jobs that do nothing, this saves 20 of 100 µs per job.
    """
    if logger.level == logging.NOTSET and not _is_heard(logger):
        logger.setLevel(logging.WARNING)


def mail_no_failures(logger: logging.Logger) -> None:
    """Keep Django's ``mail_admins`` handler from sending a mail for each failed job.

    That handler belongs to a parent of the framework's logger. A handler that the project gives the
    logger itself is kept.
    """
    parent = logger.parent if logger.propagate else None
    while parent:
        for handler in parent.handlers:
            if isinstance(handler, AdminEmailHandler):
                handler.addFilter(_NotOf(logger.name))
        parent = parent.parent if parent.propagate else None


class _NotOf(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.name != self.name


def _is_heard(logger: logging.Logger) -> bool:
    taking = [
        handler
        for handler in logger.handlers
        if handler.level <= logging.INFO and not _is_for_debug(handler)
    ]
    return bool(taking) or bool(logger.propagate and logger.parent and _is_heard(logger.parent))


def _is_for_debug(handler: logging.Handler) -> bool:
    return not settings.DEBUG and any(
        isinstance(each, RequireDebugTrue) for each in handler.filters
    )


class RepeatedProblem:
    """A repeated problem: logged at first, then once a minute, and when it is over."""

    AGAIN = 60.0

    def __init__(self, what: str) -> None:
        self._what = what
        self._since = self._said = 0.0

    def report(self, error: Exception) -> None:
        now = time.monotonic()
        self._since = self._since or now
        if not self._said or now - self._said > self.AGAIN:
            self._said = now
            report(error, "%s: %s", self._what, error, level=logging.WARNING)

    def over(self) -> None:
        if self._since:
            logger.info("%s (resolved after %.1f s).", self._what, time.monotonic() - self._since)
            self._since = self._said = 0.0
