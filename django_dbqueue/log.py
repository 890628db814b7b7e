"""For ``LOGGING``: a filter that adds the running job to each log line, and a JSON formatter."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Protocol

from .core.error_reports import text_of


class _Job(Protocol):
    """A job with the fields of its log lines."""

    @property
    def log_fields(self) -> Mapping[str, object]: ...


# The job whose task runs in this context: in its thread, in its coroutines, and in the calls that
# asgiref makes from one into the other.
running_job: ContextVar[_Job | None] = ContextVar("dbqueue_running_job", default=None)

FIELDS = ("job_id", "task", "queue", "attempt", "process_name")


class JobFields(logging.Filter):
    """Add ``job_id``, ``task``, ``queue``, ``attempt`` and ``process_name`` to each record.

    Outside a job, the fields are empty text. A field that the record has already is left unchanged.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields, and return True: no record is dropped."""
        job = running_job.get()
        found: Mapping[str, object] = job.log_fields if job else {}
        for name in FIELDS:
            if not hasattr(record, name):
                setattr(record, name, found.get(name, ""))
        return True


# What every record has: its other attributes are the fields of its line.
_USUAL = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Write each record as a JSON object in one line.

    It has ``time`` (UTC, with milliseconds), ``level``, ``logger`` and ``message``, the fields that
    the record has beside these, unless they are empty text, and ``exception`` with the traceback.
    Values that JSON has not are written as text.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _USUAL and name not in line and (not isinstance(value, str) or value):
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return _dumps(line)
        except Exception:
            return _dumps({name: _with_text(value) for name, value in line.items()})


def _dumps(value: object) -> str:
    return json.dumps(value, default=str, allow_nan=False)


def _with_text(value: object) -> object:
    """Return a value that JSON has, or its text."""
    try:
        _dumps(value)
    except Exception:
        return text_of(value)
    return value
