"""Entry point of the process that reads the settings anew, to try them before they are used."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from .child_main import on_end_of_parent

if TYPE_CHECKING:
    from ...backend import DatabaseBackend
    from ...core.options import Options


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """Settings of a backend, as far as a supervisor uses them.

    config: its OPTIONS, without those of single queues and without ``backoff``.
    queues: its QUEUES.
    address: the address of its database, and the credentials.
    """

    config: Options
    queues: frozenset[str]
    address: tuple[str, ...]


def main(answer: Connection, changes: dict[str, dict[str, object]], level: int) -> None:
    """Send the BackendSettings by backend, or a sentence that says why they cannot be used.

    ``changes`` are the command line's changes to the OPTIONS of each backend. ``level`` is the
    supervisor's log level.
    """
    for number in ("SIGINT", "SIGHUP"):
        if hasattr(signal, number):
            signal.signal(getattr(signal, number), signal.SIG_IGN)
    on_end_of_parent(lambda: os._exit(1))
    try:
        import django

        django.setup()
        from ..logging_setup import log_to_console

        log_to_console(level or None)
        answer.send({alias: _tried(alias, own) for alias, own in changes.items()})
    except BaseException as error:
        answer.send(f"{type(error).__name__}: {error}")


def settings_of(backend: DatabaseBackend) -> BackendSettings:
    """Return the present settings of a backend."""
    from django.db import connections

    from ...core.options import Options

    given = connections.settings[backend.database]
    names = ("ENGINE", "NAME", "HOST", "PORT", "USER", "PASSWORD")
    # Of the values that are left out, some cannot be sent to another process.
    config = replace(backend.config, backoff=Options.backoff, per_queue={})
    return BackendSettings(
        config=config,
        queues=frozenset(backend.queues),
        address=(backend.database, *(str(given.get(name, "")) for name in names)),
    )


def _tried(alias: str, changes: dict[str, object]) -> BackendSettings:
    """Return the settings of a backend. Raises ImproperlyConfigured if runqueue cannot use them."""
    from django.core.checks import run_checks
    from django.core.exceptions import ImproperlyConfigured

    from ...backend import DatabaseBackend
    from ...compat import task_backends
    from ...registry import discover
    from .child_spec import selectors, specs

    backend = task_backends[alias]
    if not isinstance(backend, DatabaseBackend):
        raise ImproperlyConfigured(f"TASKS[{alias!r}] is no DatabaseBackend.")
    for message in (*backend.check(), *run_checks(tags=["dbqueue"])):
        if message.is_serious():
            raise ImproperlyConfigured(f"{message.msg} {message.hint or ''}".strip())
    selectors(specs(backend.config, ["worker"], changes), frozenset(backend.queues))
    options = backend.config.changed(**changes)
    if not all(map(options.allows_import_error, discover(options.task_modules))):
        raise ImproperlyConfigured("Tasks cannot be imported, for the reasons above.")
    return settings_of(backend)
