"""The roles that a supervisor keeps running, by name."""

from __future__ import annotations

from typing import Any

from ..backend import DatabaseBackend
from ..compat import remember_receivers, signals, task_backends
from .board import Board
from .dispatcher import Dispatcher, DrainingDispatcher
from .log import skip_unheard_lines
from .stop import Stop
from .worker import Worker

ROLES: dict[str, type[Worker] | type[Dispatcher]] = {
    "worker": Worker,
    "dispatcher": Dispatcher,
    "draining dispatcher": DrainingDispatcher,
}
# The exit code of a role whose jobs still ran when it ended; sysexits.h calls it "temporary failure".
LEFT_JOBS = 75


def run_role(role: str, alias: str, changes: dict[str, Any], board: Board, stop: Stop, supervisor: int) -> int:
    """Be a worker, or a dispatcher, until ``stop`` is asked for. ``changes`` are those to the backend's options.

    Returns the exit code.
    """
    remember_receivers()
    skip_unheard_lines(signals.logger)
    backend: DatabaseBackend = task_backends[alias]  # type: ignore[assignment]
    return 0 if ROLES[role](backend, backend.config.changed(**changes), board).run(stop, supervisor) else LEFT_JOBS
