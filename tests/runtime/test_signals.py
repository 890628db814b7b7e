"""Signals that interrupt each other, as from a service manager and a supervisor at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

VICTIM = """
import sys, time
from django_dbqueue.runtime import signals
from django_dbqueue.runtime.shutdown import Shutdown

stop = Shutdown()
getattr(signals, sys.argv[1])(stop)
print("ready", flush=True)
signals.run_beside_signals(lambda: time.sleep(2))
sys.exit(0 if stop.requested else 1)
"""


@pytest.mark.parametrize("obey", ["obey_signals", "obey_supervisor"])
def test_repeated_signals_make_one_shutdown_request(obey):
    child = subprocess.Popen([sys.executable, "-c", VICTIM, obey], stdout=subprocess.PIPE)
    child.stdout.readline()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        os.kill(child.pid, signal.SIGTERM)

    try:
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.stdout.close()
