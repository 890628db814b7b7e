"""Run verbs on rows: as an action on a selection, or from a button on one object's page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Model, QuerySet
from django.forms import Form
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _

from ..models.bounded_count import BoundedCount, count
from .actions import Verb
from .base import ReadingAdmin

SHOWN = 10


class OperatingAdmin(ReadingAdmin):
    """Lists with ``verbs`` as actions on any number of rows, for users with the permission."""

    verbs: tuple[Verb, ...] = ()

    def allows(self, request: HttpRequest, verb: Verb) -> bool:
        permitted: Callable[[HttpRequest], bool] = getattr(
            self, f"has_{verb.permission}_permission"
        )
        return self.has_view_permission(request) and permitted(request)

    def get_urls(self) -> list[URLPattern]:
        return [*map(self._path, self.verbs), *super().get_urls()]

    def beside(self, request: HttpRequest, one: Any) -> dict[str, Any]:
        return {**super().beside(request, one), "buttons": self._buttons(request, one)}

    def carry_out(
        self, request: HttpRequest, rows: QuerySet[Any], verb: Verb, one: Model | None = None
    ) -> HttpResponse | None:
        """Run the verb, or ask first. ``one`` is the object on whose page the button was."""
        if not self.allows(request, verb):
            raise PermissionDenied
        target = verb.target(rows)
        total = count(target)
        form = verb.form(request.POST if "confirmed" in request.POST else None)
        if verb.asks(total) and ("confirmed" not in request.POST or (form and not form.is_valid())):
            return self._ask(request, target, total, verb, one, form)
        given = form.cleaned_data if form else {}
        said = _outcome(target, total, verb.act(target, *given.values()), verb, given)
        self.message_user(request, *said)
        if one and said[1] == messages.SUCCESS:
            self.log_change(request, one, said[0])
        return None

    def _operate(self, request: HttpRequest, object_id: str, verb: Verb) -> HttpResponse:
        if not self.allows(request, verb):
            raise PermissionDenied
        one = self.get_object(request, unquote(object_id))
        if one is None:
            raise Http404
        # After a login in between, the request is a GET without the action to run.
        rows = self.model._default_manager.filter(pk=one.pk)
        asked = self.carry_out(request, rows, verb, one) if request.method == "POST" else None
        return asked or HttpResponseRedirect(self._url("change", one.pk))

    def _ask(
        self,
        request: HttpRequest,
        target: QuerySet[Any],
        total: int,
        verb: Verb,
        one: Model | None,
        form: Form | None,
    ) -> HttpResponse:
        eligible = verb.eligible(target)
        number = count(eligible)
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": verb.label if form else _("%(verb)s: are you sure?") % {"verb": verb.label},
            "opts": self.opts,
            "media": self.media,
            "verb": verb,
            "form": form,
            "what": _named(target, number),
            "number": number,
            "left": _left(total, number),
            "one": one,
            "examples": eligible[:SHOWN],
            "more": number > SHOWN,
            "filters": [] if one else _filters(request),
            "fields": _fields(request),
            "back": self._url("change", one.pk) if one else request.get_full_path(),
        }
        return TemplateResponse(request, "admin/dbqueue/confirmation.html", context)

    def _buttons(self, request: HttpRequest, one: Model) -> list[dict[str, Any]]:
        """Return buttons for the verbs that the user may run and that would change a row."""
        rows = self.model._default_manager.filter(pk=one.pk)
        return [
            {"verb": verb, "url": self._url(verb.name, one.pk)}
            for verb in self.verbs
            if self.allows(request, verb) and verb.eligible(verb.target(rows)).exists()
        ]

    def _path(self, verb: Verb) -> URLPattern:
        view = self.admin_site.admin_view(partial(self._operate, verb=verb))
        return path(
            f"<path:object_id>/{verb.name}/",
            view,
            name=f"dbqueue_{self.opts.model_name}_{verb.name}",
        )

    def _url(self, name: str, pk: Any) -> str:
        return reverse(
            f"admin:dbqueue_{self.opts.model_name}_{name}",
            args=[quote(pk)],
            current_app=self.admin_site.name,
        )


def _named(rows: QuerySet[Any], number: int) -> str:
    opts = rows.model._meta
    return f"{number} {opts.verbose_name if number == 1 else opts.verbose_name_plural}"


def _outcome(
    target: QuerySet[Any], total: int, changed: int, verb: Verb, given: dict[str, Any]
) -> tuple[str, int]:
    if not changed:
        return f"{_('Nothing was changed.')} {_left(total, changed)}".strip(), messages.WARNING
    said = _("%(done)s: %(rows)s.") % {
        "rows": _named(target, changed),
        "done": verb.done % given if given else verb.done,
    }
    return f"{said} {_left(total, changed)}".strip(), messages.SUCCESS


def _left(total: int, changed: int) -> str:
    if isinstance(total, BoundedCount):
        return _("All others are left as they are.")
    left = total - changed
    return _("Left as they are: %(count)s.") % {"count": left} if left > 0 else ""


def _filters(request: HttpRequest) -> list[tuple[str, str]]:
    across = request.POST.get("select_across") == "1"
    return [
        (name, str(value))
        for name, value in request.GET.items()
        if across and name not in ("p", "o", "e")
    ]


def _fields(request: HttpRequest) -> list[tuple[str, str]]:
    """Return the fields that selected the rows, to be sent again with the confirmation."""
    names = ("action", "select_across", ACTION_CHECKBOX_NAME)
    return [(name, str(value)) for name in names for value in request.POST.getlist(name)]
