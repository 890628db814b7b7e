"""Options of the pages: those of the first database backend of the project."""

from __future__ import annotations

from ..backend import DatabaseBackend
from ..compat import task_backends
from ..core.options import Options
from ..models import Queue, RecurringTask


def backend() -> DatabaseBackend | None:
    backends = (task_backends[alias] for alias in task_backends)
    return next((each for each in backends if isinstance(each, DatabaseBackend)), None)


def alias_for(row: RecurringTask) -> str | None:
    """Return the alias of the backend that enqueues a recurring task.

    A command has the first backend; a task has its own (None).
    """
    first = backend()
    return first.alias if first and row.command else None


def limit_of(queue: Queue) -> int | None:
    """Return the limit of a queue: the operator's, or the one from the settings."""
    first = backend()
    return queue.limit or (first.options_of(queue.name).limit if first else None)


def options() -> Options:
    """Return the options, or the defaults if the project has no such backend."""
    first = backend()
    return first.config if first else Options()
