"""``manage.py runqueue``: run jobs."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, Error, ProgrammingError, connections
from django.utils import autoreload

from ...backend import DatabaseBackend
from ...compat import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from ...core.options import Options
from ...exceptions import InvalidOption
from ...models import Process
from ...registry import modules_with_tasks
from ...runtime.connections import discard, keep_connections, prepare
from ...runtime.logging_setup import RepeatedProblem, log_to_console
from ...runtime.shutdown import Shutdown
from ...runtime.signals import obey_signals, run_beside_signals
from ...runtime.supervisor.supervisor import Supervisor

# Log levels by --verbosity. The normal level is the project's own, or INFO.
LEVELS = {0: logging.WARNING, 1: None}

# MySQL's ER_DBACCESS_DENIED_ERROR, ER_ACCESS_DENIED_ERROR and its variant, and ER_BAD_DB_ERROR.
# REFUSED_TEXT matches the messages of PostgreSQL and PgBouncer.
REFUSED = (1044, 1045, 1049, 1698)
REFUSED_TEXT = re.compile(
    r"authentication failed|no password supplied|no pg_hba.conf entry|no such (?:user|database)"
    r'|(?:role|database) ".*" does not exist'
)


class Command(BaseCommand):
    help = (
        "Run jobs: a supervisor with worker processes and a dispatcher. "
        "Flags override the backend's OPTIONS."
    )
    # All other checks run for the web server too. A worker must start if warnings are the only
    # problem.
    requires_system_checks = ["dbqueue"]

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--backend",
            default=DEFAULT_TASK_BACKEND_ALIAS,
            help="The alias in TASKS (default: %(default)s).",
        )
        parser.add_argument(
            "--queues",
            help="The queues to serve, in order: names, prefix*, * and -name, separated by commas.",
        )
        parser.add_argument("--processes", type=int, help="Number of worker processes.")
        parser.add_argument("--threads", type=int, help="Number of threads per worker process.")
        parser.add_argument("--only", choices=["workers", "dispatcher"], help="Run only these.")
        parser.add_argument(
            "--embedded",
            action="store_true",
            default=None,
            help="Run everything in one process, as threads.",
        )
        parser.add_argument(
            "--drain",
            action="store_true",
            help="End when no job is due. The exit code is 0, or 1 if a job failed.",
        )
        parser.add_argument(
            "--reload",
            action="store_true",
            help="Restart when the code changes; implies --embedded.",
        )
        parser.add_argument(
            "--allow-import-errors",
            action="store_true",
            default=None,
            help="Start even if some tasks cannot be imported.",
        )
        parser.add_argument(
            "--max-jobs", type=int, help="Replace a worker process after this number of jobs."
        )
        parser.add_argument(
            "--poll-interval", type=float, help="The longest pause between two polls, in seconds."
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=float,
            help="The time that running jobs may continue after SIGTERM, in seconds.",
        )

    def handle(self, *args: object, **options: Any) -> None:
        log_to_console(LEVELS.get(options["verbosity"], logging.DEBUG))
        if options["reload"] and options["drain"]:
            raise CommandError("--reload and --drain exclude each other. Leave one out.")
        if options["reload"]:
            self._run_with_reloader(options)
            return
        stop = Shutdown()
        is_own_process = threading.current_thread() is threading.main_thread()
        if is_own_process:
            obey_signals(stop)
        supervisor = _supervisor(options, stop)
        if stop.requested:
            return
        if is_own_process:
            _end_after(stop, supervisor.options.longest_shutdown)
        code = run_beside_signals(lambda: supervisor.run(stop), supervisor.end_if_stuck)
        if is_own_process:
            # A thread left behind by a task must not block the exit.
            _in(2.0, lambda: os._exit(code))
        if code:
            sys.exit(code)

    def _run_with_reloader(self, options: dict[str, Any]) -> None:
        # The reloader exits this process from its main thread, to restart it. Jobs are released on
        # the way out.
        def run() -> None:
            stop, ended = Shutdown(), threading.Event()
            atexit.register(ended.wait, 5.0)
            atexit.register(stop.request, immediate=True)
            supervisor = _supervisor({**options, "embedded": True}, stop)
            _have_broken_modules_watched(options["backend"])
            supervisor.run(stop)
            ended.set()

        autoreload.run_with_reloader(run)


def _have_broken_modules_watched(alias: str) -> None:
    """Have the reloader watch the task modules that cannot be imported.

    The reloader watches imported modules, and files whose import error it has seen.
    """
    backend = task_backends[alias]
    for name in modules_with_tasks(
        backend.config.task_modules if isinstance(backend, DatabaseBackend) else ()
    ):
        with suppress(Exception):
            autoreload.check_errors(import_module)(name)


def _end_after(stop: Shutdown, seconds: float) -> None:
    """Exit ``seconds`` after the shutdown request, in any state of the database."""

    def end() -> None:
        stop.wait(None)
        _in(seconds, lambda: os._exit(1))

    threading.Thread(target=end, name="end", daemon=True).start()


def _in(seconds: float, act: Callable[[], object]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def _wait_for_database(database: str, options: Options, stop: Shutdown) -> None:
    """Wait until a connection is made and served, or is refused for good.

    The wait also ends with ``stop``, and after ``give_up_after`` seconds.
    """
    end = time.monotonic() + options.give_up_after
    trouble = RepeatedProblem("runqueue: database unavailable, retrying")

    def wait() -> None:
        prepare(database, options.statement_limit)
        while not stop.requested:
            try:
                # A Galera node without quorum accepts connections and refuses statements.
                with suppress(ProgrammingError):
                    Process.objects.using(database).exists()
                trouble.over()
                return
            except Error as error:
                if time.monotonic() > end or _is_refused(error):
                    return
                trouble.report(error)
                stop.wait(1.0)
            finally:
                discard(database)

    # A connection attempt cannot be interrupted: its thread is left behind.
    thread = threading.Thread(target=wait, name="database", daemon=True)
    thread.start()
    while thread.is_alive() and not stop.requested:
        thread.join(0.1)


def _is_refused(error: Error) -> bool:
    """Return True if the server rejects the user, the password or the database: do not retry.

    PostgreSQL's driver gives no code for a failed connection attempt, only a message. A message in
    another language than English is not recognised.
    """
    cause = error.__cause__
    return bool(cause and cause.args and cause.args[0] in REFUSED) or bool(
        REFUSED_TEXT.search(str(error))
    )


def _look_at(database: str) -> None:
    """Raise CommandError if the queue's tables cannot be read."""
    try:
        Process.objects.using(database).exists()
    except Error as error:
        said = str(error).partition("\n")[0]
        if _is_refused(error):
            raise CommandError(
                f"The server refuses the connection to {database!r}: {said}\n"
                f"Correct DATABASES[{database!r}]."
            ) from None
        migrate = (
            "migrate" if database == DEFAULT_DB_ALIAS else f"migrate dbqueue --database {database}"
        )
        raise CommandError(
            f"The queue's tables in the database {database!r} cannot be read: {said}\n"
            f"Check that its server runs, and run `manage.py {migrate}`."
        ) from None


