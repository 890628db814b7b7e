"""Where a supervisor's child process begins."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from typing import Any

from .stop import Stop


def main(role: str, alias: str, changes: dict[str, Any], supervisor: int) -> None:
    """Set Django up, be the role until told to stop, and end the process, whatever threads are still busy."""
    import django

    django.setup()
    # Models, and what imports them, are to be had from here on.
    from .connection import keep_connections
    from .log import log_to_console
    from .roles import run_role
    from .signals import obey_supervisor, run_beside_signals

    log_to_console()
    keep_connections()
    stop = Stop()
    obey_supervisor(stop)
    threading.Thread(target=_end_with_parent, args=(stop,), daemon=True).start()
    code = 0
    try:
        run_beside_signals(lambda: run_role(role, alias, changes, stop, supervisor))
    except Exception:
        logging.getLogger("django_dbqueue").exception("The %s ended by an error.", role)
        code = 1
    logging.shutdown()
    os._exit(code)


def _end_with_parent(stop: Stop) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        stop.ask()
