"""Declarations in code of recurring tasks and recurring management commands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

from ..compat import DEFAULT_TASK_BACKEND_ALIAS, FrameworkTask
from ..core import serialization
from ..exceptions import InvalidSchedule, InvalidTaskPath
from .rule import Recurrence, check_name
from .target import RecurringCall

WHEN = {each.name for each in fields(Recurrence)} - {"name", "cron", "every"}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Declaration of one recurring task.

    ``func`` is the decorated function; a command and an entry of the settings have none.
    """

    recurrence: Recurrence
    call: RecurringCall
    backend: str | None = None
    func: Callable[..., object] | None = None
    is_from_settings: bool = False

    @property
    def name(self) -> str:
        return self.recurrence.name

    @property
    def what(self) -> str:
        return self.call.task or f"command {self.call.command}"

    def resolved(self) -> Any:
        """Return the task through which its jobs are enqueued.

        Raises InvalidSchedule for an invalid declaration.
        """
        if self.is_from_settings and (other := _by_name.get(self.name)):
            raise InvalidSchedule(
                f"{self.name!r} of OPTIONS['recurring'] is already the recurring {other.what} of "
                "the code. Rename one of them."
            )
        try:
            return self.call.resolved(self.backend)
        except (InvalidSchedule, InvalidTaskPath) as error:
            raise InvalidSchedule(f"{self.name!r}: {error}") from None

    def values(self) -> dict[str, Any]:
        """Return the fields of its row, with a fingerprint of them all."""
        values: dict[str, object] = {}
        for part in (self.recurrence, self.call):
            values |= {each.name: getattr(part, each.name) for each in fields(part)}
        values |= {name: serialization.to_json(values[name]) for name in ("args", "kwargs")}
        text = json.dumps(values, sort_keys=True, default=str)
        return {**values, "definition": hashlib.sha256(text.encode()).hexdigest()}

    def is_another(self, other: Declared) -> bool:
        """Return True if the two declarations cannot mean the same recurring task.

        A module that is imported again repeats its declarations.
        """
        if self.func and other.func and self.what == other.what:
            return self.func is other.func
        return self.values() != other.values()


_by_name: dict[str, Declared] = {}


def declared() -> dict[str, Declared]:
    """Return all declarations of the modules imported so far, by name."""
    return dict(_by_name)


def from_settings(alias: str, given: Mapping[str, Mapping[str, Any]]) -> list[Declared]:
    """Return the enabled declarations in the validated ``OPTIONS["recurring"]`` of a backend."""
    return [
        Declared(
            recurrence=Recurrence.from_settings(name, own),
            call=RecurringCall(
                task=own.get("task", ""),
                command=own.get("command", ""),
                args=own.get("args", ()),
                kwargs=own.get("kwargs", {}),
                queue=own.get("queue_name", ""),
                priority=own.get("priority"),
            ),
            backend=alias,
            is_from_settings=True,
        )
        for name, own in given.items()
        if own.get("enabled", True)
    ]


def recurring(
    cron: str = "",
    *,
    every: timedelta | None = None,
    drift: bool = False,
    timezone: str = "",
    name: str | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    queue_name: str = "",
    priority: int | None = None,
    missed: Literal["skip", "one", "all"] = "skip",
    most_missed: int = 10,
    jitter: timedelta = timedelta(),
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
) -> Callable[[T], T]:
    """Enqueue a task on a schedule.

    Place the decorator above or below ``@task``, once for each schedule.

    cron: an expression of five fields, or six with the seconds first, on the wall clock of
        ``timezone`` (default: ``TIME_ZONE``).
    every: an interval from one planned time to the next; with ``drift``, from the end of a run to
        the next.
    name: the name of the recurring task. The default is the task's path, so a second schedule of a
        task needs a name of its own.
    args, kwargs, queue_name, priority: values for its jobs.
    missed: the treatment of times at which no dispatcher ran: "skip" them, "one" run for all, or
        "all" (up to ``most_missed``).
    jitter: each job waits for a random part of it.
    starts_at, ends_at: the schedule has no times before, or after.

    Raises InvalidSchedule for an invalid schedule.
    """
    when: dict[str, Any] = {
        "drift": drift,
        "timezone": timezone,
        "missed": missed,
        "most_missed": most_missed,
    }
    when |= {"jitter": jitter, "starts_at": starts_at, "ends_at": ends_at}
    call: dict[str, Any] = {
        "args": args,
        "kwargs": kwargs or {},
        "queue": queue_name,
        "priority": priority,
    }

    def declare(function: T) -> T:
        task: Any = function if isinstance(function, FrameworkTask) else None
        func: Any = task.func if task else function
        if not hasattr(func, "__qualname__"):
            raise InvalidSchedule(
                f"@recurring decorates {function!r}, which is not a function. Put it above @task."
            )
        path = f"{func.__module__}.{func.__qualname__}"
        recurrence = _recurrence(path if name is None else name, cron, every, **when)
        one = Declared(
            recurrence=recurrence,
            call=RecurringCall(task=path, **call),
            backend=getattr(task, "backend", None),
            func=func,
        )
        _declare(one, task)
        return function

    return declare


def recurring_command(
    command: str,
    *args: object,
    cron: str = "",
    every: timedelta | None = None,
    options: Mapping[str, object] | None = None,
    name: str | None = None,
    queue_name: str = "",
    priority: int | None = None,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    **when: Any,
) -> None:
    """Run a management command on a schedule, each time as a job.

    Call this function in a module ``tasks``.

    args, options: as for Django's ``call_command``. All other arguments are as for ``@recurring``;
        the default name is the command's.

    Raises InvalidSchedule for an invalid schedule.
    """
    if unknown := sorted(when.keys() - WHEN):
        known = ", ".join(sorted(WHEN))
        raise InvalidSchedule(
            f"recurring_command({command!r}) does not take {', '.join(unknown)}, but {known}. "
            "Pass options of the command itself in options={...}."
        )
    recurrence = _recurrence(command if name is None else name, cron, every, **when)
    call = RecurringCall(
        command=command, args=args, kwargs=options or {}, queue=queue_name, priority=priority
    )
    _declare(Declared(recurrence=recurrence, call=call, backend=backend), None)


def _recurrence(name: str, cron: str, every: timedelta | None, **when: Any) -> Recurrence:
    check_name(name)
    return Recurrence(name=name, cron=cron, every=every, **when)


def _declare(one: Declared, task: Any) -> None:
    try:
        if task:
            one.call.through(task)
        else:
            one.call.check()
    except InvalidSchedule as error:
        raise InvalidSchedule(f"{one.name!r}: {error}") from None
    other = _by_name.get(one.name)
    if other and one.is_another(other):
        raise InvalidSchedule(
            f"{one.name!r} is already the recurring {other.what}. "
            "Give this one another name: name=..."
        )
    _by_name[one.name] = one
