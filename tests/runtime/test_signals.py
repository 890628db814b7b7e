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


PARENT = """
import multiprocessing, os, signal, subprocess, sys, threading, time
from django_dbqueue.runtime import signals
from django_dbqueue.runtime.shutdown import Shutdown

signals.obey_hangup(Shutdown(), lambda: None)
getattr(signals, sys.argv[1])(Shutdown())
numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]

def signal_children():
    for number in numbers:
        program = subprocess.Popen(["sleep", "30"])
        program.send_signal(number)
        found.append(program.wait(5))
    for number in numbers[:2] * 5:
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        forked.start()
        os.kill(forked.pid, number)
        forked.join(5)
        found.append(forked.exitcode)
        forked.kill()
    found.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

found = []
thread = threading.Thread(target=signal_children)
thread.start()
thread.join()
assert found == [*(-number for number in numbers + numbers[:2] * 5), set()], found
"""


@pytest.mark.parametrize("obey", ["obey_signals", "obey_supervisor"])
def test_signals_end_programs_and_forked_processes_of_a_task(obey):
    """Right after its fork, too: the signal arrives before its handlers are the default ones."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", PARENT, obey], timeout=120, check=True)
