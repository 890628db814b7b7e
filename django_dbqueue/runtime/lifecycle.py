"""Lifecycle signals: connect the receivers that OPTIONS name, and send the signals."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping

from django.utils.module_loading import import_string

from .. import signals
from ..core.internal_errors import send_beside
from ..core.safe_log import logger
from ..models import Process

# Seconds that a process waits for its receivers: at its start, and later. A shutdown sends two
# signals, and has five seconds beyond those of its jobs.
STARTED, LATER = 10.0, 2.0


def connect_receivers(receivers: Mapping[str, Iterable[str]]) -> None:
    """Connect the receivers of ``OPTIONS["receivers"]``, each once."""
    for name, paths in receivers.items():
        for path in paths:
            getattr(signals, name).connect(import_string(path), weak=False)


def send(event: str, process: Process, *kinds: str) -> None:
    """Send the signals of an event, and wait for their receivers for a limited time.

    Afterwards the process continues: it sends heartbeats, and its main loop makes progress.
    """
    seconds = STARTED if event == "started" else LATER
    end = time.monotonic() + seconds
    names = [f"{kind}_{event}" for kind in kinds]
    threads = [send_beside(getattr(signals, name), Process, process=process) for name in names]
    for name, thread in zip(names, threads, strict=True):
        if thread and _still_runs(thread, end):
            logger.error(
                "signals: receivers of %s still run after %g s; %s continues without them.\n%s",
                name,
                seconds,
                process,
                _stack(thread),
                extra=process.log_fields,
            )


def _still_runs(thread: threading.Thread, end: float) -> bool:
    thread.join(max(0.0, end - time.monotonic()))
    return thread.is_alive()


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""
