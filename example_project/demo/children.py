"""Child processes of the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import FOLDER, ROOT
from .interrupts import deferred

# SIGTERM lets running jobs end, SIGQUIT releases them at once.
ENDINGS = [(signal.SIGTERM, 40.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, None)]


def log_of(name: str) -> Path:
    return FOLDER / f"{name}.log"


@contextmanager
def command(name: str, *arguments: str, debug: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``manage.py name arguments`` during the block. Its output goes to a log of its name."""
    process = None
    environment = {**os.environ, "DEBUG": str(debug)}
    try:
        with deferred(), log_of(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, ROOT / "manage.py", name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # The terminal's Ctrl-C reaches the demo only, which ends its processes in order.
                start_new_session=True,
            )
        yield process
    finally:
        if process:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process gracefully; escalate on another Ctrl-C, or after a timeout."""
    for number, patience in ENDINGS:
        try:
            process.send_signal(number)
            process.wait(patience)
            return
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
