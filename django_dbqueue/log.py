"""A filter for ``LOGGING`` that adds the running job to each log line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol


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
