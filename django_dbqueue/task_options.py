"""Validation of a task's options.

An invalid value is refused where it is written; the error contains the value.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from inspect import iscoroutinefunction
from typing import Any

from django.db.models import Model

from . import limits
from .compat import InvalidTask, task_backends
from .core import call_options, unique_keys
from .core.option_values import INSTANT
from .core.options import DAY, ENQUEUE, MOST_ATTEMPTS
from .core.time_values import check_expires

# Ten years, which every database can add to a time.
LONGEST_TIMEOUT = 3650 * DAY
CONFLICTS = ("rerun", "skip", "once", "replace")


def check(task: Any) -> None:
    """Raise InvalidTask, with the value, for invalid options."""
    _check_place(task.func)
    _check_retries(task)
    _check_run(task)
    check_expires(task.expires, task.run_after)
    try:
        _check_key(task)
        limits.check(task)
    except ValueError as error:
        raise InvalidTask(str(error)) from None


def check_backend(alias: object) -> None:
    """Raise the framework's exception for a value that is not an alias in ``TASKS``."""
    known = task_backends.settings
    if not isinstance(alias, str) or alias not in known:
        raise task_backends.exception_class(
            f"The connection {alias!r} doesn't exist. TASKS has {', '.join(map(repr, known))}."
        )


def _check_place(function: Callable[..., object]) -> None:
    name = getattr(function, "__qualname__", "")
    if name and not name.isidentifier():
        raise InvalidTask(
            f"{function.__module__}.{name} is not at the top level of its module, so workers "
            "cannot import it. Move it there."
        )


def _check_retries(task: Any) -> None:
    if task.max_attempts is not None and (
        type(task.max_attempts) is not int or not 1 <= task.max_attempts <= MOST_ATTEMPTS
    ):
        raise InvalidTask(
            f"max_attempts must be a whole number from 1 to {MOST_ATTEMPTS}, "
            f"not {task.max_attempts!r}."
        )
    if task.backoff is not None and not callable(task.backoff):
        raise InvalidTask(
            f"backoff must be callable, such as Exponential(first=5), not {task.backoff!r}."
        )
    try:
        call_options.as_json(task, ["backoff"])
    except ValueError as error:
        raise InvalidTask(str(error)) from None
    for name in ("retry_on", "discard_on"):
        kinds = getattr(task, name)
        if not isinstance(kinds, tuple) or not all(
            isinstance(k, type) and issubclass(k, BaseException) for k in kinds
        ):
            raise InvalidTask(f"{name} must be a tuple of exception classes, not {kinds!r}.")


def _check_run(task: Any) -> None:
    if isinstance(task.timeout, timedelta):
        seconds = task.timeout.total_seconds()
        raise InvalidTask(f"timeout must be in seconds: {seconds:g}, not {task.timeout!r}.")
    if task.timeout is not None and (
        type(task.timeout) not in (int, float) or not INSTANT <= task.timeout < LONGEST_TIMEOUT
    ):
        raise InvalidTask(
            f"timeout must be a number of seconds above 0 and below {LONGEST_TIMEOUT:,.0f}, "
            f"not {task.timeout!r}. The shortest is a microsecond."
        )
    if task.enqueue_when not in (None, *ENQUEUE):
        raise InvalidTask(
            f"enqueue must be {' or '.join(map(repr, ENQUEUE))}, not {task.enqueue_when!r}."
        )
    if task.on_lost not in ("retry", "fail"):
        raise InvalidTask(f"on_lost must be 'retry' or 'fail', not {task.on_lost!r}.")
    if not isinstance(task.atomic, bool):
        raise InvalidTask(f"atomic must be True or False, not {task.atomic!r}.")
    if not isinstance(task.delete_on_success, bool | None):
        raise InvalidTask(
            f"delete_on_success must be True or False, not {task.delete_on_success!r}."
        )
    if task.atomic and iscoroutinefunction(task.func):
        raise InvalidTask(
            "atomic=True needs a plain function: Django has no transactions in coroutines."
        )


def _check_key(task: Any) -> None:
    if task.on_conflict not in CONFLICTS:
        raise InvalidTask(
            f"on_conflict must be one of {', '.join(map(repr, CONFLICTS))}, "
            f"not {task.on_conflict!r}."
        )
    if task.on_conflict == "once" and task.delete_on_success:
        raise InvalidTask(
            "on_conflict='once' needs the rows of finished jobs, which delete_on_success deletes. "
            "Leave one of them out."
        )
    if callable(task.version):
        unique_keys.check(task.version, task.func, task.takes_context, "version")
    else:
        unique_keys.as_version(task.version, "version")
    if task.max_wait is not None and (
        not isinstance(task.max_wait, timedelta) or task.max_wait <= timedelta()
    ):
        raise InvalidTask(f"max_wait must be a timedelta above 0, not {task.max_wait!r}.")
    if task.max_wait is not None and task.on_conflict != "replace":
        raise InvalidTask("max_wait needs on_conflict='replace'. Add that, or leave max_wait out.")
    if task.key is None:
        if task.version is not None:
            raise InvalidTask("version needs a key. Add key=..., or leave version out.")
        return
    if isinstance(task.key, str | Model):
        unique_keys.as_text(task.key, "key")
    else:
        unique_keys.check(task.key, task.func, task.takes_context, "key")
