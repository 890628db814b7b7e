"""The options that the pages go by: those of the first backend that keeps its jobs in a database."""

from __future__ import annotations

from ..backend import DatabaseBackend
from ..compat import task_backends
from ..options import Options


def options() -> Options:
    """The defaults, if the project has no such backend."""
    backends = (task_backends[alias] for alias in task_backends)
    return next((backend.config for backend in backends if isinstance(backend, DatabaseBackend)), Options())
