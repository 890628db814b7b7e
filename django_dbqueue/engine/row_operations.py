"""Operations on other rows than jobs: recorded with what the rows were before, and undone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.db.models import Model, QuerySet
from django.utils.dateparse import parse_datetime

from ..core.notify import notify_queues
from ..core.transactions import writing
from ..models import Operation, Queue, TaskState
from ..models.expressions import Now
from ..models.queue import WOKEN

Rows = QuerySet[Any]
# Columns that an undo restores, those that belong together in one group. The actions on other
# tables have an action that reverts them.
PAUSE = ("paused_at", "resume_at")
RESTORED: dict[type[Model], tuple[tuple[str, ...], ...]] = {
    Queue: (PAUSE, ("limit",)),
    TaskState: (PAUSE,),
}
_TABLES = {str(model._meta.model_name): model for model in RESTORED}


def record(rows: Rows, verb: str, run: Callable[[], int], **columns: Any) -> Operation | None:
    """Change rows by ``run``, which returns their number, and record that as an operation.

    Return None if nothing was changed. ``columns`` are further ones of Operation.
    """
    if rows.model not in RESTORED:
        return _recorded(rows, verb, run(), {"table": rows.model._meta.model_name}, columns)
    with writing(rows.db):
        before = _values(rows.select_for_update())
        number = run()
        after = _values(rows.model._base_manager.using(rows.db).filter(pk__in=list(before)))
        groups = RESTORED[rows.model]
        changes = {pk: _difference(groups, before[pk], after[pk]) for pk in before if pk in after}
        kept = {
            "table": rows.model._meta.model_name,
            "changes": {str(pk): each for pk, each in changes.items() if each},
        }
        return _recorded(rows, verb, number, kept, columns)


def undo(operation: Operation, **columns: Any) -> Operation:
    """Give rows back the columns that an operation changed, if no one has changed these since.

    Raises IntegrityError if the operation is undone already.
    """
    database, model = operation._state.db, _TABLES[operation.rows["table"]]
    changes = operation.rows["changes"]
    with writing(database):
        operations = Operation.objects.using(database)
        undoing = operations.insert(
            Operation(
                verb=Operation.Verb.UNDO,
                value=operation.value,
                undoes_id=operation.pk,
                rows={"table": operation.rows["table"]},
                total=len(changes),
                done=len(changes),
                finished_at=Now(),
                **columns,
            )
        )
        table = model._base_manager.using(database)
        for row in table.filter(pk__in=list(changes)).select_for_update():
            before, after = changes[str(row.pk)]
            if all(_stored(getattr(row, name)) == value for name, value in after.items()):
                restored = {name: _loaded(value) for name, value in before.items()}
                undoing.changed += table.filter(pk=row.pk).update(**restored)
        if not undoing.changed:
            undoing.undoes = None  # The operation can be undone once this has an effect.
        operations.store(undoing, "changed", "undoes")
        if model is Queue:  # Workers wait for a notification of a queue that is not paused.
            notify_queues(str(database), list(changes)[:WOKEN])
    undoing.refresh_from_db(using=database)
    return undoing


def _recorded(
    rows: Rows, verb: str, number: int, kept: dict[str, Any], columns: dict[str, Any]
) -> Operation | None:
    if not number:
        return None
    operation = Operation(
        verb=verb, rows=kept, total=number, done=number, changed=number, **columns
    )
    operation.finished_at = Now()
    return Operation.objects.using(rows.db).insert(operation)


def _values(rows: Rows) -> dict[Any, dict[str, Any]]:
    names = [name for group in RESTORED[rows.model] for name in group]
    return {row.pk: {name: _stored(getattr(row, name)) for name in names} for row in rows}


def _difference(
    groups: tuple[tuple[str, ...], ...], before: dict[str, Any], after: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the values before and after of the groups that differ; empty if none does."""
    differ = [group for group in groups if any(before[name] != after[name] for name in group)]
    names = [name for group in differ for name in group]
    return [{name: each[name] for name in names} for each in (before, after)] if names else []


def _stored(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _loaded(value: Any) -> Any:
    return parse_datetime(value) if isinstance(value, str) else value
