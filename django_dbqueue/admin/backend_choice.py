"""Choice of a backend, and so of its database, on the pages.

Each address names its backend, so that a page that was opened before another choice still acts on
the rows that it shows. The session only keeps the choice for lists whose address names none: one id
may be that of a row in each database.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from django.contrib.admin import AdminSite
from django.http import Http404, HttpRequest, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from ..core.chosen_backend import chosen_backend
from .addresses import current_site
from .config import choices

PARAMETER = "backend"
KEPT = "dbqueue_backend"

View = Callable[..., Any]


def on_chosen_backend(view: View, site: AdminSite) -> View:
    """Have a view read and write the database of the chosen backend, and link to its own site."""

    @wraps(view)
    def on_chosen(request: HttpRequest, *args: object, **kwargs: object) -> Any:
        # Not reset: the response may be rendered later.
        current_site.set(site.name)
        offered = choices()
        if not offered or not site.has_permission(request):
            return view(request, *args, **kwargs)
        named, kept = _named(request), request.session.get(KEPT)
        if not named and "object_id" in kwargs:
            return _question(request, site, offered)
        if not named and request.method == "GET":
            alias = kept if kept in offered else offered[0]
            return HttpResponseRedirect(_with(request.get_full_path(), alias))
        if named and named not in offered:
            text = _("There is no backend %(name)r to choose. Choose from %(names)s.")
            raise Http404(text % {"name": named, "names": ", ".join(offered)})
        if named and named != kept:
            request.session[KEPT] = named
        return _call(view, named or offered[0], request, *args, **kwargs)

    return on_chosen


def with_backend(address: str) -> str:
    """Return the address of a page for the backend of the present page."""
    alias = chosen_backend.get()
    return _with(address, alias) if alias else address


def with_alias(text: object) -> str:
    """Return a text with the alias of the chosen backend, if there is a choice."""
    alias = chosen_backend.get()
    return f"{text} ({alias})" if alias else str(text)


def offered_backends() -> list[dict[str, object]]:
    """Return the backends for the template of a list; empty if there is no choice."""
    chosen = chosen_backend.get()
    return [
        {"alias": alias, "query": urlencode({PARAMETER: alias}), "is_chosen": alias == chosen}
        for alias in (choices() if chosen else [])
    ]


def _call(view: View, alias: str, *args: Any, **kwargs: Any) -> Any:
    token = chosen_backend.set(alias)
    try:
        response = view(*args, **kwargs)
        if not isinstance(response, TemplateResponse):
            return response
        if response.context_data and "title" in response.context_data:
            response.context_data["title"] = with_alias(response.context_data["title"])
        # Templates run queries too.
        return response.render()
    finally:
        chosen_backend.reset(token)


def _question(request: HttpRequest, site: AdminSite, offered: list[str]) -> TemplateResponse:
    """Return a page that asks for the backend of a row, with its address on each of them."""
    request.current_app = site.name
    address = request.get_full_path()
    context = {
        **site.each_context(request),
        "title": _("On which backend?"),
        "addresses": [(alias, _with(address, alias)) for alias in offered],
    }
    return TemplateResponse(request, "admin/dbqueue/backend_question.html", context, status=300)


def _named(request: HttpRequest) -> str | None:
    """Return the backend that an address names, or that of the list that led to it."""
    before = QueryDict(request.GET.get("_changelist_filters", ""))
    return request.GET.get(PARAMETER) or before.get(PARAMETER)


def _with(address: str, alias: str) -> str:
    parts = urlsplit(address)
    query = [pair for pair in parse_qsl(parts.query, True) if pair[0] != PARAMETER]
    return urlunsplit(parts._replace(query=urlencode([*query, (PARAMETER, alias)])))
