from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db import IntegrityError
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..core.progress_value import ProgressValue
from ..models import Job, Operation, OperationJob
from ..models.expressions import Now
from . import columns, formatting
from .actions import CONTINUE, STOP_OPERATION, UNDO
from .base import Fields, Rows
from .base_actions import Action, ActionAdmin
from .filters import Filter, OperationStateFilter
from .operating import operation_address, undo
from .progress import bar

# Number of jobs on the page of an operation.
SHOWN = 50


@admin.display(description=gettext_lazy("operation"))
def what(operation: Operation) -> str:
    """Return what is done, and to what: "Move to another queue: slow"."""
    text = operation.get_verb_display()
    if operation.undoes_id:
        text = f"{text} #{operation.undoes_id}"
    elif operation.value:
        # The value may be a negative number, or a name in another script.
        text = format_html("{}: <bdi>{}</bdi>", text, operation.value)
    return format_html(
        "{}<br>{}", text, formatting.quiet(operation.scope[:200] or f"#{operation.pk}")
    )


@admin.display(description=gettext_lazy("state"))
def state(operation: Any) -> str:
    if operation.finished_at:
        if operation.problem:
            return formatting.badge(_("Stopped"), "✕", "bad")
        if operation.done < operation.total:
            return formatting.badge(_("Stopped"), "‖", "waits")
        return formatting.badge(_("Done"), "✓", "good")
    if operation.stop_requested_at:
        return formatting.badge(_("Stopping"), "‖", "waits")
    if operation.is_stalled:
        return formatting.badge(_("Its job has ended"), "✕", "bad")
    if operation.is_running:
        return formatting.badge(_("Running"), "▸", "runs")
    return formatting.badge(_("Waiting for a worker"), "○", "waits")


@admin.display(description=gettext_lazy("progress"))
def progress(operation: Any) -> str:
    value = ProgressValue(operation.done, operation.total)
    unchanged = operation.done - operation.changed
    left = format_html("<br>{}", formatting.quiet(_("Unchanged: %d.") % unchanged))
    return format_html("{}{}", bar(value) if operation.total else "0", left if unchanged else "")


@admin.display(description=gettext_lazy("state"))
def state_and_progress(operation: Any) -> str:
    undone = getattr(operation, "undone_by", None)
    return format_html(
        "{} {}<br>{}", state(operation), undone_by(operation) if undone else "", progress(operation)
    )


@admin.display(description=gettext_lazy("undone by"))
def undone_by(operation: Any) -> str:
    undone = operation.undone_by
    return formatting.link("operation", undone.pk, _("undone by #%d") % undone.pk)


@admin.display(description=gettext_lazy("undoes"))
def undoes(operation: Any) -> str:
    undone = operation.undoes
    return formatting.link("operation", undone.pk, undone)


@admin.display(description=gettext_lazy("duration, rate"))
def pace(operation: Any) -> str:
    """Return how long the operation took or has taken, and its jobs per second."""
    if operation.rows:
        return "–"
    lasted = operation.lasted(columns.seen_at(operation))
    rate = operation.done / max(lasted.total_seconds(), 0.001)
    text = _("%s jobs/s") % number_format(rate, 1 if rate < 10 else 0)
    return format_html("{}<br>{}", formatting.duration(lasted), formatting.quiet(text))


@admin.display(description=gettext_lazy("by"))
def actor_and_reason(operation: Operation) -> str:
    return format_html("{}<br>{}", operation.actor, formatting.quiet(operation.reason))


@admin.display(description=gettext_lazy("job that runs it"))
def runner(operation: Any) -> str:
    return formatting.link("job", operation.job, formatting.short_id(operation.job))


@admin.display(description=gettext_lazy("limits"))
def limits(operation: Operation) -> str:
    found = []
    if operation.rate:
        found.append(_("%d jobs per second") % operation.rate)
    if operation.stop_above is not None:
        found.append(_("stops if more than %d %% of its jobs fail again") % operation.stop_above)
    return ", ".join(found)


class VerbFilter(Filter):
    title, parameter_name, column = gettext_lazy("action"), "verb", "verb"

    def options(self, model: object) -> Any:
        return Operation.Verb.choices


