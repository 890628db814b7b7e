"""Ready-made task that runs an operation of the admin on very many jobs, and its start."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ..compat import task_backends
from ..core.transactions import repeated, writing
from ..engine import operations
from ..exceptions import Interrupted
from ..models import Operation, Process, Queue
from ..models.enums import HIGHEST_PRIORITY
from ..models.job import JobQuerySet
from ..tasks import task
from .usual_place import usual_place

if TYPE_CHECKING:
    from ..backend import DatabaseBackend
    from ..context import JobContext

# Number of jobs up to which an operation runs in the request that starts it.
AT_ONCE = operations.PART
# The longest time that one attempt takes, in seconds.
SHIFT = 300.0
# The times between two looks at a trial run: the first, and the longest, in seconds. Nothing waits
# in a thread: the jobs that it waits for may need it.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
# Shorter rests than this are not worth an attempt of their own, in seconds.
SHORT = 0.1
DAY = 86400.0


@task(takes_context=True, max_attempts=10, **usual_place())
def run_operation(context: JobContext, operation: int) -> str:
    """Run an operation that an operator has started in the admin, until it ends or is stopped.

    Returns what it did. An interrupted one goes on where it was.
    """
    database: str = cast("DatabaseBackend", task_backends[context.task_result.backend]).database
    began = time.monotonic()
    row = Operation.objects.using(database).get(pk=operation)
    while not row.finished_at:
        if context.should_stop:
            raise Interrupted
        if time.monotonic() > began + SHIFT:
            context.snooze(0)
        if _is_to_wait(row):
            context.snooze(min(FIRST_PAUSE * context.attempt, LONGEST_PAUSE))
        started = time.monotonic()
        before = row.done
        row = repeated(database, partial(operations.run_part, database, operation, _size(row)))
        context.progress(row.done, row.total)
        if row.rate and not row.finished_at:
            rest = (row.done - before) / row.rate - time.monotonic() + started
            if rest > SHORT:
                context.snooze(rest)
            time.sleep(max(0.0, rest))
    return f"{row.get_verb_display()}: {row.changed} of {row.total} jobs."


def start(
    jobs: JobQuerySet, verb: str, value: object, backend: DatabaseBackend | None, **columns: Any
) -> Operation:
    """Change jobs by an operation: a few at once, very many by a job of their backend.

    ``verb`` is one of Operation.Verb, ``columns`` are further ones of Operation. Without a backend,
    all are changed at once. Raises the exceptions of the verb for an invalid value.
    """
    with writing(jobs.db):
        operation = _begun(operations.create(jobs, verb, value, **columns), backend)
    return _done_at_once(operation)


def undo(operation: Operation, backend: DatabaseBackend | None, **columns: Any) -> Operation:
    """Undo an operation by another one. Raises IntegrityError if it is undone already."""
    with writing(operation._state.db):
        undoing = _begun(operations.create_undo(operation, **columns), backend)
    return _done_at_once(undoing)


def go_on(operation: Operation, backend: DatabaseBackend) -> None:
    """Have a new job go on with an operation that has not ended."""
    database = operation._state.db
    now = run_operation.using(
        backend=backend.alias,
        queue_name=_queue_of(backend),
        priority=HIGHEST_PRIORITY,
        timeout=DAY,
    )
    result = now.enqueue(operation.pk)
    Operation.objects.using(database).filter(pk=operation.pk).update(job=result.id)
    operation.job = result.id


def _begun(operation: Operation, backend: DatabaseBackend | None) -> Operation:
    """Enqueue the job of an operation on very many jobs, in its transaction."""
    is_slow = operation.rate or operation.stop_above is not None
    if backend and operation.total and (operation.total > AT_ONCE or is_slow):
        go_on(operation, backend)
    return operation


def _done_at_once(operation: Operation) -> Operation:
    """Run an operation without a job, each part in a transaction of its own: see lock order."""
    while not operation.job and not operation.finished_at:
        database = operation._state.db or ""
        operation = repeated(database, partial(operations.run_part, database, operation.pk))
    return operation


def _is_to_wait(operation: Operation) -> bool:
    """Return whether a trial run waits for the results of its last step."""
    if operation.stop_above is None or operation.stop_requested_at:
        return False
    return not operations.may_go_on(operation)


def _size(operation: Operation) -> int:
    size = min(operations.PART, operations.next_step(operation))
    return max(1, min(size, operation.rate or size))


def _queue_of(backend: DatabaseBackend) -> str:
    """Return a queue that is not paused, if possible one that a live worker serves."""
    database, usual = backend.database, str(usual_place()["queue_name"])
    workers = Process.objects.using(database).workers()[:1000]
    if backend.queues:
        known = sorted(backend.queues)
    else:
        rows = Queue.objects.using(database).order_by("name").values_list("name", flat=True)
        served = {name for worker in workers for name in worker.queues if "*" not in name}
        known = [usual, *sorted(served), *rows[:1000]]
    paused = set(Queue.objects.using(database).names_of_paused())
    names = [name for name in sorted(known, key=usual.__ne__) if name not in paused]
    found = (name for name in names if any(worker.serves(name) for worker in workers))
    return next(found, names[0] if names else known[0])
