"""Redaction of values whose name contains a word of OPTIONS["hidden"]."""

from __future__ import annotations

from functools import cache
from inspect import Parameter

from ..core import redaction
from ..core.serialization import signature_of
from ..exceptions import InvalidTaskPath
from ..models import Job, RecurringTask
from ..registry import discover, load
from ..tasks import Task
from .config import options
from .formatting import json_of

HIDDEN = redaction.HIDDEN


def without_secrets(value: object) -> object:
    """Replace hidden values in JSON."""
    return redaction.without_secrets(value, options().hidden)


def call_without_secrets(row: Job | RecurringTask) -> tuple[object, object]:
    """Return the redacted positional and keyword arguments of a job or a recurring task."""
    return redaction.call_without_secrets(
        row.args, row.kwargs, _parameters(row.task), options().hidden
    )


def named_arguments(row: Job) -> dict[str, object]:
    """Return the redacted arguments by name; positional ones without a parameter by number."""
    args, kwargs = call_without_secrets(row)
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in _parameters(row.task) if each.kind in kinds]
    found = {}
    if isinstance(args, list):
        for place, value in enumerate(args):
            found[names[place] if place < len(names) else f"#{place + 1}"] = value
    return {**found, **kwargs} if isinstance(kwargs, dict) else found


def arguments_text(row: Job) -> str:
    """Return the redacted arguments in one line, as in a call with names."""
    named = named_arguments(row).items()
    return ", ".join(f"{name}={json_of(each)}" for name, each in named)


def places_of(task: str, name: str) -> list[int]:
    """Return the place of a parameter among the positional arguments; none if it has none."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in _parameters(task) if each.kind in kinds]
    return [place for place, each in enumerate(names) if each == name]


def is_hidden(name: str) -> bool:
    return redaction.is_hidden(name, options().hidden)


def known_task(path: str) -> Task[..., object] | None:
    """Return the task at a path; None if this process does not know it."""
    try:
        return _load(path)
    except InvalidTaskPath:
        return None


def _parameters(path: str) -> list[Parameter]:
    """Return the parameters without the context; none for a task that is unknown here."""
    if (task := known_task(path)) is None:
        return []
    return list(signature_of(task.func).parameters.values())[task.takes_context :]


def _load(path: str) -> Task[..., object]:
    """Load a task, which a web process may not have imported before."""
    try:
        return load(path)
    except InvalidTaskPath:
        _discover()
        return load(path)


@cache
def _discover() -> None:
    discover(options().task_modules)
