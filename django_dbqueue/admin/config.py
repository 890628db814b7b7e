"""The options that the pages go by: those of the first backend that keeps its jobs in a database."""

from __future__ import annotations

from ..backend import DatabaseBackend
from ..compat import task_backends
from ..core.options import Options
from ..models import Queue, RecurringTask


def backend() -> DatabaseBackend | None:
    backends = (task_backends[alias] for alias in task_backends)
    return next((each for each in backends if isinstance(each, DatabaseBackend)), None)


def alias_for(row: RecurringTask) -> str | None:
    """The backend through which a recurring task is enqueued: for a command this queue's, for a task the task's own (None)."""
    first = backend()
    return first.alias if first and row.command else None


def limit_of(queue: Queue) -> int | None:
    """How many of its jobs may run at a time: an operator's limit, or the settings'."""
    first = backend()
    return queue.limit or (first.options_of(queue.name).limit if first else None)


def options() -> Options:
    """The defaults, if the project has no such backend."""
    first = backend()
    return first.config if first else Options()
