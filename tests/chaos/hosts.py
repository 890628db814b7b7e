"""Hosts that run ``runqueue``, and their faults."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ..proxy import Proxy
from .background import Background

ROOT = Path(__file__).parent.parent.parent


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to those of the processes that exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Host:
    """One ``runqueue``, restarted as by a service manager. ``line``: the proxy to the database."""

    def __init__(
        self, name: str, url: str, line: Proxy | None, env: dict[str, str], log: Path
    ) -> None:
        self.name, self.line, self._log = name, line, log.open("a")
        self._env = {**os.environ, **env, "DATABASE_URL": url}
        self.start()

    def start(self) -> None:
        self._started_at = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "django",
            "runqueue",
            "--processes",
            "2",
            "--threads",
            "4",
            "--shutdown-timeout",
            "1",
        ]
        command += ["--queues", "*,-unserved"]
        self._process = subprocess.Popen(
            command,
            env=self._env,
            cwd=ROOT,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def keep_alive(self) -> None:
        if self._process.poll() is not None:
            self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def children(self) -> list[int]:
        """Return the process ids of workers and dispatcher."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = stat.read_text().rpartition(")")[2].split()[:2]
                if (
                    int(parent) == self.pid
                    and state != "Z"
                    and "spawn_main" in (stat.parent / "cmdline").read_text()
                ):
                    found.append(int(stat.parent.name))
        return found

    def processes(self) -> list[int]:
        return [self.pid, *self.children()]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the supervisor only; its children notice."""
        signal_all([self.pid], number)

    def power_off(self) -> None:
        signal_all(self.processes(), signal.SIGKILL)

    def close(self) -> int:
        # SIGTERM must not arrive before its signal handlers are installed.
        time.sleep(max(0.0, self._started_at + 5.0 - time.monotonic()))
        self.kill(signal.SIGTERM)
        began = time.monotonic()
        while self._process.poll() is None and time.monotonic() - began < 30:
            time.sleep(0.1)
        self.power_off()
        self._log.close()
        return self._process.wait()


class ServiceManager(Background):
    """Restarts the hosts whose ``runqueue`` has ended."""

    def __init__(self, hosts: list[Host]) -> None:
        super().__init__()
        self._hosts = hosts

    def pause(self) -> float:
        return 1.0

    def act(self) -> None:
        for host in self._hosts:
            host.keep_alive()
