"""Notifications to systemd, received by a real datagram socket, most of them from ``runqueue``."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from django_dbqueue.models import Process
from django_dbqueue.runtime.shutdown import Shutdown
from django_dbqueue.runtime.supervisor.supervisor import Supervisor
from django_dbqueue.runtime.supervisor.systemd import Notifier

from ... import tasks
from ...conftest import LONG, address_of_the_test_database, log_of, until

pytestmark = pytest.mark.django_db(transaction=True)

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
numbers = itertools.count()


class ServiceManager:
    """The end of the socket that systemd has. ``lines`` are those received so far."""

    def __init__(self, address: str) -> None:
        self.address, self.lines = address, list[str]()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(address.replace("@", "\0", 1))

    def receive(self) -> list[str]:
        """Return the lines that have arrived since the last call."""
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found += self.socket.recv(4096).decode().split("\n")
        self.lines += found
        return found

    def has(self, *lines: str) -> bool:
        self.receive()
        return {*lines} <= {*self.lines}

    def count(self, line: str) -> int:
        self.receive()
        return self.lines.count(line)

    def fill(self) -> None:
        """Leave no room for another datagram."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.sendto(b"FILLED=1", self.socket.getsockname())


@pytest.fixture
def manager() -> Iterator[ServiceManager]:
    manager = ServiceManager(f"@dbqueue-{os.getpid()}-{next(numbers)}")
    yield manager
    manager.socket.close()


@pytest.fixture
def notifier(manager, monkeypatch, backend):
    """Return a function that watches a supervisor of this process, which has not started."""
    started = []

    def start(**env: str) -> tuple[Notifier, Supervisor, Shutdown]:
        for name, value in {"NOTIFY_SOCKET": manager.address, **env}.items():
            monkeypatch.setenv(name, value)
        notifier, stop = Notifier(), Shutdown()
        supervisor = Supervisor(backend, ["worker"], {})
        monkeypatch.setattr(Notifier, "INTERVAL", 0.02)
        notifier.watch([supervisor], stop)
        started.append(notifier)
        return notifier, supervisor, stop

    yield start
    sockets = [each._socket for each in started]
    for each in started:
        each._socket = None  # Ends its thread.
    until(lambda: "systemd" not in {each.name for each in threading.enumerate()})
    for each in sockets:
        each.close()


class TestRunqueue:
    def test_whole_life_of_a_service_is_notified(self, runqueue, manager):
        child = runqueue(NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="400000")
        until(lambda: manager.has("READY=1"))

        assert {each.kind for each in Process.objects.all()} == {
            *("supervisor", "worker", "dispatcher")
        }
        assert manager.lines.index("STATUS=default: 1 worker, 1 dispatcher") > 0
        assert tasks.nothing.enqueue().wait(LONG)
        manager.lines.clear()
        until(lambda: manager.count("WATCHDOG=1") >= 3)
        assert "READY=1" not in manager.lines

        child.send_signal(signal.SIGHUP)
        until(lambda: manager.has("RELOADING=1", "READY=1"))
        assert manager.lines.index("RELOADING=1") < manager.lines.index("READY=1")
        (at,) = (each for each in manager.lines if each.startswith("MONOTONIC_USEC="))
        assert 0 < time.monotonic() - int(at.partition("=")[2]) / 1e6 < LONG

        child.send_signal(signal.SIGTERM)
        assert child.wait(LONG) == 0
        assert manager.has("STOPPING=1")
        assert "READY=1" not in manager.lines[manager.lines.index("STOPPING=1") :]

    def test_refused_reload_is_ready_again(self, runqueue, manager):
        child = runqueue("--embedded", NOTIFY_SOCKET=manager.address)
        until(lambda: manager.has("READY=1"))
        manager.lines.clear()

        child.send_signal(signal.SIGHUP)

        until(lambda: manager.has("RELOADING=1", "READY=1"))
        assert "settings not reloaded" in log_of(child)

    def test_socket_with_a_path_and_no_watchdog(self, runqueue):
        with tempfile.TemporaryDirectory() as folder:
            manager = ServiceManager(f"{folder}/notify")
            child = runqueue(NOTIFY_SOCKET=manager.address)
            until(lambda: manager.has("READY=1"))
            child.send_signal(signal.SIGTERM)
            assert child.wait(LONG) == 0
            assert manager.has("STOPPING=1")
            assert "WATCHDOG=1" not in manager.lines
            manager.socket.close()

    def test_frozen_process_sends_no_watchdog(self, runqueue, manager):
        child = runqueue(NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="200000")
        until(lambda: manager.has("READY=1", "WATCHDOG=1"))

        child.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        manager.receive()
        time.sleep(1.0)

        assert manager.receive() == []
        child.send_signal(signal.SIGCONT)
        manager.lines.clear()
        until(lambda: manager.has("WATCHDOG=1"))

    @pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="There is no /proc.")
    def test_children_do_not_inherit_the_variables(self, runqueue, manager):
        runqueue(NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="400000")
        until(lambda: manager.has("READY=1"))

        for each in Process.objects.exclude(kind="supervisor"):
            environment = Path(f"/proc/{each.pid}/environ").read_text()
            assert "DJANGO_SETTINGS_MODULE" in environment
            assert not any(name in environment for name in VARIABLES)

    def test_runqueue_beside_a_web_server_leaves_notifications_to_it(self, manager):
        code = "import os; from django_dbqueue import beside; beside._run(os.getppid())"
        env = {**os.environ, **address_of_the_test_database(), "NOTIFY_SOCKET": manager.address}
        child = subprocess.Popen([sys.executable, "-c", code], env=env)
        try:
            assert tasks.nothing.enqueue().wait(LONG)
            child.send_signal(signal.SIGTERM)
            assert child.wait(LONG) == 0
        finally:
            child.kill()

        assert manager.receive() == []

    @pytest.mark.parametrize("address", ["/nonexistent/notify", "@nobody", "relative", "/" * 300])
    def test_unusable_socket_does_no_harm(self, runqueue, address):
        child = runqueue(NOTIFY_SOCKET=address, WATCHDOG_USEC="100000")

        assert tasks.nothing.enqueue().wait(LONG)
        child.send_signal(signal.SIGTERM)
        assert child.wait(LONG) == 0
        assert "Traceback" not in log_of(child)

    def test_full_socket_delays_the_notification_and_nothing_else(self, runqueue, manager):
        manager.fill()
        runqueue(NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="100000")
        assert tasks.nothing.enqueue().wait(LONG)

        until(lambda: manager.has("READY=1"))


