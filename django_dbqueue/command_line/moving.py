"""Move jobs from one backend to another, for ``manage.py queue move``."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from django.core.management.base import CommandError
from django.db import OperationalError, connections
from django.db.models import Count

from ..backend import DatabaseBackend
from ..compat import task_backends
from ..core.transactions import is_conflict
from ..engine import moving
from ..models import Operation
from ..models.expressions import Now
from ..models.job import JobQuerySet
from .output import Row

T = TypeVar("T")

# Repetitions of a step that another transaction has overtaken.
TRIES = 5
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
            operation = operation or Operation.objects.using(jobs.db).create(
                verb=Operation.Verb.MOVE_OUT, value=target.alias, finished_at=Now(), **columns
            )
            _repeated(partial(moving.hold, operation, fit))
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


def _deliver_all(operation: Operation, target: str) -> moving.Reasons:
    found: moving.Reasons = {}
    size = moving.PART
    while Operation.objects.using(operation._state.db).holding().filter(pk=operation.pk):
        try:
            found |= _repeated(partial(moving.deliver, operation, target, size))
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
            "Add it until its jobs are moved."
        )
    return backend


def _repeated(step: Callable[[], T]) -> T:
    for number in range(TRIES):
        try:
            return step()
        except OperationalError as error:
            if not is_conflict(error) or number == TRIES - 1:
                raise
            time.sleep(random.uniform(0, 0.1 * 2**number))
    raise AssertionError