def _supervisor(given: dict[str, Any], stop: Shutdown) -> Supervisor:
    if given["backend"] not in task_backends.settings:
        raise CommandError(
            f"There is no backend {given['backend']!r} in TASKS. "
            f"Choose from {', '.join(task_backends.settings)}."
        )
    backend = task_backends[given["backend"]]
    if not isinstance(backend, DatabaseBackend):
        raise CommandError(
            f"TASKS[{given['backend']!r}] is a {type(backend).__qualname__}; "
            "runqueue needs a DatabaseBackend."
        )
    if given["drain"] and given["only"]:
        raise CommandError(
            f"--drain needs workers and a dispatcher, and would never end with "
            f"--only {given['only']}. Leave one out."
        )
    names = (
        "queues",
        "processes",
        "threads",
        "embedded",
        "allow_import_errors",
        "max_jobs",
        "poll_interval",
        "shutdown_timeout",
    )
    changes = {name: given[name] for name in names if given[name] is not None}
    try:
        config = backend.config.changed(**changes)
        keep_connections()
        if connections[backend.database].vendor != "sqlite":
            _wait_for_database(backend.database, config, stop)
        if not stop.requested:
            _look_at(backend.database)
        workers = 1 if config.embedded else config.processes
        roles = [
            *["worker"] * workers * (given["only"] != "dispatcher"),
            *["dispatcher"] * (given["only"] != "workers"),
        ]
        return Supervisor(backend, roles, changes, drain=given["drain"])
    except InvalidOption as error:
        raise CommandError(str(error)) from None