class TestNotifier:
    def test_not_ready_supervisor_is_not_ready_to_systemd(self, notifier, manager):
        notifier()

        until(lambda: manager.receive() or manager.lines)
        assert manager.lines == [
            "STATUS=default: is starting: it waits for the database, or recovers jobs"
        ]

    def test_status_says_what_runs_or_why_not_all_is_well(self, notifier, manager, monkeypatch):
        reasons: list[str] = []
        monkeypatch.setattr(Supervisor, "why_not_ready", lambda self: reasons)
        notifier()
        until(lambda: manager.has("READY=1", "STATUS=default: 1 worker"))

        reasons[:] = ["0 of 1 workers have started"]
        until(lambda: manager.has("STATUS=default: 0 of 1 workers have started"))
        reasons.clear()
        until(lambda: manager.count("STATUS=default: 1 worker") == 2)

        assert manager.count("READY=1") == 1

    def test_hanging_supervisor_sends_no_watchdog(self, notifier, manager, monkeypatch):
        _, supervisor, _ = notifier(WATCHDOG_USEC="40000")
        until(lambda: manager.has("WATCHDOG=1"))

        monkeypatch.setattr(supervisor._status, "since_loop_tick", lambda: 1000.0)
        time.sleep(0.2)
        manager.receive()
        time.sleep(0.5)

        assert "WATCHDOG=1" not in manager.receive()
        monkeypatch.undo()
        manager.lines.clear()
        until(lambda: manager.has("WATCHDOG=1"))

    def test_watchdog_is_sent_at_half_of_its_timeout(self, notifier, manager):
        notifier(WATCHDOG_USEC="1000000")
        until(lambda: manager.has("WATCHDOG=1"))

        manager.lines.clear()
        began = time.monotonic()
        until(lambda: manager.count("WATCHDOG=1") >= 4)

        assert 1.4 < time.monotonic() - began < 3.9

    @pytest.mark.parametrize(
        "env",
        [
            {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"},
            {"WATCHDOG_USEC": "soon"},
            {"WATCHDOG_USEC": "0"},
            {"WATCHDOG_USEC": ""},
        ],
        ids=str,
    )
    def test_watchdog_of_another_process_or_without_a_timeout_is_not_sent(
        self, notifier, manager, env
    ):
        notifier(**env)
        until(lambda: manager.receive() or manager.lines)
        time.sleep(0.2)

        assert not manager.has("WATCHDOG=1")

    def test_reload_before_the_start_does_not_make_it_ready(self, notifier, manager):
        notifier, _, _ = notifier()
        with notifier.reloading():
            until(lambda: manager.has("RELOADING=1"))
        time.sleep(0.2)

        assert not manager.has("READY=1")

    def test_it_is_ready_again_after_the_reload_and_not_before(
        self, notifier, manager, monkeypatch
    ):
        monkeypatch.setattr(Supervisor, "why_not_ready", lambda self: [])
        notifier, _, _ = notifier()
        until(lambda: manager.has("READY=1"))
        manager.lines.clear()

        with notifier.reloading():
            time.sleep(0.2)
            assert not manager.has("READY=1")
        until(lambda: manager.has("READY=1"))

        assert manager.lines[0] == "RELOADING=1"
        assert manager.count("READY=1") == 1

    def test_shutdown_is_notified_once(self, notifier, manager):
        _, _, stop = notifier()
        stop.request()
        until(lambda: manager.has("STOPPING=1"))
        stop.request(immediate=True)
        time.sleep(0.2)

        assert manager.count("STOPPING=1") == 1

    def test_variables_are_removed_from_the_environment(self, notifier):
        notifier(WATCHDOG_USEC="1000000", WATCHDOG_PID=str(os.getpid()))

        assert not {*VARIABLES} & {*os.environ}

    def test_nothing_runs_without_a_service_manager(self, monkeypatch, backend):
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
        notifier = Notifier()
        notifier.watch([Supervisor(backend, ["worker"], {})], Shutdown())

        with notifier.reloading():
            pass
        assert notifier._socket is None
