"""Runs one system on the server: its driver's verbs, and its worker while something is watched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from .server import Server
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
        self._watcher = psycopg.connect(self._env["DATABASE_URL"], autocommit=True)
        self._beside = ExitStack()
        self._env |= self._beside.enter_context(self.system.beside())

    def drive(self, verb: str, *args: Any) -> dict[str, Any]:
        done = subprocess.run(self._command(verb, *args), env=self._env, cwd=HERE, stdout=subprocess.PIPE, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "unsupported" in found:
            raise Unsupported(found["unsupported"])
        return found

    @contextmanager
    def worker(self, processes: int, threads: int) -> Iterator[int]:
        """Its process id. Whatever it has left behind is ended with it."""
        command = self._command("work", processes, threads)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, env=self._env, cwd=HERE, start_new_session=True, **quiet) as process:
            try:
                yield process.pid
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def query(self, statement: str) -> Any:
        return self._watcher.execute(statement).fetchone()[0]

    def ended(self, jobs: int) -> int:
        return self.system.count_ended(self.query, jobs)

    def settle(self) -> None:
        """As a database is that has been running for a while: its statistics are known, and nothing is left to write."""
        self._watcher.execute("VACUUM ANALYZE")
        self.server.calm()

    def stamps(self) -> dict[int, float]:
        lines = Path(self._stamps.name).read_text().split()
        return {int(number): float(at) for number, at in zip(lines[::2], lines[1::2], strict=True)}

    def close(self) -> None:
        self._beside.close()
        self._watcher.close()
        self._stamps.close()
        self.server.drop(self.database)
        time.sleep(0.5)

    def _template(self) -> str:
        """Made once, with the system's tables in it."""
        template = f"bench_template_{self.name}"
        if not self.server.has(template):
            self._env = {**os.environ, "BENCH_SYSTEM": self.name, "DATABASE_URL": self.server.make(template)}
            self.drive("prepare")
        return template

    def _command(self, verb: str, *args: Any) -> list[str]:
        return [self._python, "-m", "benchmarks.driver", verb, *map(json.dumps, args)]
