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


HUNG_UP = """
import os, pty, signal, sys, time
from django_dbqueue.runtime import signals
from django_dbqueue.runtime.shutdown import Shutdown

pid, terminal = pty.fork()
if pid == 0:
    stop, reloads = Shutdown(), []
    signals.obey_hangup(stop, lambda: reloads.append(1))
    if sys.argv[1] == "reload":
        os.kill(os.getpid(), signal.SIGHUP)
    os.write(1, b"ready")
    end = time.monotonic() + 60
    while not stop.requested and not reloads and time.monotonic() < end:
        time.sleep(0.01)
    os._exit(10 * stop.requested + len(reloads))
os.read(terminal, 5)
if sys.argv[1] == "close":
    os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(("how", "code"), [("close", 10), ("reload", 1)])
def test_hangup_shuts_down_only_if_the_terminal_was_closed(how, code):
    child = subprocess.run([sys.executable, "-c", HUNG_UP, how], timeout=120, check=False)

    assert child.returncode == code
