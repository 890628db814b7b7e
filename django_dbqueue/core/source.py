"""Source of a job: the process, request, job or recurring task that enqueues it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from django.core.management import get_commands
from django.db.models import Model
from django.utils.functional import LazyObject, empty

from ..log import running_job

# The request that this context serves, and the recurring task that it enqueues.
_request: ContextVar[Any] = ContextVar("dbqueue_request", default=None)
_recurring: ContextVar[str] = ContextVar("dbqueue_recurring", default="")
# Larger values are cut: a client may request a path of any length.
LONGEST = 300


@contextmanager
def request_noted(request: object) -> Iterator[None]:
    """Note the request with the jobs that are enqueued inside."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


@contextmanager
def recurring_noted(name: str) -> Iterator[None]:
    """Note the recurring task with the jobs that are enqueued inside."""
    token = _recurring.set(name)
    try:
        yield
    finally:
        _recurring.reset(token)


def current_recurring() -> str:
    """Return the name of the recurring task that is enqueued here and now, or ""."""
    return _recurring.get()


def current_source(hidden: Iterable[str]) -> dict[str, str]:
    """Return the source of a job that is enqueued here and now.

    process: host and process id. command: the management command; program: any other program.
    path: the path of the request; its route, if the name of a part contains a word of ``hidden``.
    user, username: the primary key and the name of the user that the request has loaded already.
    job: the id of the job that runs here. recurring: the name of the recurring task.
    """
    job: Any = running_job.get()
    found = {
        "process": f"{_host()}:{os.getpid()}",
        **_program(),
        **_of_request(_request.get(), hidden),
        "job": job and str(job.pk),
        "recurring": _recurring.get(),
    }
    return {name: stored(value) for name, value in found.items() if value not in (None, "")}


def _of_request(request: Any, hidden: Iterable[str]) -> dict[str, object]:
    if request is None:
        return {}
    path, match = request.path, request.resolver_match
    if match and any(word.lower() in name.lower() for name in match.kwargs for word in hidden):
        path = f"/{match.route}"
    try:
        return {"path": path, **_of_user(_loaded_user(request))}
    except Exception:
        # An error of the project's user class must not fail the enqueue.
        return {"path": path}


def _of_user(user: Any) -> dict[str, str]:
    if not getattr(user, "is_authenticated", False):
        return {}
    if isinstance(user, Model):
        # A field that is not loaded would be read by a query.
        username = vars(user).get(getattr(user, "USERNAME_FIELD", "username"))
    else:
        username = getattr(user, "get_username", user.__str__)()
    values = {"user": getattr(user, "pk", None), "username": username}
    return {name: stored(value) for name, value in values.items() if value is not None}


def _loaded_user(request: Any) -> Any:
    """Return the user if the project has loaded it, and run no query.

    Loading it would also mark the session as accessed, so that caches vary by cookie.
    """
    user = getattr(request, "user", None)
    if isinstance(user, LazyObject) and (user := user._wrapped) is empty:
        return getattr(request, "_acached_user", None)  # As request.auser() has loaded it.
    return user


@cache
def _host() -> str:
    return socket.gethostname()


@cache
def _program() -> Mapping[str, str]:
    """Return the management command of this process, without its arguments, or its program."""
    program, *arguments = sys.argv or [""]
    if arguments and arguments[0] in get_commands():
        return {"command": arguments[0]}
    path = Path(program)
    return {"program": path.parent.name if path.name == "__main__.py" else path.name}


def stored(value: object) -> str:
    """Return a value as text that every database can store."""
    text = str(value).encode(errors="replace").decode().replace("\0", "\ufffd")
    return text[:LONGEST]
