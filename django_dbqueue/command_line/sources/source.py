"""What is read from another queue, and what each of them has to tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.apps import apps
from django.db import router


class Unfit(Exception):
    """A row stays where it is, for the reason in the message."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A job that waits in another queue. A priority of None is that of its task.

    options: those of ``Task.using()`` that it has beside its queue, priority and time.
    """

    task: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    queue: str | None = None
    priority: int | None = 0
    run_after: datetime | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule of another queue. ``when``: the columns of RecurringTask that say its times."""

    name: str
    task: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    queue: str | None = None
    priority: int | None = 0
    is_enabled: bool = True
    when: Mapping[str, Any] = field(default_factory=dict)


class Source(ABC):
    """Another queue, read by its own models.

    name: its distribution. app: the label of its application.
    order: the order in which its workers would take the jobs, as far as the table has it.
    related: the relations of a row that are read too.
    """

    name: str
    app: str
    order: tuple[str, ...] = ("pk",)
    related: tuple[str, ...] = ()

    def databases(self) -> list[str]:
        """Return the aliases of the databases that hold its jobs. Raises Unfit."""
        return [router.db_for_write(self.parts()[0].model)]

    def model(self, name: str) -> Any:
        """Return one of its models. Raises LookupError if the application is not installed."""
        return apps.get_model(self.app, name)

    def prepare(self) -> None:  # noqa: B027 - Most need nothing.
        """Get ready for a move. Not called in a dry run."""

    @abstractmethod
    def parts(self) -> list[Any]:
        """Return querysets of the rows of waiting jobs: those that its workers lock."""

    @abstractmethod
    def read(self, row: Any) -> Waiting:
        """Return the job of a row. Raises Unfit."""

    def identity(self, row: Any) -> str:
        """Return what identifies the job of a row in its queue, whatever its state."""
        return f"{self.name} {row.pk}"

    def remove(self, rows: Sequence[Any]) -> None:
        """Remove rows that were moved, with what belongs to them. They are locked."""
        for row in rows:
            row.delete()

    def schedules(self) -> list[Any]:
        """Return querysets of the rows of schedules that are not declared in code."""
        return []

    def is_built_in(self, row: Any) -> bool:
        """Return True for a schedule that only the other queue itself needs."""
        return False

    def read_schedule(self, row: Any) -> Schedule:
        """Return the schedule of a row. Raises Unfit."""
        raise NotImplementedError

    def remove_schedule(self, row: Any) -> None:
        """Remove or disable a schedule that was moved."""
        row.delete()


def check_days(given: str, fields: Sequence[str]) -> None:
    """Raise Unfit if one of two day fields must match there, and both here.

    That is so if one of them begins with ``*``. fields: the five of ``given``, without seconds.
    """
    if len(fields) != 5:
        return
    day, weekday = fields[2], fields[4]
    if not {"*", "?"} & {day, weekday} and "*" in day[0] + weekday[0]:
        raise Unfit(
            f"It has {given}, with {day!r} as day of the month and {weekday!r} as day of the "
            "week: there one must match, here both. List the values there."
        )
