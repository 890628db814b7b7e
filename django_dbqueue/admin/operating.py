"""Start operations from the pages: their form fields, their user, and links to their pages."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from django import forms
from django.db.models import QuerySet
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..backend import DatabaseBackend
from ..engine import row_operations
from ..models import Operation
from ..models.job import JobQuerySet
from .addresses import page_address
from .backend_choice import with_backend
from .config import backend

Rows = QuerySet[Any]
_RATED = (Operation.Verb.RETRY, Operation.Verb.RETRY_NOW, Operation.Verb.RUN_NOW)


def details(verb: str, *, in_steps: bool) -> dict[str, forms.Field]:
    """Return the form fields for an operation."""
    fields: dict[str, forms.Field] = {
        "reason": forms.CharField(
            label=gettext_lazy("Reason"),
            max_length=200,
            required=False,
            help_text=gettext_lazy("Optional. The list of operations shows it."),
        )
    }
    if verb in _RATED:
        fields["rate"] = forms.IntegerField(
            label=gettext_lazy("Jobs per second"),
            min_value=1,
            max_value=100_000,
            required=False,
            help_text=gettext_lazy("Empty: all as soon as possible."),
        )
    if in_steps:
        fields["stop_above"] = forms.IntegerField(
            label=gettext_lazy("Stop above (percent)"),
            min_value=0,
            max_value=99,
            initial=10,
            help_text=gettext_lazy("No more jobs are retried if more than this share fails again."),
        )
    return fields


def start(verb: str, jobs: JobQuerySet, values: dict[str, Any], scope: str, user: Any) -> Operation:
    """Start an operation on jobs, with the values of its form."""
    return _operations().start(  # type: ignore[no-any-return]
        jobs,
        verb,
        values.get("value", ""),
        backend(),
        scope=scope,
        actor=_name(user),
        reason=values.get("reason", ""),
        rate=values.get("rate"),
        stop_above=values.get("stop_above"),
    )


def change_rows(
    rows: Rows, verb: str, run: Callable[[], int], values: dict[str, Any], scope: str, user: Any
) -> Operation | None:
    """Change rows other than jobs, and record it as an operation; None if nothing was changed."""
    value = values.get("value")
    return row_operations.record(
        rows,
        verb,
        run,
        value="" if value is None else str(value)[:100],
        scope=scope,
        actor=_name(user),
        reason=values.get("reason", ""),
    )


def undo(operation: Operation, user: Any) -> Operation:
    by = {"scope": str(operation), "actor": _name(user)}
    if operation.rows:
        return row_operations.undo(operation, **by)
    undoing: Operation = _operations().undo(operation, backend(), **by)
    return undoing


def go_on(rows: QuerySet[Operation]) -> int:
    """Have new jobs go on with operations whose jobs have ended. Return their number."""
    stalled = list(rows)
    for operation in stalled:
        _operations().go_on(operation, cast("DatabaseBackend", backend()))
    return len(stalled)


def _name(user: Any) -> str:
    return str(user.get_username())[:150]


def _operations() -> ModuleType:
    # Its task needs the backend: with wrong settings, the admin could not even be imported.
    from ..contrib import operations

    return operations


def operation_address(operation: Operation) -> str:
    return with_backend(page_address("operation_change", operation.pk))


def with_link(message: str, operation: Operation) -> str:
    """Return a message with a link to the page on which the operation can be undone."""
    return format_html(
        '{} <a href="{}">{}</a>', message, operation_address(operation), _("Details and undo")
    )
