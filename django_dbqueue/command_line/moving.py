"""Move jobs from one backend to another, for ``manage.py queue move``."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from django.core.management.base import CommandError
from django.db import connections
from django.db.models import Count

from ..backend import DatabaseBackend
from ..compat import task_backends
from ..core.transactions import repeated
from ..engine import moving
from ..models import Operation
from ..models.expressions import Now
from ..models.job import JobQuerySet
from .output import Row

RUNNING = "It runs. Repeat the command when it has ended."
LOCKED = "Another transaction has locked it. Repeat the command."


def move(jobs: JobQuerySet, target: DatabaseBackend, *, dry: bool, **columns: Any) -> list[Row]:
    """Move jobs that do not run. Return what was moved, and what stays with the reason.

    Complete interrupted moves first. dry: change nothing. columns: further ones of Operation.
    """
    for database in (jobs.db, target.database):
        if not connections[database].get_autocommit():
            raise CommandError(
                f"A transaction is open in the database {database!r}. Run the command outside: "
                "it commits in both databases in turn."
            )
    found: Counter[tuple[str, str, str]] = Counter()
    operation: Operation | None = None
    if not dry:
        for begun in Operation.objects.using(jobs.db).holding():
            _deliver_all(begun, _backend(begun).database)
    for part in moving.parts(jobs):
        reasons = moving.reasons(part, target.database)
        fit = [pk for pk, reason in reasons.items() if not reason]
        if fit and not dry:
            operation = operation or Operation.objects.using(jobs.db).insert(
                Operation(
                    verb=Operation.Verb.MOVE_OUT, value=target.alias, finished_at=Now(), **columns
                )
            )
            repeated(jobs.db, partial(moving.hold, operation, fit))
            moved = _deliver_all(operation, target.database)
            reasons |= {pk: moved.get(pk, LOCKED) for pk in fit}
        found.update((job.queue, job.task, reasons[job.pk]) for job in part)
    running = jobs.running().order_by().values_list("queue", "task")
    found.update(
        {(queue, task, RUNNING): number for queue, task, number in running.annotate(Count("pk"))}
    )
    return [
        {"queue": queue, "task": task, "number": number, "problem": problem}
        for (queue, task, problem), number in sorted(found.items())
    ]


def give_back(database: str, target: str, *, dry: bool = False) -> int:
    """End the interrupted moves to a backend that is gone. Return the number of jobs that run here.

    dry: change nothing. Raises CommandError if there is none.
    """
    moves = Operation.objects.using(database).holding().filter(value=target)
    if not moves:
        raise CommandError(
            f"No interrupted move to {target!r} holds jobs in the database {database!r}."
        )
    if dry:
        return sum(each.total - each.done for each in moves)
    number = 0
    while operation := moves.first():
        number += repeated(database, partial(moving.give_back, operation))
    return number


def _deliver_all(operation: Operation, target: str) -> moving.Reasons:
    source, size = operation._state.db or "", moving.PART
    found: moving.Reasons = {}
    while Operation.objects.using(source).holding().filter(pk=operation.pk):
        try:
            found |= repeated(source, partial(moving.deliver, operation, target, size))
            size = min(size * 2, moving.PART)
        except moving.REFUSALS:
            # Halve the part until the job that the target refuses is alone in it.
            if size == 1:
                raise
            size //= 2
    return found


def _backend(operation: Operation) -> DatabaseBackend:
    """Return the backend to which an interrupted move goes."""
    alias = operation.value
    backend = task_backends[alias] if alias in list(task_backends) else None
    if not isinstance(backend, DatabaseBackend):
        raise CommandError(
            f"A move to {alias!r} was interrupted, and TASKS has no DatabaseBackend of that name. "
            "Add it until its jobs are moved. If its database is gone for good: manage.py queue "
            f"move --abandon {alias}"
        )
    return backend
