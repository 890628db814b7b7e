"""Entry point of a supervisor's child process."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait

from ..shutdown import Shutdown

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
) -> None:
    """Set Django up, run the role until shutdown, and exit even if threads are still busy.

    ``board_name`` is the name of its shared status. On a signal, the process writes the stack
    traces of all its threads to the file ``stacks``. ``level`` is the supervisor's log level.
    """
    import django

    django.setup()
    if STACKS:
        faulthandler.register(STACKS, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
    from django.db import DatabaseError, InterfaceError

    from ..connections import keep_connections
    from ..logging_setup import log_to_console

    # Models, and modules that import them, can be imported from here on.
    from ..shared_status import SharedStatus
    from ..signals import obey_supervisor, run_beside_signals
    from .roles import run_role

    log_to_console(level or None)
    keep_connections()
    stop = Shutdown()
    obey_supervisor(stop)
    threading.Thread(target=_end_with_parent, args=(stop,), daemon=True).start()
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
    except (DatabaseError, InterfaceError) as error:
        logging.getLogger("django_dbqueue").error(
            "%s: crashed with a database error: %s", role, error
        )
        code = 1
    except Exception:
        logging.getLogger("django_dbqueue").exception("%s: crashed.", role)
        code = 1
    logging.shutdown()
    os._exit(code)


def _end_with_parent(stop: Shutdown) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        stop.request()
