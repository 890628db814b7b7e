"""Celery with its own Redis, without results: a pool of threads; more workers are forks.

It closes its connections after each job, so only a connection pool keeps them; with its default, a
pool of processes, the connection pool is new for each job. It enqueues many jobs one by one, and
runs no coroutines.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from inspect import iscoroutinefunction
from typing import Any

from . import Rival, Unsupported, fork


class Adapter(Rival):
    requires = ("celery[redis]", "psycopg[pool]")
    backlog = 12_000
    settings = {
        "CELERY_BROKER_URL": os.environ.get("BENCH_REDIS"),
        "CELERY_TASK_IGNORE_RESULT": True,
    }
    conn_max_age = 0
    pool = {"max_size": 10}

    def lacks(self) -> str:
        return super().lacks() or (
            "" if shutil.which("redis-server") else "redis-server is not on the PATH."
        )

    @contextmanager
    def beside(self) -> Iterator[dict[str, str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = free.getsockname()
        port = str(self._address[1])
        with tempfile.TemporaryDirectory(prefix="dbqueue-bench-") as folder:
            command = ["redis-server", "--bind", "127.0.0.1", "--port", port, "--dir", folder]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as redis:
                try:
                    self._wait()
                    yield {"BENCH_REDIS": f"redis://127.0.0.1:{port}/0"}
                finally:
                    redis.terminate()

    def count_ended(self, query: Callable[[str], Any], jobs: int) -> int:
        """Subtract waiting jobs, and jobs that workers have received but not started."""
        return jobs - self._ask("LLEN celery") - self._ask("HLEN unacked")

    def task(self, function: Callable[..., Any]) -> Any:
        if iscoroutinefunction(function):
            raise Unsupported("Celery runs no coroutines.")
        return self._app.task(function)

    def enqueue(self, task: Any, *args: Any) -> None:
        task.delay(*args)

    def work(self, processes: int, threads: int) -> None:
        fork(processes)
        self._app.worker_main(
            [
                "worker",
                "--pool",
                "threads",
                "--concurrency",
                str(threads),
                "--hostname",
                f"{os.getpid()}@%h",
            ]
        )

    @cached_property
    def _app(self) -> Any:
        from celery import Celery

        app = Celery("benchmarks")
        app.config_from_object("django.conf:settings", namespace="CELERY")
        app.autodiscover_tasks()
        return app

    def _ask(self, question: str) -> int:
        """Query Redis in its own protocol: the benchmark has no client for it."""
        with (
            socket.create_connection(self._address) as connection,
            connection.makefile("rw") as redis,
        ):
            redis.write(f"{question}\r\n")
            redis.flush()
            return int(redis.readline().strip().lstrip(":"))

    def _wait(self, seconds: float = 10.0) -> None:
        """Wait until Redis answers."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._ask("DBSIZE")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
