"""Database of the demo: DATABASE_URL, or its own PostgreSQL server, or SQLite."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import django
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError

from . import FOLDER, ROOT, DemoError
from .children import log_of
from .console import say, shortened
from .interrupts import deferred


@contextmanager
def chosen_database() -> Iterator[None]:
    """Set DATABASE_URL during the block, or unset it for SQLite. Stops the own server after it."""
    if os.environ.get("DATABASE_URL"):
        say("The database is the one in DATABASE_URL.")
        yield
        return
    os.environ.pop("DATABASE_URL", None)
    with _postgres() as url:
        if url:
            say("The database is a PostgreSQL server of the demo's own.")
            os.environ["DATABASE_URL"] = url
        else:
            say(
                f"The database is SQLite: the demo's own PostgreSQL did not start ({_last_line()})."
            )
        yield


def set_django_up() -> None:
    """Set Django up for the chosen database."""
    # Not in debug mode, which stores each query.
    os.environ["DEBUG"] = "false"
    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    django.setup()


@contextmanager
def database_errors() -> Iterator[None]:
    """Turn errors of the database or its settings into DemoError."""
    try:
        yield
    except (OperationalError, ImproperlyConfigured) as error:
        raise DemoError(f"The database cannot be used: {shortened(str(error), 300)}") from None


@contextmanager
def _postgres() -> Iterator[str]:
    """Yield the URL of the demo's own server; empty if it cannot start."""
    keeper = None
    try:
        with deferred(), log_of("postgres").open("wb") as log:
            keeper = subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "default",
                    "-m",
                    "example_project.demo.postgres",
                    FOLDER / "postgres",
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert keeper.stdout
        yield keeper.stdout.readline().strip()
    finally:
        if keeper:
            # It stops the server when its input ends.
            with deferred():
                keeper.communicate()


def _last_line() -> str:
    lines = log_of("postgres").read_text(errors="replace").split("\n")
    return shortened(next((line for line in reversed(lines) if line.strip()), "no output"), 70)
