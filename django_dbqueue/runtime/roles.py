"""The roles that a supervisor keeps running, by name."""

from __future__ import annotations

from typing import Any

from ..backend import DatabaseBackend
from ..compat import task_backends
from .dispatcher import Dispatcher
from .stop import Stop
from .worker import Worker

ROLES: dict[str, type[Worker] | type[Dispatcher]] = {"worker": Worker, "dispatcher": Dispatcher}


def run_role(role: str, alias: str, changes: dict[str, Any], stop: Stop, supervisor: int) -> None:
    """Be a worker, or a dispatcher, until ``stop`` is asked for. ``changes`` are those to the backend's options."""
    backend: DatabaseBackend = task_backends[alias]  # type: ignore[assignment]
    ROLES[role](backend, backend.config.changed(**changes)).run(stop, supervisor)
