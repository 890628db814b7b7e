"""Operator actions: in the list, on a selection of rows, and as buttons on the page of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from django.apps import apps
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Exists, Model
from django.forms import Field, Form
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _

from ..models.bounded_count import BoundedCount, count
from . import formatting
from .addresses import page_address
from .backend_choice import PARAMETER, on_chosen_backend, with_alias, with_backend
from .base import ReadOnlyAdmin, Row, Rows, Text
from .operating import change_rows, details, operation_address, start, with_link

if TYPE_CHECKING:
    from django.contrib.admin.options import Action as AdminAction
    from django.contrib.admin.options import ActionLocation

    from ..models.job import JobQuerySet

EXAMPLES = 10
# Number of selected rows up to which each has an entry in its history.
MOST_LOGGED = 100
# Parameters of a list that are not filters.
PAGING = ("p", "o", "e", "order", PARAMETER)


def all_of(rows: Rows) -> Rows:
    return rows


def no_warning(rows: Rows) -> str:
    return ""


def no_change(rows: Rows) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Action:
    """An operator action. It is also the callable that Django's admin expects in ``actions``.

    name: its name in the list of actions, and the last part of its button's URL.
    permission: codename of the required permission.
    label: text of its button.
    short_description: text in the list of actions. Django fills in the model's names.
    effect: explanation on the confirmation page.
    warning: returns a further sentence for these eligible rows; empty if there is nothing to say.
    done: text of its result, before the number of rows: "Discarded: 3 jobs." The text may contain
        the value, as ``%(value)s``.
    eligible: filters the rows that the action would change.
    run: changes the rows and returns their number; with ``field``: ``run(rows, value)``.
    recorded: the verb under which the change is recorded as an operation; empty: it is not.
    verb: for jobs, instead of both: the verb of the operation that changes them.
    in_steps: a few jobs first; the others only if not too many of those fail again.
    target: the affected rows for the selected ones. The actions of a failure affect its jobs.
    confirm_from: number of rows from which the action needs a confirmation; None: never.
    field: value that the action requires. It then always needs a confirmation.
    """

    name: str
    permission: str
    label: Text
    short_description: Text
    effect: Text
    done: Text
    eligible: Callable[[Any], Rows]
    run: Callable[..., int] = no_change
    recorded: str = ""
    verb: str = ""
    in_steps: bool = False
    target: Callable[[Any], Rows] = all_of
    warning: Callable[[Any], str] = no_warning
    confirm_from: int | None = None
    field: Field | None = None
    # Templates read its fields, and must not call it.
    do_not_call_in_templates = True

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(
        self, model_admin: ActionAdmin, request: HttpRequest, rows: Rows
    ) -> HttpResponse | None:
        return model_admin.run_action(request, rows, self)

    def needs_confirmation(self, number: int) -> bool:
        is_many = self.confirm_from is not None and number >= self.confirm_from
        return self.field is not None or is_many

    def form(self, data: QueryDict | None = None) -> Form | None:
        """Return the form for the value and the details of an operation; None without any."""
        fields = {"value": self.field} if self.field else {}
        if self.verb or (self.recorded and self.field):
            fields |= details(self.verb, in_steps=self.in_steps)
        if not fields:
            return None
        form = type("ActionForm", (Form,), fields)
        return form(data)  # type: ignore[no-any-return]


class ActionAdmin(ReadOnlyAdmin):
    """Pages with ``actions``, for users with their permissions."""

    actions: tuple[Action, ...] = ()

    def may_run(self, request: HttpRequest, action: Action) -> bool:
        permission = f"dbqueue.{action.permission}"
        return self.has_view_permission(request) and request.user.has_perm(permission)

    def get_actions(
        self, request: HttpRequest, action_location: ActionLocation | None = None
    ) -> dict[str, AdminAction | None]:
        """Return the actions that the user may run."""
        # Django passes ``action_location`` since version 6.1.
        given = {} if action_location is None else {"action_location": action_location}
        denied = {action.name for action in self.actions if not self.may_run(request, action)}
        found = super().get_actions(request, **given)
        return {name: each for name, each in found.items() if name not in denied}

    def get_urls(self) -> list[URLPattern]:
        return [*map(self._path, self.actions), *super().get_urls()]

    def page_context(self, request: HttpRequest, row: Row) -> dict[str, object]:
        return {
            **super().page_context(request, row),
            "buttons": self._buttons(request, row),
            "is_grappelli": apps.is_installed("grappelli"),
        }

    def run_action(
        self, request: HttpRequest, rows: Rows, action: Action, one: Model | None = None
    ) -> HttpResponse | None:
        """Run the action, or ask for confirmation. ``one`` is the row whose button was pressed."""
        if not self.may_run(request, action):
            raise PermissionDenied
        target = action.target(rows)
        total = count(target)
        is_confirmed = "confirmed" in request.POST
        form = action.form(request.POST if is_confirmed else None)
        is_complete = is_confirmed and (form is None or form.is_valid())
        if action.needs_confirmation(total) and not is_complete:
            return self._confirmation(request, target, total, action, one, form)
        values = form.cleaned_data if form and is_complete else {}
        logged = [one] if one else _to_log(rows, action)
        if action.verb:
            return self._operate(request, target, total, action, values, logged)
        run = partial(action.run, target, *([values["value"]] if action.field else []))
        if action.recorded:
            scope = _scope(request, logged)
            made = change_rows(target, action.recorded, run, values, scope, request.user)
            changed = made.changed if made else 0
        else:
            made, changed = None, run()
        message = with_alias(_result(target, total, changed, action, values))
        is_undoable = made and made.rows.get("changes")
        shown = is_undoable and request.user.has_perm("dbqueue.view_operation")
        self.message_user(
            request,
            with_link(message, made) if made and shown else message,
            messages.SUCCESS if changed else messages.WARNING,
        )
        if changed:
            self._log(request, logged, message)
        return None

    def _operate(
        self,
        request: HttpRequest,
        target: Rows,
        total: int,
        action: Action,
        values: dict[str, Any],
        logged: list[Model],
    ) -> HttpResponse | None:
        """Change jobs by an operation. Redirect to its page if a job of the queue runs it."""
        scope = _scope(request, logged)
        operation = start(action.verb, cast("JobQuerySet", target), values, scope, request.user)
        if not operation.finished_at:
            message = with_alias(
                _("Started: %(operation)s, for %(rows)s.")
                % {"operation": operation, "rows": _counted(target, operation.total)}
            )
            self.message_user(request, message, messages.SUCCESS)
            self._log(request, logged, message)
            may_view = request.user.has_perm("dbqueue.view_operation")
            return HttpResponseRedirect(operation_address(operation)) if may_view else None
        message = with_alias(_result(target, total, operation.changed, action, values))
        shown = operation.changed and request.user.has_perm("dbqueue.view_operation")
        self.message_user(
            request,
            with_link(message, operation) if shown else message,
            messages.SUCCESS if operation.changed else messages.WARNING,
        )
        if operation.changed:
            self._log(request, logged, message)
        return None

    def _log(self, request: HttpRequest, rows: list[Model], message: str) -> None:
        """Log the change of each row; of very many, the change and the filters of their list."""
        user: Any = request.user
        if len(rows) <= MOST_LOGGED:
            LogEntry.objects.log_actions(user.pk, rows, CHANGE, message)
            return
        filters = " ".join(f"{name}={value}" for name, value in _filters(request))
        LogEntry.objects.create(
            user_id=user.pk,
            content_type=get_content_type_for_model(self.model),
            object_repr=filters[:200] or str(self.opts.verbose_name_plural),
            action_flag=CHANGE,
            change_message=message,
        )

    def _press(self, request: HttpRequest, object_id: str, action: Action) -> HttpResponse:
        if not self.may_run(request, action):
            raise PermissionDenied
        one = self.get_object(request, unquote(object_id))
        if one is None:
            raise Http404
        answer = None
        # After a login in between, the request is a GET, which must not run the action.
        if request.method == "POST":
            answer = self.run_action(request, self._row(one), action, one)
        return answer or HttpResponseRedirect(self._url("change", one.pk))

    def _confirmation(
        self,
        request: HttpRequest,
        target: Rows,
        total: int,
        action: Action,
        one: Model | None,
        form: Form | None,
    ) -> HttpResponse:
        eligible = action.eligible(target)
        number = count(eligible)
        request.current_app = self.admin_site.name
        question = _("%(action)s: are you sure?") % {"action": action.label}
        # The page is of queues or failures, and the action of their jobs.
        may_view = eligible.model is self.model or request.user.has_perm("dbqueue.view_job")
        context = {
            **self.admin_site.each_context(request),
            "title": action.label if action.field else question,
            "opts": self.opts,
            "media": self.media,
            "action": action,
            "form": form,
            "affected": _counted(target, number),
            "number": number,
            "unchanged": _unchanged(total, number),
            "warning": action.warning(eligible),
            "one": one,
            "examples": eligible[:EXAMPLES] if may_view else (),
            "has_more": number > EXAMPLES,
            "filters": [] if one else _filters(request),
            "fields": _fields(request),
            "back": self._url("change", one.pk) if one else request.get_full_path(),
        }
        return TemplateResponse(request, "admin/dbqueue/confirmation.html", context)

    def offered(self, one: Row) -> tuple[Action, ...]:
        """Return the actions that the page of a row may offer."""
        return self.actions

    def _buttons(self, request: HttpRequest, one: Model) -> list[dict[str, object]]:
        """Return buttons for the actions that the user may run and that would change a row."""
        allowed = [action for action in self.offered(one) if self.may_run(request, action)]
        row = self._row(one)
        # In one statement for all of them.
        would = [Exists(action.eligible(action.target(row)).order_by()) for action in allowed]
        found = row.order_by().values_list(*would).first() if would else None
        return [
            {"action": action, "url": self._url(action.name, one.pk)}
            for action, is_eligible in zip(allowed, found or (), strict=False)
            if is_eligible
        ]

    def _row(self, one: Model) -> Rows:
        rows: Rows = self.model._default_manager.filter(pk=one.pk)
        return rows

    def _path(self, action: Action) -> URLPattern:
        view = on_chosen_backend(
            self.admin_site.admin_view(partial(self._press, action=action)), self.admin_site
        )
        name = f"dbqueue_{self.opts.model_name}_{action.name}"
        return path(f"<path:object_id>/{action.name}/", view, name=name)

    def _url(self, name: str, pk: UUID | int | str) -> str:
        return with_backend(page_address(f"{self.opts.model_name}_{name}", pk))


def _scope(request: HttpRequest, logged: list[Model]) -> str:
    """Return what an operation was applied to: the filters of the list, or the first rows."""
    filters = " ".join(f"{name}={value}" for name, value in _filters(request))
    return filters or ", ".join(map(str, logged[:EXAMPLES])) + ", …" * (len(logged) > EXAMPLES)


def _to_log(rows: Rows, action: Action) -> list[Model]:
    """Return the rows that the action changes; of very many, as many as show that."""
    return list((action.eligible(rows) if action.target is all_of else rows)[: MOST_LOGGED + 1])


def _counted(rows: Rows, number: int) -> str:
    opts = rows.model._meta
    name = opts.verbose_name if number == 1 else opts.verbose_name_plural
    # Translators: the number of rows, and their name in the singular for 1, else in the plural.
    # Where nouns have more forms, write it as "%(name)s: %(number)s".
    return _("%(number)s %(name)s") % {"number": number, "name": name}


def _result(
    target: Rows, total: int, changed: int, action: Action, values: dict[str, object]
) -> str:
    if changed:
        done = action.done % _shown(values) if action.field else action.done
        text = _("%(done)s: %(rows)s.") % {"done": done, "rows": _counted(target, changed)}
    else:
        text = _("Nothing was changed.")
    return f"{text} {_unchanged(total, changed)}".strip()


def _shown(values: dict[str, object]) -> dict[str, object]:
    """Return the values as their text. An optional one may be empty."""
    return {
        name: formatting.plain_number(value)
        if isinstance(value, int)
        else _("none")
        if value is None
        else value
        for name, value in values.items()
    }


def _unchanged(total: int, changed: int) -> str:
    if isinstance(total, BoundedCount):
        return _("All others are unchanged.")
    left = total - changed
    return _("Unchanged: %(count)s.") % {"count": left} if left > 0 else ""


def _filters(request: HttpRequest) -> list[tuple[str, str]]:
    """Return the list's filters, if the action applies to all rows that match them."""
    if request.POST.get("select_across") != "1":
        return []
    return [(name, str(value)) for name, value in request.GET.items() if name not in PAGING]


def _fields(request: HttpRequest) -> list[tuple[str, str]]:
    """Return the fields that selected the rows, to be sent again with the confirmation."""
    names = ("action", "select_across", ACTION_CHECKBOX_NAME)
    return [(name, str(value)) for name in names for value in request.POST.getlist(name)]
