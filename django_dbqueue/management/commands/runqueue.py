"""``manage.py runqueue``: run jobs."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS, Error, ProgrammingError, connections
from django.utils import autoreload

from ...backend import DatabaseBackend
from ...compat import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from ...core.internal_errors import report, wait_for_receivers
from ...core.options import Options
from ...core.safe_log import logger
from ...exceptions import InvalidOption
from ...models import Process
from ...registry import modules_with_tasks
from ...runtime import lifecycle
from ...runtime.connections import discard, keep_connections, prepare
from ...runtime.logging_setup import RepeatedProblem, log_to_console, logs_json, silence_polling
from ...runtime.shutdown import Shutdown
from ...runtime.signals import (
    NOW,
    obey_hangup,
    obey_signals,
    obey_supervisor,
    run_beside_signals,
)
from ...runtime.supervisor import health
from ...runtime.supervisor.drain import JointDrain
from ...runtime.supervisor.multi_backend import run_all
from ...runtime.supervisor.reload import Reload
from ...runtime.supervisor.supervisor import Supervisor
from ...runtime.supervisor.systemd import Notifier

# Exit code by which Django's reloader asks for a restart.
CODE_CHANGED = 3
# Seconds after a change of the code that running jobs have to be released.
RELEASE = 5.0

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
    # beside: a web server controls this process; see django_dbqueue.beside.
    stealth_options = ("beside",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--backend",
            action="append",
            help="The aliases in TASKS, separated by commas, or all "
            f"(default: {DEFAULT_TASK_BACKEND_ALIAS}). May be repeated.",
        )
        parser.add_argument(
            "--queues",
            help="The queues to serve, in order: names, prefix*, * and -name, separated by commas. "
            "They replace the groups of OPTIONS['workers'].",
        )
        parser.add_argument(
            "--processes", type=int, help="Number of worker processes, of each group."
        )
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
            "--max-age", type=float, help="Replace a worker process at this age, in seconds."
        )
        parser.add_argument(
            "--max-memory",
            type=int,
            help="Replace a worker process whose resident memory exceeds this, in MB.",
        )
        parser.add_argument(
            "--poll-interval", type=float, help="The longest pause between two polls, in seconds."
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=float,
            help="The time that running jobs may continue after SIGTERM, in seconds.",
        )
        parser.add_argument(
            "--name", help="A name for these processes, in their rows and log lines."
        )
        parser.add_argument(
            "--health-port",
            type=_address,
            metavar="[ADDRESS:]PORT",
            help="Answer /live and /ready there (default address: 127.0.0.1).",
        )
        parser.add_argument(
            "--log-format",
            choices=["text", "json"],
            default="text",
            help="How lines are written that the project's LOGGING has no handler for.",
        )
        parser.add_argument(
            "--metrics-port",
            type=_address,
            metavar="[ADDRESS:]PORT",
            help="Serve metrics for Prometheus there (default address: 127.0.0.1). Needs "
            "prometheus-client.",
        )
        parser.add_argument(
            "--pidfile",
            metavar="PATH",
            help="Write the process id to this file, and do not start while its process lives.",
        )

    def handle(self, *args: object, **options: Any) -> None:
        stop, reload = Shutdown(), threading.Event()
        is_own_process = threading.current_thread() is threading.main_thread()
        if is_own_process:
            is_controlled = options.get("beside") or (
                options["reload"] and not _is_reloader(options)
            )
            (obey_supervisor if is_controlled else obey_signals)(stop)
            # Before others can know of this process: a request is fulfilled after the start.
            obey_hangup(stop, reload.set)
        log_to_console(
            LEVELS.get(options["verbosity"], logging.DEBUG), options["log_format"] == "json"
        )
        if options["log_format"] == "json" and not logs_json():
            logger.warning(
                "runqueue: --log-format json has no effect, because LOGGING has handlers for the "
                'root logger. Give them the formatter {"()": "django_dbqueue.log.JsonFormatter"}.'
            )
        with _pidfile(options):
            self._handle(options, stop, reload if is_own_process else None)

    def _handle(
        self, options: dict[str, Any], stop: Shutdown, reload: threading.Event | None
    ) -> None:
        if options["reload"] and options["drain"]:
            raise CommandError("--reload and --drain exclude each other. Leave one out.")
        if _is_reloader(options):
            sys.exit(_restart_after_changes(stop))
        if options["reload"]:
            options = {**options, "embedded": True}
        supervisors = _supervisors(options)
        _serve_others(options, supervisors)
        if reload:
            notifier = Notifier()
            if not options.get("beside"):  # The web server notifies its service manager itself.
                notifier.watch(supervisors, stop)
            Reload(supervisors, reload, notifier.reloading)
            _end_after(stop, supervisors)
        if options["reload"]:
            code = run_beside_signals(lambda: _run_until_change(supervisors, stop))
        else:
            code = run_beside_signals(
                lambda: _run_all(supervisors, stop),
                partial(_end_if_any_is_stuck, supervisors, is_own_process=reload is not None),
            )
        faulthandler.cancel_dump_traceback_later()
        if reload:
            # A thread left behind by a task must not block the exit.
            _in(2.0, lambda: os._exit(code))
        if code:
            sys.exit(code)


def _is_reloader(options: dict[str, Any]) -> bool:
    """Return True in the main process of ``--reload``. Its child process serves the queues."""
    return options["reload"] and os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) != "true"


def _restart_after_changes(stop: Shutdown) -> int:
    """Run this command in a child process, anew after each change of the code.

    Django's own loop kills the child on a signal. Returns the child's exit code.
    """
    environment = {**os.environ, autoreload.DJANGO_AUTORELOAD_ENV: "true"}
    if getattr(sys.stdout, "write_through", False):  # python -u
        environment.setdefault("PYTHONUNBUFFERED", "1")
    while not stop.requested:
        child = subprocess.Popen(autoreload.get_child_arguments(), env=environment, close_fds=False)
        stop.on_request(partial(_shut_down, child, stop))
        if (code := child.wait()) != CODE_CHANGED:
            return code if code >= 0 else 128 - code
    return 0


def _shut_down(child: subprocess.Popen[bytes], stop: Shutdown) -> None:
    child.send_signal(NOW if stop.immediate else signal.SIGTERM)


def _run_until_change(supervisors: Sequence[Supervisor], stop: Shutdown) -> int:
    """Run the supervisors. Returns CODE_CHANGED after a change of the code, or their exit code.

    After a failure, waits for a change, which may correct it, or for ``stop``.
    """
    changed, serving = threading.Event(), Shutdown()

    def watch() -> None:
        try:
            autoreload.get_reloader().run(threading.main_thread())
        except SystemExit:
            changed.set()
            _in(RELEASE, lambda: os._exit(CODE_CHANGED))
            stop.request(immediate=True)

    for each in supervisors:
        _have_broken_modules_watched(each.options)
    threading.Thread(target=watch, name="reloader", daemon=True).start()
    stop.on_request(lambda: serving.request(immediate=stop.immediate))
    if code := _run_all(supervisors, serving):
        stop.wait(None)
    return CODE_CHANGED if changed.is_set() else code


@contextmanager
def _pidfile(options: dict[str, Any]) -> Iterator[None]:
    if options["pidfile"] is None or _is_reloader(options):
        yield
        return
    from ...runtime.pidfile import InvalidPidfile, Pidfile, PidfileTaken  # Not on Windows.

    with ExitStack() as stack:
        try:
            stack.enter_context(Pidfile(options["pidfile"]))
        except (InvalidPidfile, PidfileTaken) as error:
            raise CommandError(str(error)) from None
        yield


def _address(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise ArgumentTypeError(
            f"{text!r} is not a port, nor an address and a port. Give such as 9100, "
            "0.0.0.0:9100 or [::]:9100."
        )
    return address.strip("[]") or "127.0.0.1", int(port)


def _serve_others(options: dict[str, Any], supervisors: Sequence[Supervisor]) -> None:
    """Serve health and metrics, if they are wanted. Raises CommandError if they cannot be."""
    if where := options.get("health_port"):
        with _said_of("--health-port", where):
            health.serve(where[0], where[1], supervisors)
    if where := options.get("metrics_port"):
        try:
            from ...contrib import prometheus
        except ImportError as error:
            raise CommandError(
                f"--metrics-port needs prometheus-client ({error}). "
                "Install django-dbqueue-tasks[prometheus]."
            ) from None
        with _said_of("--metrics-port", where):
            prometheus.serve(where[0], where[1], supervisors)


@contextmanager
def _said_of(flag: str, where: tuple[str, int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        said = f"{flag}: {where[0]}:{where[1]} cannot be used: {error}. Give another."
        raise CommandError(said) from None


def _run_all(supervisors: Sequence[Supervisor], stop: Shutdown) -> int:
    return run_all([partial(_run, each, stop) for each in supervisors], stop)


def _run(supervisor: Supervisor, stop: Shutdown) -> int:
    lifecycle.connect_receivers(supervisor.options.receivers)
    if supervisor.options.silence_polling:
        silence_polling()
    keep_connections()
    if connections[supervisor.database].vendor != "sqlite":
        _wait_for_database(supervisor.database, supervisor.options, stop)
    if stop.requested:
        return 0
    _look_at(supervisor.database)
    try:
        return supervisor.run(stop)
    except Exception as error:
        report(error, "supervisor: crashed: %s", error)
        return 1
    finally:
        wait_for_receivers(1.0)


def _end_if_any_is_stuck(supervisors: Sequence[Supervisor], *, is_own_process: bool) -> None:
    """End the process if a supervisor is stuck, and if this is not called again for as long.

    It is not called while a thread, such as a receiver's, does not release the GIL.
    """
    for each in supervisors:
        each.end_if_stuck()
    if is_own_process:
        seconds = max(each.stuck_after for each in supervisors)
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def _have_broken_modules_watched(options: Options) -> None:
    """Have the reloader watch the task modules that cannot be imported.

    The reloader watches imported modules, and files whose import error it has seen.
    """
    for name in modules_with_tasks(options.task_modules):
        with suppress(Exception):
            autoreload.check_errors(import_module)(name)


def _end_after(stop: Shutdown, supervisors: Sequence[Supervisor]) -> None:
    """Exit some seconds after the shutdown request, in any state of the databases."""

    def end() -> None:
        stop.wait(None)
        seconds = max(each.slowest_options.longest_shutdown for each in supervisors)
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


def _check_other_processes_can_see(database: str) -> None:
    connection: Any = connections[database]
    if connection.vendor == "sqlite" and connection.is_in_memory_db():
        raise CommandError(
            f"The database {database!r} is in the memory of this process, and workers are other "
            "processes. Name a file in DATABASES; in tests, call drain()."
        )


def _backends(given: str | Sequence[str] | None) -> list[DatabaseBackend]:
    """Return the backends that ``--backend`` names. Raises CommandError for an unknown one."""
    texts = [given] if isinstance(given, str) else given or [DEFAULT_TASK_BACKEND_ALIAS]
    names = [name.strip() for text in texts for name in text.split(",")]
    known = task_backends.settings
    if names == ["all"] and "all" not in known:
        every = [task_backends[alias] for alias in known]
        if found := [each for each in every if isinstance(each, DatabaseBackend)]:
            return found
    backends = []
    for name in dict.fromkeys(names):
        if name not in known:
            raise CommandError(
                f"There is no backend {name!r} in TASKS. Choose from {', '.join(known)}."
            )
        if not isinstance(backend := task_backends[name], DatabaseBackend):
            raise CommandError(
                f"TASKS[{name!r}] is a {type(backend).__qualname__}; "
                "runqueue needs a DatabaseBackend."
            )
        backends.append(backend)
    return backends


def _supervisors(given: dict[str, Any]) -> list[Supervisor]:
    """Return a supervisor for each backend that is to be served."""
    backends = _backends(given["backend"])
    for problem in (problem for each in backends for problem in each.check()):
        if problem.is_serious():
            raise CommandError(f"{problem.msg} {problem.hint}")
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
        "max_age",
        "max_memory",
        "poll_interval",
        "shutdown_timeout",
        "name",
    )
    changes = {name: given[name] for name in names if given[name] is not None}
    only = {"workers": ["worker"], "dispatcher": ["dispatcher"]}
    roles = only.get(given["only"], ["worker", "dispatcher"])
    drains = JointDrain(each.alias for each in backends)
    try:
        for each in backends:
            if not each.config.changed(**changes).embedded:
                _check_other_processes_can_see(each.database)
        return [
            Supervisor(each, roles, changes, drain=given["drain"], drains=drains)
            for each in backends
        ]
    except InvalidOption as error:
        raise CommandError(str(error)) from None
