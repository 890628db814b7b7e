"""The search page."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.admin.views.decorators import staff_member_required
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from . import library
from .forms import SearchForm
from .models import Definition, Scan
from .progress import Progress
from .trouble import kinds as trouble_kinds

MOST_HITS = 50


@dataclass(frozen=True)
class Hit:
    """A search result: a definition, and the lines around it."""

    definition: Definition
    lines: list[tuple[int, str]]


@require_safe
def search(request: HttpRequest) -> HttpResponse:
    """Show the search results for ``?q=``, and the progress of the indexing."""
    form = SearchForm(request.GET)
    query = form.cleaned_data["q"] if form.is_valid() else ""
    found = (
        list(Definition.objects.matching(query).select_related("module")[: MOST_HITS + 1])
        if query
        else []
    )
    context = {
        "form": form,
        "query": query,
        "hits": _hits(found[:MOST_HITS]),
        "found": len(found),
        "most": MOST_HITS,
        "progress": Progress.now(),
        "last_scan": Scan.objects.finished().first(),
    }
    return render(request, "example_project/search.html", context)


@staff_member_required
@require_http_methods(["GET", "HEAD", "POST"])
def trouble(request: HttpRequest) -> HttpResponse:
    """Make trouble, and show the page of the admin that answers it."""
    kinds = trouble_kinds()
    if request.method != "POST":
        return render(request, "example_project/trouble.html", {"kinds": kinds})
    if (kind := kinds.get(request.POST.get("kind", ""))) is None:
        return HttpResponseBadRequest(f"Choose from {', '.join(kinds)}.")
    kind.enqueue()
    return redirect(f"admin:dbqueue_{kind.page}_changelist")


def _hits(found: list[Definition]) -> list[Hit]:
    return [Hit(each, library.excerpt(each.module.path, each.line)) for each in found]
