"""Keys and versions of unique jobs.

They are given with a call, or computed by a function of some of its arguments, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Protocol
from uuid import UUID

from django.db.models import Model

from . import serialization

LONGEST = 200
# The largest value that the column holds on every database.
LARGEST_VERSION = 2**63 - 1


class Called(Protocol):
    """A task, as far as its keys depend on it."""

    @property
    def func(self) -> Callable[..., object]: ...

    @property
    def takes_context(self) -> bool: ...

    @property
    def module_path(self) -> str: ...


def check(
    function: object, task_function: Callable[..., object], takes_context: bool, what: str
) -> None:
    """Raise ValueError for a value that is not a function of the task's arguments.

    ``what`` names the value in the message.
    """
    if not callable(function):
        raise ValueError(
            f"{what} must be a function of the task's arguments, or text, not {function!r}."
        )
    known = list(serialization.signature_of(task_function).parameters)[bool(takes_context) :]
    unknown = [name for name in wanted(function) if name not in known]
    if unknown:
        there = f"it has {', '.join(known)}" if known else "it has none"
        raise ValueError(
            f"{what} takes {unknown[0]!r}, which is not an argument of "
            f"{task_function.__qualname__}(): {there}."
        )


def compute(
    function: Callable[..., object],
    task: Called,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    what: str,
) -> str | None:
    """Return the key of a call of the task; None if the function returns None.

    Raises ValueError for a value that cannot be a key.
    """
    return as_text(_of_call(function, task, args, kwargs), what)


def compute_version(
    function: Callable[..., object],
    task: Called,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> int | None:
    """Return the version of a call of the task; None if the function returns None.

    Raises ValueError for a value that cannot be a version.
    """
    return as_version(
        _of_call(function, task, args, kwargs), f"{task.module_path}: the return value of version"
    )


def as_text(value: object, what: str) -> str | None:
    """Return the key as text. Raises ValueError for a value that cannot be a key."""
    if value is None:
        return None
    if isinstance(value, Model):
        return _of_instance(value, what)
    text = str(value) if isinstance(value, str | int | UUID) and not isinstance(value, bool) else ""
    if not 0 < len(text) <= LONGEST:
        raise ValueError(
            f"{what} must be text of 1 to {LONGEST} characters, a whole number, a UUID or a saved "
            f"model instance, not {value!r}."
        )
    return str(serialization.to_json(text, of=what))


def _of_instance(instance: Model, what: str) -> str | None:
    if instance._state.adding or instance.pk is None:
        raise ValueError(
            f"{what} is {instance!r}, which is not in the database: it has no lasting primary key. "
            "Save it first."
        )
    # A proxy is the same row as its model.
    model = instance._meta.concrete_model or type(instance)
    return as_text(f"{model._meta.label_lower}:{instance.pk}", what)


def as_version(value: object, what: str) -> int | None:
    """Return the version. Raises ValueError for a value that cannot be a version."""
    if value is not None and (type(value) is not int or abs(value) > LARGEST_VERSION):
        raise ValueError(f"{what} must be a whole number of at most 63 bits, not {value!r}.")
    return value


def wanted(function: Callable[..., object]) -> list[str]:
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [
        each.name
        for each in serialization.signature_of(function).parameters.values()
        if each.kind in named
    ]


def _of_call(
    function: Callable[..., object],
    task: Called,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> object:
    leading = (None,) if task.takes_context else ()
    bound = serialization.signature_of(task.func).bind(*leading, *args, **kwargs)
    bound.apply_defaults()
    return function(**{name: bound.arguments[name] for name in wanted(function)})
