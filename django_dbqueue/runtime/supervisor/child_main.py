"""Entry point of a supervisor's child process."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

from ..shutdown import Shutdown

# Seconds that receivers of signals may still run at the end.
LAST = 1.0
# Windows has no SIGUSR2.
STACKS: int | None = getattr(signal, "SIGUSR2", None)


def main(
    role: str,
    alias: str,
    changes: dict[str, object],
    supervisor: int,
    status_name: str,
    stacks: str,
    finished: Connection,
    level: int,
    as_json: bool,
) -> None:
    """Set Django up, run the role until shutdown, and exit even if threads are still busy.

    ``status_name`` is the name of its shared status. On a signal, the process writes the stack
    traces of all its threads to the file ``stacks``. ``level`` and ``as_json`` are how the
    supervisor logs.
    """
    import django

    # A spawned process would spawn its own too, instead of the platform's default or the project's.
    multiprocessing.set_start_method(None, force=True)
    django.setup()
    if STACKS:
        faulthandler.register(STACKS, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115

    from ...core.internal_errors import report, wait_for_receivers
    from ..connections import keep_connections
    from ..logging_setup import log_to_console

    # Models, and modules that import them, can be imported from here on.
    from ..shared_status import SharedStatus
    from ..signals import obey_supervisor, run_beside_signals
    from .roles import run_role

    log_to_console(level or None, as_json)
    keep_connections()
    stop = Shutdown()
    obey_supervisor(stop)
    on_end_of_parent(stop.request)
    status = SharedStatus.open(status_name)
    # Objects loaded by now stay until the end: scanning them for garbage again and again cost each
    # job 4 µs.
    gc.freeze()
    code = 0
    try:
        code = run_beside_signals(
            lambda: run_role(role, alias, changes, status, stop, supervisor, finished),
            status.mark_gil_alive,
        )
    except Exception as error:
        report(error, "%s: crashed: %s", role, error)
        code = 1
    wait_for_receivers(LAST)
    logging.shutdown()
    status.mark_exit(code)
    os._exit(code)


def on_end_of_parent(act: Callable[[], object]) -> None:
    """Call ``act`` on another thread once the parent process has ended."""

    def watch() -> None:
        if parent := multiprocessing.parent_process():
            wait([parent.sentinel])
            act()

    threading.Thread(target=watch, daemon=True).start()
