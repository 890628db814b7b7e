"""Run ``runqueue`` beside a web server: it starts and ends with the server.

The web server starts a small process, which starts ``runqueue``, restarts it when it ends, and
ends it when the web server ends in any way. The server itself runs no thread for it, and continues
without it. Nothing else than a web server needs this: see ``runqueue``.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandParser, handle_default_options
from django.utils.autoreload import DJANGO_AUTORELOAD_ENV

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_Application = Callable[[_Message, _Receive, _Send], Awaitable[None]]

# Seconds between two checks of the parent process.
_CHECK = 0.2
# Seconds before the first restart of runqueue; they double up to the longest. A process that has
# run for _STABLE seconds is restarted after the first.
_FIRST, _LONGEST, _STABLE = 1.0, 30.0, 60.0
# The signals by which the server ends or reloads what it has started.
_HANDLED = [
    getattr(signal, name) for name in ("SIGTERM", "SIGQUIT", "SIGHUP") if hasattr(signal, name)
]
# Exit code of runqueue if its arguments are wrong, as of argparse.
_WRONG_ARGUMENTS = 2

# The process beside this one. A forked process inherits the list, and must not end its parent's.
_started: list[_Beside] = []


def start(*arguments: str) -> None:
    """Start ``runqueue`` with these arguments beside this process, unless it is already started.

    It ends with this process, also if that is killed. Arguments that runqueue does not know are
    reported in the log, and then it is not started again. Raises ImproperlyConfigured for an
    argument that is not text, and if DJANGO_SETTINGS_MODULE is not set.
    """
    if not any(each.is_own for each in _started):
        _started[:] = [_Beside("SIGTERM", arguments)]


def stop() -> None:
    """End what ``start()`` has started, gracefully, and wait for its end.

    This takes up to ``shutdown_timeout`` plus ten seconds. Does nothing in any other process, such
    as one that the starting process has forked.
    """
    if _started and _started[0].is_own:
        _started.pop().stop()


def when_ready(server: object) -> None:
    """Hook of gunicorn: start ``runqueue`` beside the master process."""
    start()


def on_reload(server: object) -> None:
    """Hook of gunicorn, on SIGHUP: replace the workers of ``runqueue`` as well.

    If the keeper process has ended, start it again.
    """
    if _started and _started[0].is_own:
        _started[0].reload()


def on_exit(server: object) -> None:
    """Hook of gunicorn: end ``runqueue``."""
    stop()


def asgi(application: _Application, *arguments: str) -> _Application:
    """Return an ASGI application that starts and ends ``runqueue`` with its server.

    Of the worker processes of one server, one does so. The server must send the lifespan events,
    as uvicorn and hypercorn do; ``application`` does not receive them.
    """
    if not callable(application):
        raise ImproperlyConfigured(
            f"asgi() wraps an ASGI application, not {application!r}. Give get_asgi_application()."
        )
    _check_arguments(arguments)
    held = ExitStack()

    async def beside(scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        await receive()
        try:
            if _is_first_of_server(held):
                start(*arguments)
        except Exception as error:  # If it were raised, uvicorn would serve without it.
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await sync_to_async(stop, thread_sensitive=False)()
        held.close()
        await send({"type": "lifespan.shutdown.complete"})

    return beside


def runserver(*arguments: str) -> None:
    """Start ``runqueue --embedded`` beside ``manage.py runserver``; call it in ``manage.py``.

    Does nothing for other commands. It restarts with the code; running jobs are released then.
    """
    _check_arguments(arguments)
    is_serving = os.environ.get(DJANGO_AUTORELOAD_ENV) == "true" or "--noreload" in sys.argv
    if sys.argv[1:2] == ["runserver"] and is_serving and not {"-h", "--help"} & {*sys.argv}:
        parser = CommandParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--settings")
        parser.add_argument("--pythonpath")
        handle_default_options(parser.parse_known_args(sys.argv[2:])[0])
        _started[:] = [_Beside("SIGQUIT", ("--embedded", *arguments))]
        atexit.register(stop)


class _Beside:
    """The process beside this one. ``signal_name`` is the signal that ends it."""

    def __init__(self, signal_name: str, arguments: tuple[str, ...]) -> None:
        if not os.environ.get("DJANGO_SETTINGS_MODULE"):
            raise ImproperlyConfigured(
                "runqueue cannot start beside the web server: DJANGO_SETTINGS_MODULE is not set. "
                "Set it in the server's environment; in gunicorn.conf.py: "
                "raw_env = ['DJANGO_SETTINGS_MODULE=mysite.settings']."
            )
        _check_arguments(arguments)
        self._owner, self._signal = os.getpid(), signal.Signals[signal_name]
        self._call = ("_keep", signal_name, *arguments)
        self._process = _spawn(*self._call)

    @property
    def is_own(self) -> bool:
        """Whether this process has started it. A forked process has not."""
        return self._owner == os.getpid()

    def reload(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)
            return
        sys.stderr.write("beside: the keeper of runqueue has ended; starting it again\n")
        self._process = _spawn(*self._call)

    def stop(self) -> None:
        self._process.send_signal(self._signal)
        self._process.wait()


def _check_arguments(arguments: tuple[object, ...]) -> None:
    for each in arguments:
        if not isinstance(each, str) or "\x00" in each:
            raise ImproperlyConfigured(
                f"{each!r} is no argument of runqueue. Give text, each word on its own: "
                "'--threads', '4'."
            )


def _is_first_of_server(held: ExitStack) -> bool:
    """Return whether no sibling of this worker process has started ``runqueue``.

    A worker that dies is replaced by its server, and the replacement starts ``runqueue`` again.
    """
    if not (server := multiprocessing.parent_process()):
        return True  # The server is this process.
    from .runtime.pidfile import Pidfile, PidfileTaken

    name = f"dbqueue-beside-{os.getuid()}-{server.pid}.pid"
    try:
        held.enter_context(Pidfile(os.path.join(tempfile.gettempdir(), name)))
    except PidfileTaken:
        return False
    return True


def _spawn(function: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Call a function of this module in a new process, with the same ``sys.path``.

    In a session of its own: a signal that a terminal sends to all processes of the server ends
    running jobs only if the server passes it on. Signals that it handles are blocked, and wait for
    their handlers: a server that a script has started with "&" ignores SIGQUIT, and so would this.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from django_dbqueue import beside; beside.{function}({os.getpid()}, *sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *arguments]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _keep(parent: int, signal_name: str, *arguments: str) -> None:
    """Keep ``runqueue`` running until a signal, or the end of the parent process."""
    received: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for each in _HANDLED:
        signal.signal(each, lambda number, frame: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    pause = _FIRST
    while True:
        began, is_ending = time.monotonic(), False
        child = _spawn("_run", *arguments)
        while child.poll() is None:
            if os.getppid() != parent and not is_ending:
                received.append(signal.Signals[signal_name])
            while received:
                is_ending |= received[0] != signal.SIGHUP
                child.send_signal(received.pop(0))
            time.sleep(_CHECK)
        if is_ending:
            return
        if child.returncode == _WRONG_ARGUMENTS:
            sys.stderr.write(
                "beside: runqueue does not take its arguments; not starting it again\n"
            )
            return
        pause = _FIRST if time.monotonic() - began > _STABLE else pause
        sys.stderr.write(
            f"beside: runqueue ended with exit code {child.returncode}; restarting in {pause:g} s\n"
        )
        end = time.monotonic() + pause
        while time.monotonic() < end:
            if os.getppid() != parent or {*received} - {signal.SIGHUP}:
                return
            time.sleep(_CHECK)
        # A signal to end may have come since the last look: the next child gets it.
        while signal.SIGHUP in received:
            received.remove(signal.SIGHUP)
        pause = min(_LONGEST, pause * 2)


def _run(parent: int, *arguments: str) -> None:
    """Run ``runqueue`` until it ends, or the parent process."""
    early: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, frame: early.append(number))
    # First of all: whatever this process starts would inherit the block.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    watch = (parent, early, signal.getsignal(signal.SIGHUP))
    threading.Thread(target=_watch, args=watch, daemon=True).start()
    import django
    from django.core.management import CommandError, call_command

    django.setup()
    try:
        call_command("runqueue", *arguments, skip_checks=False, beside=True)
    except CommandError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        # Django begins so what its parser says.
        sys.exit(_WRONG_ARGUMENTS if str(error).startswith("Error: ") else 1)


def _watch(parent: int, early: list[int], handler: object) -> None:
    """End this process after its parent. Repeat an early SIGHUP once ``runqueue`` handles it."""
    from .runtime.signals import ignore

    while os.getppid() == parent:
        if early and signal.getsignal(signal.SIGHUP) not in (handler, signal.SIG_IGN, ignore):
            early.clear()
            os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(_CHECK)
    os.kill(os.getpid(), signal.SIGTERM)
