"""Operations: an operator's change of very many jobs, in parts, each recorded with its effect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import Case, Exists, F, OuterRef, Q, QuerySet, Subquery, Value, When

from ..core.notify import notify_queues
from ..core.transactions import writing
from ..models import Job, Operation, OperationJob
from ..models.enums import UNFINISHED, UNSUCCESSFUL, WAITING, State
from ..models.expressions import Now, composed
from ..models.job import JobQuerySet
from ..models.locking import lock_keys, lock_waiting
from ..models.operation import STORED
from .moving import HELD

# Maximum number of jobs changed in one transaction.
PART = 500
# Sizes of the first two steps of a trial run: a number of jobs, and a share of all.
FIRST_JOBS, FIRST_SHARE = 3, 0.01
# Number of jobs whose results decide whether a trial run goes on: the last ones.
JUDGED = 1000

OF_STATE = tuple(name for name in STORED if name not in ("queue", "priority", "attempt"))
# A call that merges with a waiting job begins a run without an attempt. Whether one has merged with
# the job of such a run is unknown.
NOT_MERGED = Q(key=None) | Q(attempt__gt=F("attempts_before"))


@dataclass(frozen=True)
class Verb:
    """How an operation changes jobs, and how it is undone.

    eligible: filters the jobs that it would change.
    run: changes them.
    restored: the columns that an undo restores; none: it cannot be undone.
    untouched: filters the jobs that are still as the verb left them. An undo restores only those,
        and only if no attempt has started since.
    """

    eligible: Callable[[JobQuerySet, str], JobQuerySet]
    run: Callable[[JobQuerySet, str], object]
    restored: tuple[str, ...] = ()
    untouched: Callable[[JobQuerySet, str], JobQuerySet] = lambda jobs, _value: (
        jobs.waiting().filter(NOT_MERGED)
    )


def _retry_now(jobs: JobQuerySet) -> int:
    # In this order: a retry schedules jobs whose time has not come.
    return jobs.run_now() + jobs.retry()


VERBS: dict[str, Verb] = {
    Operation.Verb.RETRY: Verb(
        lambda jobs, _value: jobs.retriable(), lambda jobs, _value: jobs.retry(), OF_STATE
    ),
    Operation.Verb.RETRY_NOW: Verb(
        lambda jobs, _value: jobs.retriable() | jobs.scheduled(),
        lambda jobs, _value: _retry_now(jobs),
        OF_STATE,
    ),
    Operation.Verb.RUN_NOW: Verb(
        lambda jobs, _value: jobs.scheduled(), lambda jobs, _value: jobs.run_now(), OF_STATE
    ),
    Operation.Verb.RESCHEDULE: Verb(
        lambda jobs, value: jobs.waiting().exclude(expires_at__lte=datetime.fromisoformat(value)),
        lambda jobs, value: jobs.reschedule(datetime.fromisoformat(value)),
        OF_STATE,
    ),
    Operation.Verb.DISCARD: Verb(
        lambda jobs, _value: jobs.discardable(),
        lambda jobs, _value: jobs.discard(),
        OF_STATE,
        lambda jobs, _value: jobs.filter(state=State.DISCARDED),
    ),
    Operation.Verb.MOVE: Verb(
        lambda jobs, value: jobs.waiting().exclude(queue=value),
        lambda jobs, value: jobs.move(value),
        ("queue",),
        lambda jobs, value: jobs.waiting().filter(queue=value),
    ),
    Operation.Verb.REPRIORITISE: Verb(
        lambda jobs, value: jobs.waiting().exclude(priority=int(value)),
        lambda jobs, value: jobs.reprioritise(int(value)),
        ("priority",),
        lambda jobs, value: jobs.waiting().filter(priority=int(value)),
    ),
    Operation.Verb.STOP: Verb(
        lambda jobs, _value: jobs.stoppable(), lambda jobs, _value: jobs.stop()
    ),
    Operation.Verb.STOP_AND_RETRY: Verb(
        lambda jobs, _value: jobs.stoppable(), lambda jobs, _value: jobs.stop(then="retry")
    ),
}


def create(jobs: JobQuerySet, verb: str, value: object = "", **columns: Any) -> Operation:
    """Write an operation with the ids of its jobs: those of ``jobs`` that it would change now.

    ``columns`` are further ones of Operation. Raises ValueError or TypeError for a value that the
    verb does not take; nothing is written then.
    """
    text = value.isoformat() if isinstance(value, datetime) else str(value)
    with writing(jobs.db):
        operation = Operation.objects.using(jobs.db).insert(
            Operation(verb=verb, value=text, **columns)
        )
        eligible = VERBS[verb].eligible(jobs, text).order_by()
        return _filled(operation, eligible.values("pk"))


def create_undo(operation: Operation, **columns: Any) -> Operation:
    """Write the operation that undoes another one.

    Raises IntegrityError if there is one already.
    """
    database = operation._state.db or ""
    with writing(database):
        undo = Operation.objects.using(database).insert(
            Operation(
                verb=Operation.Verb.UNDO,
                value=operation.value,
                undoes_id=operation.pk,
                **columns,
            )
        )
        return _filled(undo, operation.items.filter(changed=True).values("job"))


def _filled(operation: Operation, ids: Any) -> Operation:
    """Insert the ids in the database itself: they may be a million."""
    connection = connections[ids.db]
    quote = connection.ops.quote_name
    sql, values = composed(ids)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {quote(OperationJob._meta.db_table)} "
            f"({quote('operation_id')}, {quote('job')}) "
            f"SELECT {int(operation.pk)}, selected.* FROM ({sql}) AS selected",
            values,
        )
        operation.total = cursor.rowcount
    Operation.objects.using(ids.db).store(operation, "total")
    return operation


def run_part(database: str, pk: int, size: int = PART) -> Operation:
    """Process the next jobs of an operation, in one transaction, and return the operation.

    It has ended if ``finished_at`` is set. Raises Operation.DoesNotExist if it was deleted.
    """
    with writing(database):
        rows = Operation.objects.using(database)
        operation = lock_waiting(rows.filter(pk=pk)).get()
        if operation.finished_at:
            return operation
        items = OperationJob.objects.using(database).filter(operation=pk)
        part = list(
            items.filter(pk__gt=operation.position)
            .order_by("pk")
            .values_list("pk", "job")[: min(size, PART)]
        )
        if part and not operation.stop_requested_at:
            operation.position = part[-1][0]
            operation.done += _process(operation, [job for _pk, job in part])
            rows.store(operation, "position", "done", "changed")
            return operation
    # Last, one by one: the jobs whose rows other transactions held.
    while not operation.finished_at:
        operation = _finish_next(database, pk)
    return operation


def _finish_next(database: str, pk: int) -> Operation:
    """Process one of the jobs that were left, and wait for it; or end the operation."""
    with writing(database):
        row = Operation.objects.using(database).filter(pk=pk)
        operation = lock_waiting(row).get()
        left = OperationJob.objects.using(database).filter(
            operation=pk, changed=None, pk__lte=operation.position
        )
        job = left.order_by("pk").values_list("job", flat=True).first()
        if operation.finished_at:
            return operation
        if job is None or operation.stop_requested_at:
            row.update(finished_at=Now())
            if job is None:
                # Without an effect: the operation can still be undone.
                row.filter(verb=Operation.Verb.UNDO, changed=0).update(undoes=None)
            return row.get()
        list(lock_waiting(Job.objects.using(database).filter(pk=job)).values_list("pk"))
        operation.done += _process(operation, [job])
        row.store(operation, "done", "changed")
        return operation


def _process(operation: Operation, ids: Sequence[UUID]) -> int:
    """Change those of the jobs that can be changed. Return the number of processed jobs.

    Jobs whose rows other transactions hold are not processed.
    """
    database = operation._state.db or ""
    jobs = Job.objects.using(database)
    change = _change_of(operation)
    free = lock_keys(change.eligible(jobs), ids)
    held = set(ids).difference(free)
    held = set(change.eligible(jobs).filter(pk__in=held).values_list("pk", flat=True))
    items = OperationJob.objects.using(database).filter(operation=operation, job__in=ids)
    if others := set(ids).difference(free, held):
        items.filter(job__in=others).update(changed=False)
    if free:
        before = jobs.filter(pk=OuterRef("job"))
        # A job that waited for a slot asks for one again.
        state = Case(When(state=State.BLOCKED, then=Value(State.READY)), default=F("state"))
        stored = {name: Subquery(before.values(name)[:1]) for name in STORED}
        stored["state"] = Subquery(before.annotate(then=state).values("then")[:1])
        items.filter(job__in=free).update(changed=True, **stored)
        change.run(jobs.filter(pk__in=free))
        operation.changed += len(free)
    return len(ids) - len(held)


class _Change(NamedTuple):
    eligible: Callable[[JobQuerySet], JobQuerySet]
    run: Callable[[JobQuerySet], object]


def _change_of(operation: Operation) -> _Change:
    value = operation.value
    if operation.verb != Operation.Verb.UNDO:
        verb = VERBS[operation.verb]
        return _Change(lambda jobs: verb.eligible(jobs, value), lambda jobs: verb.run(jobs, value))
    undone = Operation.objects.using(operation._state.db).get(undone_by=operation.pk)
    verb = VERBS[undone.verb]
    item = undone.items.using(operation._state.db).filter(job=OuterRef("pk"))
    is_same_attempt = Exists(item.filter(attempt=OuterRef("attempt")))
    # A key's job that has ended gets its next run in the same row.
    is_same_run = Q(key=None) | Q(enqueued_at__lte=undone.created_at)
    is_last = ~Exists(_changes_since(undone, verb))
    return _Change(
        lambda jobs: verb.untouched(jobs, value).filter(is_same_run, is_same_attempt, is_last),
        lambda jobs: _restore(jobs, verb, item),
    )


def _changes_since(operation: Operation, verb: Verb) -> QuerySet[OperationJob]:
    """Return what later operations have changed of a job's columns that an undo would restore.

    A change that was undone itself does not count.
    """
    database = operation._state.db
    verbs = [name for name, each in VERBS.items() if {*each.restored}.intersection(verb.restored)]
    later = Operation.objects.using(database).filter(pk__gt=operation.pk, verb__in=verbs)
    changed = OperationJob.objects.using(database).filter(job=OuterRef("job"), changed=True)
    undone = Exists(changed.filter(operation__undoes=OuterRef("operation")))
    ids = list(later.values_list("pk", flat=True))
    return OperationJob.objects.using(database).filter(
        ~undone, job=OuterRef("pk"), operation__in=ids, changed=True
    )


def _restore(jobs: JobQuerySet, verb: Verb, item: QuerySet[OperationJob]) -> None:
    columns: dict[str, Any] = {name: Subquery(item.values(name)[:1]) for name in verb.restored}
    if "state" in columns:
        columns["blocked_by"] = None
        # A job that a move held then: nothing would end that time after the move, which has
        # given both columns back, or will.
        was_held = Exists(item.filter(HELD))
        for name in ("run_after", "expires_at"):
            columns[name] = Case(When(was_held, then=F(name)), default=columns[name])
    jobs.update(**columns)
    notify_queues(jobs.db, jobs.ready().order_by().values_list("queue", flat=True).distinct())


# A trial run: the first jobs, then a few, then the rest, as long as they do not fail again.


def next_step(operation: Operation) -> int:
    """Return the number of jobs to process before the results of all so far are judged."""
    if operation.stop_above is not None:
        for step in _first_steps(operation):
            if operation.done < step:
                return step - operation.done
    return operation.total - operation.done


def may_go_on(operation: Operation) -> bool:
    """Return whether a trial run may go on, and stop it if too many of its jobs failed again.

    False while jobs of its first two steps have not ended.
    """
    database = operation._state.db or ""
    items = OperationJob.objects.using(database).filter(operation=operation, changed=True)
    newest = items.order_by("-pk").values_list("job", "state", "failures")[:JUDGED]
    # A retry begins with no failures; a job that waited for its retry keeps those it had.
    before = {job: 0 if state in UNSUCCESSFUL else failures or 0 for job, state, failures in newest}
    # In one statement, so that no job ends in between. A job that is gone was successful.
    rows = Job.objects.using(database).filter(pk__in=list(before))
    results = Counter(
        _result(state, failures > before[job])
        for job, state, failures in rows.values_list("pk", "state", "failures")
    )
    failed, ended = results["failed"], len(before) - results["unfinished"]
    if ended < len(before) and operation.done in _first_steps(operation):
        return False
    if operation.stop_above is not None and failed * 100 > operation.stop_above * ended:
        Operation.objects.using(database).filter(pk=operation.pk).stoppable().update(
            stop_requested_at=Now(),
            problem=f"{failed} of {ended} jobs failed again, more than {operation.stop_above} %.",
        )
    return True


def _result(state: str, has_failed: bool) -> str:
    if state in UNSUCCESSFUL or (state in WAITING and has_failed):
        return "failed"
    return "unfinished" if state in UNFINISHED else "successful"


def _first_steps(operation: Operation) -> tuple[int, int]:
    return FIRST_JOBS, FIRST_JOBS + math.ceil(operation.total * FIRST_SHARE)
