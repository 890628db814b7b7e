"""Run one system on the server: its driver's verbs, and its worker during a measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from . import machine
from .servers import Server
from .systems import Unsupported, system

HERE = Path(__file__).parent.parent


class Bench:
    """One measurement of a system: a fresh database, and the processes that use it."""

    def __init__(self, name: str, server: Server, python: str) -> None:
        self.name, self.system, self.server, self._python = name, system(name), server, python
        self.database = f"bench_{name}"
        self._stamps = tempfile.NamedTemporaryFile(prefix="dbqueue-bench-")  # noqa: SIM115
        self._env = {
            **os.environ,
            "BENCH_SYSTEM": name,
            "BENCH_STAMPS": self._stamps.name,
            "DATABASE_URL": server.make(self.database, self._template()),
        }
        self._watcher = server.connect(self.database)
        self._beside = ExitStack()
        self._env |= self._beside.enter_context(self.system.beside())

    def drive(self, verb: str, **given: Any) -> dict[str, Any]:
        done = subprocess.run(
            self._command(verb, given), env=self._env, cwd=HERE, stdout=subprocess.PIPE, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "unsupported" in found:
            raise Unsupported(found["unsupported"])
        return found

    @contextmanager
    def worker(self, processes: int, threads: int, **env: str) -> Iterator[int]:
        """Run a worker, and yield its process id. Its process group is killed at the end."""
        with self._running(
            self._command("work", {"processes": processes, "threads": threads}), **env
        ) as pid:
            yield pid

    def memory_of_a_shell(self) -> dict[str, list[float]]:
        """Return the memory of ``manage.py shell`` in the same project, in MB.

        That is the memory of Django and the database's driver alone.
        """
        wait = (
            "from django.db import connection; connection.ensure_connection(); "
            "import time; time.sleep(60)"
        )
        command = [self._python, "-m", "django", "shell", "-c", wait]
        with self._running(command, DJANGO_SETTINGS_MODULE="benchmarks.project.settings") as pid:
            time.sleep(5)
            return machine.memory(pid)

    def query(self, statement: str) -> Any:
        with closing(self._watcher.cursor()) as cursor:
            cursor.execute(statement)
            return cursor.fetchone()[0]

    def ended(self, jobs: int) -> int:
        return self.system.count_ended(self.query, jobs)

    def settle(self) -> None:
        """Bring the database into the state of one in use: with statistics, all pages written."""
        self.server.settle(self._watcher)

    def log_statements(self) -> None:
        """Count the statements of new connections, if the server can."""
        self.server.log_statements(self.database)

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Yield a dict that holds the server's counters for this database after the block.

        It stays empty if the server does not count.
        """
        used: dict[str, int] = {}
        before = self.server.counters(self.database)
        yield used
        used |= {
            name: value - before[name]
            for name, value in self.server.counters(self.database).items()
        }

    def stamps(self) -> dict[int, float]:
        lines = Path(self._stamps.name).read_text().split()
        return {int(number): float(at) for number, at in zip(lines[::2], lines[1::2], strict=True)}

    def close(self) -> None:
        self._beside.close()
        self._watcher.close()
        self._stamps.close()
        Path(f"{self._stamps.name}-bytes").unlink(missing_ok=True)
        self.server.drop(self.database)
        time.sleep(0.5)

    @contextmanager
    def _running(self, command: list[str], **env: str) -> Iterator[int]:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(
            command, env={**self._env, **env}, cwd=HERE, start_new_session=True, **quiet
        ) as process:
            try:
                yield process.pid
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _template(self) -> str:
        """Return the template database with the system's tables, made on first use."""
        template = f"bench_template_{self.name}"
        if not self.server.has(template):
            self._env = {
                **os.environ,
                "BENCH_SYSTEM": self.name,
                "DATABASE_URL": self.server.make(template),
            }
            self.drive("prepare")
        return template

    def _command(self, verb: str, given: dict[str, Any]) -> list[str]:
        return [self._python, "-m", "benchmarks.driver", verb, json.dumps(given)]