@admin.register(Operation)
class OperationAdmin(ActionAdmin):
    hint = gettext_lazy(
        "What operators did, newest first. Operations on very many jobs run as jobs, and most "
        "can be undone."
    )
    actions = (UNDO, STOP_OPERATION, CONTINUE)
    list_display = (
        what,
        state_and_progress,
        actor_and_reason,
        columns.age("created_at", gettext_lazy("started")),
        pace,
    )
    list_filter = (OperationStateFilter, VerbFilter)
    list_per_page = 25
    ordering = ("-pk",)
    search_fields = ("actor", "reason", "scope")
    times = (
        columns.time("created_at", gettext_lazy("started")),
        columns.time("finished_at", gettext_lazy("finished")),
    )

    def get_queryset(self, request: HttpRequest) -> Rows:
        rows: Any = super().get_queryset(request)
        return rows.select_related("undone_by", "undoes").with_job().annotate(seen_at=Now())  # type: ignore[no-any-return]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Fields:
        if obj is None:
            return ()
        rows = [
            (what, state, progress),
            ("actor", *["reason"] * bool(obj.reason)),
            (*self.times[: 2 if obj.finished_at else 1], pace),
            (
                *[limits] * bool(obj.rate or obj.stop_above is not None),
                *[runner] * bool(obj.job),
                *[undoes] * bool(obj.undoes),
                *[undone_by] * hasattr(obj, "undone_by"),
            ),
            ("problem",) * bool(obj.problem),
        ]
        return ((None, {"fields": tuple(row for row in rows if row)}),)

    def run_action(
        self, request: HttpRequest, rows: Rows, action: Action, one: Model | None = None
    ) -> HttpResponse | None:
        if (
            action is not UNDO
            or "confirmed" not in request.POST
            or not self.may_run(request, action)
        ):
            return super().run_action(request, rows, action, one)
        undone = {operation: _undo(request, operation) for operation in action.eligible(rows)}
        done = [each for each in undone.values() if each]
        if not done:
            self.message_user(request, _("Nothing was changed."), messages.WARNING)
            return None
        number = sum(each.changed for each in done)
        missed = sum(each.done - each.changed for each in done)
        text = ngettext("Undone: %d job.", "Undone: %d jobs.", number) % number
        if all(each.rows for each in done):
            text = ngettext("Undone: %d change.", "Undone: %d changes.", number) % number
        if missed:
            text = f"{text} " + _("Unchanged, as they have started or changed since: %d.") % missed
        if any(not each.finished_at for each in done):
            text = _("Started: %s.") % ", ".join(map(str, done))
        self.message_user(request, text, messages.SUCCESS)
        self._log(request, [operation for operation, each in undone.items() if each], text)
        return HttpResponseRedirect(operation_address(done[0])) if len(done) == 1 else None

    def page_context(self, request: HttpRequest, row: Operation) -> dict[str, object]:
        may_view_jobs = request.user.has_perm("dbqueue.view_job")
        return {
            **super().page_context(request, row),
            "changes": _changes_of(row),
            "jobs": _jobs_of(row) if may_view_jobs and not row.rows else [],
            "may_view_jobs": may_view_jobs,
            "has_more": row.total > SHOWN,
        }


def _undo(request: HttpRequest, operation: Operation) -> Operation | None:
    """Undo an operation, unless another request was faster."""
    try:
        return undo(operation, request.user)
    except IntegrityError:
        if not Operation.objects.filter(undoes=operation).exists():
            raise
        return None


def _changes_of(operation: Operation) -> list[dict[str, str]]:
    """Return the rows that an operation has changed, and what they were before and after."""
    rows = operation.rows or {}
    changes = list(rows.get("changes", {}).items())[:SHOWN]
    return [
        {
            "row": formatting.link(rows["table"], pk, pk),
            "before": formatting.json_text(before),
            "after": formatting.json_text(after),
        }
        for pk, (before, after) in changes
    ]


def _jobs_of(operation: Operation) -> list[dict[str, object]]:
    """Return the first jobs of an operation: what they were before, and what they are now."""
    items = list(OperationJob.objects.filter(operation=operation).order_by("pk")[:SHOWN])
    found = Job.objects.defer(*columns.NOT_LISTED).in_bulk([item.job for item in items])
    return [
        {
            "job": columns.linked_job(found[item.job])
            if item.job in found
            else formatting.short_id(item.job),
            "before": _state(item.state) if item.state else "–",
            "changed": {None: _("not yet"), True: _("yes"), False: _("no")}[item.changed],
            "now": columns.state(found[item.job]) if item.job in found else _("deleted"),
        }
        for item in items
    ]


def _state(value: str) -> str:
    return formatting.state(Job.State(value).label, value)
