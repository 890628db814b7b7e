"""Roles that a supervisor keeps running, by name."""

from __future__ import annotations

from multiprocessing.connection import Connection

from ...backend import DatabaseBackend
from ...compat import remember_receivers, signals, task_backends
from ...core.safe_log import logger
from ...registry import discover
from .. import lifecycle
from ..announcer import announce_from
from ..dispatcher import Dispatcher, DrainingDispatcher
from ..logging_setup import mail_no_failures, silence_polling, skip_unheard_lines
from ..shared_status import SharedStatus
from ..shutdown import Shutdown
from ..worker.worker import Worker

ROLES: dict[str, type[Worker] | type[Dispatcher]] = {
    "worker": Worker,
    "dispatcher": Dispatcher,
    "draining dispatcher": DrainingDispatcher,
}
# Exit code of a role that ended while its jobs still ran; "temporary failure" in sysexits.h.
EXIT_JOBS_RUNNING = 75
# Exit code of a role that cannot import its tasks; "configuration error" in sysexits.h.
CANNOT_IMPORT = 78


def run_role(
    role: str,
    alias: str,
    changes: dict[str, object],
    status: SharedStatus,
    stop: Shutdown,
    supervisor: int,
    finished: Connection,
) -> int:
    """Run a worker or a dispatcher until ``stop`` is requested. Returns the exit code.

    ``changes`` override the backend's options. The role sends ``task_finished`` for the lost jobs
    whose ids the supervisor writes to ``finished``.
    """
    remember_receivers()
    skip_unheard_lines(signals.logger)
    mail_no_failures(signals.logger)
    backend: DatabaseBackend = task_backends[alias]  # type: ignore[assignment]
    options = backend.config.changed(**changes)
    lifecycle.connect_receivers(options.receivers)
    if options.silence_polling:
        silence_polling()
    if not all(map(options.allows_import_error, discover(options.task_modules))):
        return CANNOT_IMPORT
    try:
        _ = backend.middleware
    except Exception:
        logger.exception("%s: middleware cannot be used; see manage.py check", role)
        return CANNOT_IMPORT
    announce_from(finished, backend)
    return 0 if ROLES[role](backend, options, status).run(stop, supervisor) else EXIT_JOBS_RUNNING
