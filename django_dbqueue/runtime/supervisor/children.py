"""Children of a supervisor: roles as processes or, embedded, as threads.

Each child calls ``ended`` at its end.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType

from ...core.options import Options
from ..shared_status import SharedStatus
from ..shutdown import Shutdown
from ..worker import executor
from . import child_main
from .roles import run_role

logger = logging.getLogger("django_dbqueue")

# The longest time that a role may take to start, in seconds.
START = 60.0


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep a spawned child from running the project's ``manage.py`` again.

    That file may have no ``__name__`` guard.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class ChildThread:
    """A role on a thread of this process."""

    exitcode: int | None = None
    ended_at = float("inf")

    def __init__(
        self,
        role: str,
        alias: str,
        options: Options,
        changes: dict[str, object],
        supervisor: int,
        finished: Connection,
        ended: Callable[[], None],
    ) -> None:
        self.role, self.pid, self.born, self._ended = role, os.getpid(), time.monotonic(), ended
        self.status = SharedStatus.create(options.threads + options.prefetch)
        self.status.tick(ahead=START)
        self._stop = Shutdown()
        self._thread = threading.Thread(
            target=self._run, args=(alias, changes, supervisor, finished), name=role, daemon=True
        )
        self._thread.start()

    def stop(self, *, now: bool = False) -> None:
        self._stop.request(immediate=now)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed; it ends with the process."""

    def stacks(self) -> str:
        return ""

    def close(self) -> None:
        """Do nothing: there is nothing to clean up."""

    def _run(
        self, alias: str, changes: dict[str, object], supervisor: int, finished: Connection
    ) -> None:
        try:
            self.exitcode = run_role(
                self.role, alias, changes, self.status, self._stop, supervisor, finished
            )
        except BaseException:
            logger.exception("%s: crashed.", self.role)
            self.exitcode = 1
        self.ended_at = time.monotonic()
        self._ended()


class ChildProcess:
    """A role in its own process, which can be killed.

    The process is spawned, not forked: it shares no connection, lock or thread.
    """

    ended_at = float("inf")

    def __init__(
        self,
        role: str,
        alias: str,
        options: Options,
        changes: dict[str, object],
        supervisor: int,
        finished: Connection,
        ended: Callable[[], None],
    ) -> None:
        self.role, self.born, self._ended = role, time.monotonic(), ended
        context = multiprocessing.get_context("spawn")
        self.status = SharedStatus.create(options.threads + options.prefetch)
        self.status.tick(ahead=START)
        self._stacks = tempfile.NamedTemporaryFile("r", prefix="dbqueue-")  # noqa: SIM115
        arguments = (
            role,
            alias,
            changes,
            supervisor,
            self.status.name,
            self._stacks.name,
            finished,
            logger.level,
        )
        self._process = context.Process(target=child_main.main, args=arguments, name=role)
        with _no_main_module():
            self._process.start()
        threading.Thread(target=self._await_end, name=f"{role}-end", daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def stop(self, *, now: bool = False) -> None:
        if self.exitcode is None and self.pid:
            os.kill(self.pid, getattr(signal, "SIGQUIT", signal.SIGTERM) if now else signal.SIGTERM)

    def join(self, timeout: float) -> None:
        self._process.join(timeout)

    def kill(self) -> None:
        self._process.kill()

    def stacks(self) -> str:
        """Return the stack traces of the threads that run tasks.

        This works even if none of them releases the GIL.
        """
        if not child_main.STACKS or not self.pid:
            return ""
        os.kill(self.pid, child_main.STACKS)
        time.sleep(0.2)
        threads = Path(self._stacks.name).read_text(errors="replace").split("\n\n")
        return "\n\n".join(each for each in threads if executor.__file__ in each)

    def close(self) -> None:
        self._stacks.close()

    def _await_end(self) -> None:
        wait([self._process.sentinel])
        self.ended_at = time.monotonic()
        self._ended()


Child = ChildThread | ChildProcess
