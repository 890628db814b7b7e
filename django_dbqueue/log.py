"""A filter for ``LOGGING`` that says in each line which job it is of."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

# The job whose task runs in this context: its thread, its coroutines, and what asgiref calls from one in the other.
running_job: ContextVar[Any] = ContextVar("dbqueue_running_job", default=None)

FIELDS = ("job_id", "task", "queue", "attempt", "process_name")


class JobFields(logging.Filter):
    """Give each record ``job_id``, ``task``, ``queue``, ``attempt`` and ``process_name``; they are empty outside a job."""

    def filter(self, record: logging.LogRecord) -> bool:
        job = running_job.get()
        found = job.log_fields if job else {}
        for name in FIELDS:
            if not hasattr(record, name):
                setattr(record, name, found.get(name, ""))
        return True
