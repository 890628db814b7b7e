"""Run the web server and workers."""

from __future__ import annotations

import socket
import subprocess
import time

from django.contrib.auth import get_user_model

from . import DemoError
from .children import command, log_of
from .console import say
from .index import follow, how_to_run
from .prepare import NAME, PASSWORD

LONGEST_START = 60.0


def serve(port: int, processes: int) -> None:
    """Serve until Ctrl-C, and show how far the index is.

    Raises DemoError if the server or the workers end by themselves.
    """
    try:
        with (
            command("runserver", "--noreload", f"127.0.0.1:{port}", debug=True) as server,
            command("runqueue", *how_to_run(processes)) as workers,
        ):
            running = {"runserver": server, "runqueue": workers}
            _wait_for(port, running)
            _say_where(port)
            try:
                follow(lambda: _must_run(running))
                say("\nWorkers keep the index up to date. Ctrl-C ends the demo.")
                while True:
                    _must_run(running)
                    time.sleep(0.5)
            except KeyboardInterrupt:
                say("\nRunning jobs may end. Another Ctrl-C ends them.")
                raise
    except KeyboardInterrupt:
        say("\nThe demo has ended. Its data is kept for the next start.")


def _wait_for(port: int, running: dict[str, subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + LONGEST_START
    while time.monotonic() < end:
        _must_run(running)
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise DemoError(f"The server does not answer. See {log_of('runserver')}.")


def _must_run(running: dict[str, subprocess.Popen[bytes]]) -> None:
    for name, process in running.items():
        if process.poll() is not None:
            raise DemoError(
                f"{name} ended by itself, with exit code {process.returncode}. See {log_of(name)}."
            )


def _say_where(port: int) -> None:
    here = f"http://127.0.0.1:{port}"
    say(f"\nSearch   {here}/\nAdmin    {here}/admin/dbqueue/overview/\nTrouble  {here}/trouble/")
    if get_user_model()._default_manager.filter(username=NAME).exists():
        say(f"         sign in as {NAME} with the password {PASSWORD}")
    say("They show the jobs while they run. Ctrl-C ends the demo.\n")
