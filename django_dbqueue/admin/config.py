"""Options of the pages: those of the chosen backend, or of the project's first one."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import router

from ..backend import DatabaseBackend
from ..compat import task_backends
from ..core.chosen_backend import chosen_backend
from ..core.options import Options
from ..models import Queue
from ..routers import QueueRouter


def backend() -> DatabaseBackend | None:
    chosen = chosen_backend.get()
    return next((each for each in _backends() if chosen in (None, each.alias)), None)


def choices() -> list[str]:
    """Return the aliases of the backends among which the pages let their user choose.

    One for each database. Only QueueRouter can lead to another database than the first one.
    """
    if not any(isinstance(each, QueueRouter) for each in router.routers):
        return []
    first_of: dict[str, str] = {}
    for each in _backends():
        first_of.setdefault(each.database, each.alias)
    return list(first_of.values()) if len(first_of) > 1 else []


def _backends() -> Iterator[DatabaseBackend]:
    backends = (task_backends[alias] for alias in task_backends)
    return (each for each in backends if isinstance(each, DatabaseBackend))


def alias() -> str | None:
    """Return the alias of the chosen backend."""
    first = backend()
    return first.alias if first else None


def limit_of(queue: Queue) -> int | None:
    """Return the limit of a queue: the operator's, or the one from the settings."""
    first = backend()
    return queue.limit or (first.options_of(queue.name).limit if first else None)


def options() -> Options:
    """Return the options, or the defaults if the project has no such backend."""
    first = backend()
    return first.config if first else Options()
