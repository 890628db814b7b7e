"""Children of a supervisor: roles as processes or, embedded, as threads.

Each child calls ``ended`` at its end. An outdated child is to be replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType

from ...core.internal_errors import report
from ...core.safe_log import logger
from ..connections import close_connections
from ..logging_setup import logs_json
from ..shared_status import SharedStatus
from ..shutdown import Shutdown
from ..worker import executor
from . import child_main
from .child_spec import ChildSpec
from .roles import run_role

# The longest time that a role may take to start, in seconds.
START = 60.0
# Held while a process is spawned: several supervisors may do so, each on its thread.
_spawning = threading.Lock()


@contextmanager
def no_main_module() -> Iterator[None]:
    """Keep a spawned child from running the project's ``manage.py`` again.

    That file may have no ``__name__`` guard.
    """
    with _spawning:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class ChildThread:
    """A role on a thread of this process."""

    exitcode: int | None = None
    ended_at = float("inf")
    is_outdated = False

    def __init__(
        self,
        spec: ChildSpec,
        alias: str,
        supervisor: int,
        finished: Connection,
        ended: Callable[[], None],
    ) -> None:
        self.spec, self.role, self._ended = spec, spec.role, ended
        self.pid, self.born = os.getpid(), time.monotonic()
        self.status = SharedStatus.create(spec.options.threads + spec.options.prefetch)
        self.status.tick(ahead=START)
        self._stop = Shutdown()
        self._thread = threading.Thread(
            target=self._run,
            args=(alias, supervisor, finished),
            name=spec.role,
            daemon=True,
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

    def _run(self, alias: str, supervisor: int, finished: Connection) -> None:
        try:
            code = run_role(
                self.role, alias, self.spec.changes, self.status, self._stop, supervisor, finished
            )
        except BaseException as error:
            report(error, "%s: crashed.", self.role)
            close_connections()
            code = 1
        self.status.mark_exit(code)
        self.exitcode = code
        self.ended_at = time.monotonic()
        self._ended()


class ChildProcess:
    """A role in its own process, which can be killed.

    The process is spawned, not forked: it shares no connection, lock or thread.
    """

    ended_at = float("inf")
    is_outdated = False

    def __init__(
        self,
        spec: ChildSpec,
        alias: str,
        supervisor: int,
        finished: Connection,
        ended: Callable[[], None],
    ) -> None:
        self.spec, self.role, self._ended = spec, spec.role, ended
        self.born, self.jitter = time.monotonic(), random.uniform(0.9, 1.0)
        context = multiprocessing.get_context("spawn")
        self.status = SharedStatus.create(spec.options.threads + spec.options.prefetch)
        self.status.tick(ahead=START)
        self._stacks = tempfile.NamedTemporaryFile("r", prefix="dbqueue-")  # noqa: SIM115
        arguments = (
            spec.role,
            alias,
            spec.changes,
            supervisor,
            self.status.name,
            self._stacks.name,
            finished,
            logger.level,
            logs_json(),
        )
        self._process = context.Process(target=child_main.main, args=arguments, name=spec.role)
        try:
            with no_main_module():
                self._process.start()
        except BaseException:
            SharedStatus.remove(self.status.name)
            raise
        threading.Thread(target=self._await_end, name=f"{spec.role}-end", daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def stop(self, *, now: bool = False) -> None:
        if self.exitcode is None and self.pid:
            _kill(self.pid, getattr(signal, "SIGQUIT", signal.SIGTERM) if now else signal.SIGTERM)

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
        _kill(self.pid, child_main.STACKS)
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


def _kill(pid: int, number: int) -> None:
    # It may have ended, and other code may have waited for it: then no process has this number.
    with suppress(ProcessLookupError):
        os.kill(pid, number)
