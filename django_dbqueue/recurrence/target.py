"""Target of a recurring task: found in the imported modules, validated, and enqueued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.core.management import get_commands

from ..compat import DEFAULT_TASK_BACKEND_ALIAS, InvalidTask, task_backends
from ..core import serialization
from ..core.source import recurring_noted
from ..exceptions import CommandNotAllowed, InvalidSchedule, SqlNotAllowed
from ..registry import load

if TYPE_CHECKING:
    from ..models import RecurringTask

CALL_COMMAND = "django_dbqueue.contrib.tasks.call_command"


@dataclass(frozen=True, kw_only=True)
class RecurringCall:
    """A task by its path, or a management command, with the values for its jobs.

    An empty value means the task's own.
    """

    task: str = ""
    command: str = ""
    args: Sequence[object] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    queue: str = ""
    priority: int | None = None

    @classmethod
    def of(cls, row: RecurringTask) -> RecurringCall:
        return cls(**{each.name: getattr(row, each.name) for each in fields(cls)})

    def resolved(self, backend: str | None = None) -> Any:
        """Return the validated task through which the jobs are enqueued.

        Raises InvalidTaskPath if the task is not known here, InvalidSchedule if it cannot be called
        with these values.
        """
        if not self.task and not self.command:
            raise InvalidSchedule("neither a task nor a command is given. Give one.")
        if self.task and self.command:
            raise InvalidSchedule(
                f"both task={self.task!r} and command={self.command!r} are given. Leave one out."
            )
        return self.through(load(self.task or CALL_COMMAND), backend)

    def through(self, task: Any, backend: str | None = None) -> Any:
        """Return the same as ``resolved()``, for a task that is already loaded."""
        self.check()
        if backend is not None and backend not in task_backends.settings:
            raise InvalidSchedule(
                f"its backend {backend!r} is not in TASKS. Add it, or choose from "
                f"{', '.join(map(repr, task_backends.settings))}."
            )
        changes = {"queue_name": self.queue or None, "priority": self.priority, "backend": backend}
        try:
            serialization.bind(task.func, task.takes_context, self._arguments, self.kwargs)
            changed = task.using(
                **{name: value for name, value in changes.items() if value is not None}
            )
            if check := getattr(task.func, "check_call", None):
                check(changed.get_backend(), *self._arguments, **self.kwargs)
            return changed
        except (TypeError, ValueError, InvalidTask, CommandNotAllowed, SqlNotAllowed) as error:
            raise InvalidSchedule(str(error)) from None

    def check(self) -> None:
        """Raise InvalidSchedule for errors that are detectable without the task."""
        if (
            isinstance(self.args, str)
            or not isinstance(self.args, Sequence)
            or not isinstance(self.kwargs, Mapping)
        ):
            raise InvalidSchedule(
                f"the arguments must be a list and a dict, not {self.args!r} and {self.kwargs!r}."
            )
        if "self" in self.kwargs:
            raise InvalidSchedule(
                f"the keyword arguments {dict(self.kwargs)!r} have 'self', which Task.enqueue() "
                "cannot pass on. Rename it in the task."
            )
        if self.command and self.command not in get_commands():
            raise InvalidSchedule(
                f"there is no command {self.command!r}. `manage.py help` lists the commands."
            )
        try:
            serialization.to_json([self.args, self.kwargs], of="the arguments")
        except (TypeError, ValueError) as error:
            raise InvalidSchedule(str(error)) from None

    @property
    def _arguments(self) -> Sequence[object]:
        return [self.command, *self.args] if self.command else self.args


def resolve(row: RecurringTask, database: str | None, backend: str | None) -> Any:
    """Return the validated task through which the jobs of a row are enqueued in its database.

    The backend is the given one, that of the dispatcher. A task that an operator or SQL has chosen
    keeps its own if its jobs are in this database, or if the code names that backend. Raises
    InvalidTaskPath or InvalidSchedule.
    """
    if row.task and not (row.command or row.is_from_code):
        own = load(row.task).get_backend()
        is_here = getattr(own, "database", None) == database
        backend = None if is_here or own.alias != DEFAULT_TASK_BACKEND_ALIAS else backend
    task = RecurringCall.of(row).resolved(backend)
    if getattr(task.get_backend(), "database", None) != database:
        raise InvalidSchedule(
            f"its jobs are not in the database {database!r} of its row. "
            "Create the row in the database of the jobs."
        )
    return task


def enqueue(row: RecurringTask, wait: timedelta, backend: str | None = None) -> UUID:
    """Write one job of a recurring task, and return its id.

    Raises the exceptions of ``resolve()``.
    """
    call = RecurringCall.of(row)
    # With the row of its time, whatever the task's own setting is.
    task = resolve(row, row._state.db, backend).using(
        enqueue="in_transaction", run_after=wait or None
    )
    with recurring_noted(row.name):
        return UUID(task.enqueue(*call._arguments, **call.kwargs).id)
