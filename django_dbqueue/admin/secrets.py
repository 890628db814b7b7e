"""What the admin does not show: values whose name contains a word of OPTIONS["hidden"]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from typing import Any

from ..arguments import signature_of
from ..exceptions import InvalidTaskPath
from ..models import Job, RecurringTask
from ..tasks import Task, discover, load
from .config import options

HIDDEN = "••••••"


def without_secrets(value: Any) -> Any:
    """JSON, with hidden values replaced."""
    match value:
        case Mapping():
            return {name: HIDDEN if _is_secret(name) else without_secrets(each) for name, each in value.items()}
        case str():
            return value
        case Sequence():
            return [without_secrets(each) for each in value]
    return value


def arguments_without_secrets(job: Job | RecurringTask) -> list[Any]:
    """The positional arguments of a job, or of what recurs, which have the names that the task's function gives them."""
    names = chain(_names(job), repeat(""))
    return [HIDDEN if _is_secret(name) else without_secrets(each) for name, each in zip(names, job.args, strict=False)]


def _is_secret(name: str) -> bool:
    return any(word.lower() in name.lower() for word in options().hidden)


def _names(job: Job | RecurringTask) -> list[str]:
    try:
        task = _load(job.task)
    except InvalidTaskPath:
        return []
    return list(signature_of(task.func).parameters)[task.takes_context :]


def _load(path: str) -> Task[..., Any]:
    """A web process may not have needed the task before."""
    try:
        return load(path)
    except InvalidTaskPath:
        _discover()
        return load(path)


@cache
def _discover() -> None:
    discover(options().task_modules)
