"""Fields of the running job in the log lines of structlog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from structlog.contextvars import bound_contextvars

from ..context import JobContext
from ..middleware import TaskMiddleware


class StructlogMiddleware(TaskMiddleware):
    """Bind ``job_id``, ``task``, ``queue``, ``attempt`` and ``process_name`` while a task runs.

    The configuration of structlog must have the processor
    ``structlog.contextvars.merge_contextvars``.
    """

    @contextmanager
    def run(self, context: JobContext) -> Iterator[None]:
        """Bind the fields of the job."""
        with bound_contextvars(**context.job.log_fields):
            yield
