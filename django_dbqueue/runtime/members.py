"""What a supervisor keeps: roles as processes or, embedded, as threads."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from typing import Any

from . import child
from .roles import run_role
from .stop import Stop

logger = logging.getLogger("django_dbqueue")


class ThreadMember:
    """A role on a thread of this process."""

    def __init__(self, role: str, alias: str, changes: dict[str, Any], supervisor: int) -> None:
        self.role, self.pid, self.exitcode = role, os.getpid(), None
        self._stop = Stop()
        self._thread = threading.Thread(target=self._run, args=(alias, changes, supervisor), name=role, daemon=True)
        self._thread.start()

    exitcode: int | None

    def stop(self, *, now: bool = False) -> None:
        self._stop.ask(now=now)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        """A thread cannot be killed; it ends with the process."""

    def _run(self, alias: str, changes: dict[str, Any], supervisor: int) -> None:
        try:
            run_role(self.role, alias, changes, self._stop, supervisor)
            self.exitcode = 0
        except BaseException:
            logger.exception("The %s ended by an error.", self.role)
            self.exitcode = 1


class ProcessMember:
    """A role in a process of its own, which can be killed. Spawned, not forked: it shares no connection, lock or thread."""

    def __init__(self, role: str, alias: str, changes: dict[str, Any], supervisor: int) -> None:
        self.role = role
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=child.main, args=(role, alias, changes, supervisor), name=role)
        self._process.start()

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


Member = ThreadMember | ProcessMember
