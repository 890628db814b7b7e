"""Reload: reads the settings anew on request, and hands them to the supervisors of this process."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from ...core.safe_log import logger
from . import settings_reader
from .children import no_main_module
from .settings_reader import BackendSettings
from .supervisor import Supervisor


class Reload:
    """Reload of settings. Another process reads them: this one keeps what it has imported.

    requested: set for each reload. A request during a reload leads to one more.
    around: returns a context in which a reload runs.
    """

    # The longest time that the settings and the tasks may take to be read, in seconds.
    LONGEST = 60.0

    def __init__(
        self,
        supervisors: Sequence[Supervisor],
        requested: threading.Event,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._supervisors, self._requested, self._around = supervisors, requested, around
        # The path by which the shell came here, with its symbolic links. It may lead elsewhere
        # after a deployment, and only a new process follows it.
        path = os.environ.get("PWD", "")
        self._path = path if _leads_here(path) else None
        threading.Thread(target=self._run, name="reload", daemon=True).start()

    def _run(self) -> None:
        while self._requested.wait():
            self._requested.clear()
            try:
                with self._around():
                    self._reload()
            except Exception as error:
                logger.exception("supervisor: settings not reloaded, all processes stay: %s", error)

    def _reload(self) -> None:
        logger.info("supervisor: reloading the settings.")
        found = self._problem_here() or self._read()
        problem = found if isinstance(found, str) else self._problem_of(found)
        if problem or isinstance(found, str):
            logger.error("supervisor: settings not reloaded, all processes stay: %s", problem)
            return
        for supervisor in self._supervisors:
            supervisor.take_over(found[supervisor.alias])

    def _problem_of(self, found: dict[str, BackendSettings]) -> str | None:
        """Return why this process cannot use the settings without a restart."""
        for supervisor in self._supervisors:
            new, old = found[supervisor.alias], supervisor.settings
            if new.address != old.address:
                return (
                    f"the database of TASKS[{supervisor.alias!r}], or its address or credentials, "
                    "has changed. Restart runqueue."
                )
            if supervisor.options.embedded or new.config.embedded:
                return "with embedded, nothing can be imported anew. Restart runqueue."
        return None

    def _problem_here(self) -> str | None:
        if self._path and not _leads_here(self._path):
            return "the working directory has been replaced. Restart runqueue."
        return None

    def _read(self) -> dict[str, BackendSettings] | str:
        context = multiprocessing.get_context("spawn")
        answer, sender = context.Pipe(duplex=False)
        changes = {each.alias: each.changes for each in self._supervisors}
        process = context.Process(
            target=settings_reader.main, args=(sender, changes, logger.level), daemon=True
        )
        with no_main_module():
            process.start()
        sender.close()
        try:
            if not answer.poll(self.LONGEST):
                return f"reading them took longer than {self.LONGEST:g} s."
            found: dict[str, BackendSettings] | str = answer.recv()
            return found
        except EOFError:
            process.join(1.0)
            return f"the process that read them ended with exit code {process.exitcode}."
        finally:
            process.kill()
            process.join()
            answer.close()


def _leads_here(path: str) -> bool:
    """Return whether the path is one of the working directory."""
    try:
        return os.path.samefile(path, ".")
    except OSError:
        return False
