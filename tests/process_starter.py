"""Starts ``python -m django`` by forks of a process that has imported Django.

The suite starts hundreds of processes, and their imports took a third of its time. What such a
process does is otherwise as if a user had started it, with two exceptions: its workers are forked
too, from a process that it has forked before it did anything else, and which signals to the whole
process group end; and with the environment of most tests, the settings and applications are those
that the starter has loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

# Coverage measures processes that are started, not forked.
CAN_FORK = sys.platform == "linux" and "COVERAGE_RUN" not in os.environ
# What takes long to import, and needs no settings.
WITHOUT_SETTINGS = (
    "asyncio.sslproto",
    "concurrent.futures.thread",
    "croniter",
    "django.contrib.auth.hashers",
    "django.core.mail",
    "django.core.management.commands.check",
    "django.db.backends.sqlite3.base",
    "django.db.models",
    "django.db.migrations.loader",
    "django.forms",
    "django.http",
    "django.tasks",
    "django.template.context_processors",
    "django.template.defaulttags",
    "django.template.loader",
    "django.urls",
    "django.views.debug",
    "django.views.generic",
    "environ",
    "http.server",
    "multiprocessing.forkserver",
    "multiprocessing.spawn",
    "sqlite3",
)
WITH_SETTINGS = (
    "django_dbqueue.management.commands.runqueue",
    "django_dbqueue.runtime.supervisor.roles",
)
OWN_TO_A_TEST = "PYTEST_CURRENT_TEST"


class Starter:
    """Two processes that fork others: one for ``environment``, and one for any other."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = _shared(environment)
        self._loaded = _Server(self._environment, "loaded")
        self._bare = _Server(self._environment, "bare")

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> Any:
        is_usual = _shared(environment) == self._environment
        return (self._loaded if is_usual else self._bare).start(arguments, environment, log)

    def close(self) -> None:
        self._loaded.close()
        self._bare.close()


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != OWN_TO_A_TEST}


class ForkedProcess:
    """What the tests use of ``subprocess.Popen``, for a process that another one has forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.pid = int(connection.recv(20))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                self._connection.settimeout(timeout)
                try:
                    self.returncode = int(self._connection.recv(20))
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired("runqueue", timeout or 0) from None
                self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    def __init__(self, environment: Mapping[str, str], kind: str) -> None:
        self._environment, self._kind = environment, kind
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[str]
    ) -> ForkedProcess:
        if not self._process:
            self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-W", "error", "-m", __name__, self._kind],
                    env=self._environment,
                    stdin=theirs.fileno(),
                )
        connection, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([list(arguments), dict(environment)]).encode()
            socket.send_fds(self._control, [request], [theirs.fileno(), log.fileno()])
        return ForkedProcess(connection)

    def close(self) -> None:
        if self._process:
            self._control.close()
            self._process.wait()


def main(kind: str) -> None:
    """Fork a process for each request; return in that process, once it has done its work."""
    for name in WITHOUT_SETTINGS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if kind == "loaded":
        import django

        django.setup()
        for name in WITH_SETTINGS:
            importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as control:
        request = _fork_for_each_request(control)
    if request:
        _run(*json.loads(request))


def _fork_for_each_request(control: socket.socket) -> bytes:
    """Return the request in the process that is to fulfil it; here, nothing at the end."""
    while True:
        request, fds, _flags, _address = socket.recv_fds(control, 1_000_000, 2)
        if not request:
            return b""
        if not os.fork():
            connection, log = fds
            with socket.socket(fileno=connection) as connected:
                if not _is_forked(connected):
                    os._exit(0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            return request
        for fd in fds:
            os.close(fd)


def _is_forked(connection: socket.socket) -> bool:
    """Return True in a forked process; tell the test its id, wait, and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (pid := os.fork()):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        return True
    connection.send(str(pid).encode())
    _pid, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    return False


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))

    from django import __main__ as entry
    from django.core.management import execute_from_command_line

    sys.argv = [str(entry.__file__), *arguments]
    if "--embedded" not in arguments:
        _fork_workers()
    execute_from_command_line(sys.argv)


def _fork_workers() -> None:
    """Have ``multiprocessing`` fork what it would spawn, from a copy of this process as it is."""
    from multiprocessing import context, forkserver, util

    util.spawnv_passfds = _fork_instead  # type: ignore[assignment]
    forkserver.ensure_running()
    context._concrete_contexts["spawn"] = multiprocessing.get_context("forkserver")  # type: ignore[attr-defined]


def _fork_instead(_path: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
    if pid := os.fork():
        return pid
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)
    try:
        exec(arguments[-1])
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
