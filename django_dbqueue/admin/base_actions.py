"""Operator actions: in the list, on a selection of rows, and as buttons on the page of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.forms import Field, Form
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _

from ..models.bounded_count import BoundedCount, count
from .base import ReadOnlyAdmin, Row, Rows, Text

if TYPE_CHECKING:
    from django.contrib.admin.options import Action as AdminAction
    from django.contrib.admin.options import ActionLocation

EXAMPLES = 10
# Parameters of a list that are not filters.
PAGING = ("p", "o", "e", "order")


def all_of(rows: Rows) -> Rows:
    return rows


@dataclass(frozen=True, kw_only=True)
class Action:
    """An operator action. It is also the callable that Django's admin expects in ``actions``.

    name: its name in the list of actions, and the last part of its button's URL.
    permission: codename of the required permission.
    label: text of its button.
    short_description: text in the list of actions. Django fills in the model's names.
    effect: explanation on the confirmation page.
    done: text of its result, before the number of rows: "Discarded: 3 jobs." The text may contain
        the value, as ``%(value)s``.
    eligible: filters the rows that the action would change.
    run: changes the rows and returns their number; with ``field``: ``run(rows, value)``.
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
    run: Callable[..., int]
    target: Callable[[Any], Rows] = all_of
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
        """Return the form for the value, bound to ``data`` if given; None without ``field``."""
        if self.field is None:
            return None
        form = type("ValueForm", (Form,), {"value": self.field})
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
        return {**super().page_context(request, row), "buttons": self._buttons(request, row)}

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
        values = form.cleaned_data if form else {}
        changed = action.run(target, *values.values())
        message = _result(target, total, changed, action, values)
        self.message_user(request, message, messages.SUCCESS if changed else messages.WARNING)
        if one and changed:
            self.log_change(request, one, message)
        return None

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
        context = {
            **self.admin_site.each_context(request),
            "title": action.label if form else question,
            "opts": self.opts,
            "media": self.media,
            "action": action,
            "form": form,
            "affected": _counted(target, number),
            "number": number,
            "unchanged": _unchanged(total, number),
            "one": one,
            "examples": eligible[:EXAMPLES],
            "has_more": number > EXAMPLES,
            "filters": [] if one else _filters(request),
            "fields": _fields(request),
            "back": self._url("change", one.pk) if one else request.get_full_path(),
        }
        return TemplateResponse(request, "admin/dbqueue/confirmation.html", context)

    def _buttons(self, request: HttpRequest, one: Model) -> list[dict[str, object]]:
        """Return buttons for the actions that the user may run and that would change a row."""
        return [
            {"action": action, "url": self._url(action.name, one.pk)}
            for action in self.actions
            if self.may_run(request, action)
            and action.eligible(action.target(self._row(one))).exists()
        ]

    def _row(self, one: Model) -> Rows:
        rows: Rows = self.model._default_manager.filter(pk=one.pk)
        return rows

    def _path(self, action: Action) -> URLPattern:
        view = self.admin_site.admin_view(partial(self._press, action=action))
        name = f"dbqueue_{self.opts.model_name}_{action.name}"
        return path(f"<path:object_id>/{action.name}/", view, name=name)

    def _url(self, name: str, pk: UUID | int | str) -> str:
        return reverse(
            f"admin:dbqueue_{self.opts.model_name}_{name}",
            args=[quote(pk)],
            current_app=self.admin_site.name,
        )


def _counted(rows: Rows, number: int) -> str:
    opts = rows.model._meta
    return f"{number} {opts.verbose_name if number == 1 else opts.verbose_name_plural}"


def _result(
    target: Rows, total: int, changed: int, action: Action, values: dict[str, object]
) -> str:
    if changed:
        done = action.done % values if values else action.done
        text = _("%(done)s: %(rows)s.") % {"done": done, "rows": _counted(target, changed)}
    else:
        text = _("Nothing was changed.")
    return f"{text} {_unchanged(total, changed)}".strip()


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
