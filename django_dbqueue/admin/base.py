"""Base of all pages: read-only views of tables that may be huge."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.exceptions import DisallowedModelAdminLookup
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import flatten_fieldsets, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.urls import URLPattern
from django.utils.functional import Promise, cached_property
from django.utils.text import capfirst

from ..core.chosen_backend import chosen_backend
from ..models.bounded_count import count
from .backend_choice import PARAMETER, offered_backends, on_chosen_backend, with_backend

Text = str | Promise
# A row of any model. Each page narrows it to its model, or to a protocol that has the details.
Row = Any
Rows = QuerySet[Row]
# Fieldsets, or parts of them. Their fields may be callables: Django's stubs allow only names.
Fields = Any


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Count rows up to a limit: rows beyond it are found by a filter, not by paging."""

    @cached_property
    def count(self) -> int:
        return count(self.object_list)  # type: ignore[arg-type]


class ReadOnlyChangeList(ChangeList):
    """Load only the displayed columns of its rows, and their details for all rows at once.

    Actions get the unchanged rows.
    """

    model_admin: ReadOnlyAdmin

    def get_ordering(self, request: HttpRequest, queryset: Rows) -> list[Any]:
        """Return the page's own ordering: a huge table is sorted by no other column."""
        return list(self.model_admin.get_ordering(request))

    def get_filters_params(self, params: Any = None) -> Any:
        found = super().get_filters_params(params)
        found.pop(PARAMETER, None)
        return found

    def url_for_result(self, result: Row) -> str:
        return with_backend(super().url_for_result(result))

    def get_filters(self, request: HttpRequest) -> Any:
        if any("\x00" in value for value in request.GET.values()):
            raise IncorrectLookupParameters  # PostgreSQL takes no such text.
        try:
            return super().get_filters(request)
        except DisallowedModelAdminLookup as error:
            raise IncorrectLookupParameters from error

    def get_results(self, request: HttpRequest) -> None:
        self.queryset = self.model_admin.list_queryset(self.queryset)
        super().get_results(request)
        if not self.query and not self.get_filters_params():
            # The list is unfiltered: a link to all rows is not needed.
            self.full_result_count = self.result_count
        self.result_list = self.model_admin.with_details(request, list(self.result_list))


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Read-only pages for users with the view permission.

    They have no form, and therefore no delete action of Django's.
    """

    list_per_page = 50
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by = ()
    empty_value_display = "–"
    paginator = BoundedPaginator
    hint: Text = ""

    class Media:
        css = {"all": ["django_dbqueue/admin.css"]}

    def get_urls(self) -> list[URLPattern]:
        patterns = super().get_urls()
        for pattern in patterns:
            pattern.callback = on_chosen_backend(pattern.callback, self.admin_site)
        return patterns

    def get_preserved_filters(self, request: HttpRequest) -> str:
        """Return the filters that links keep, and with them the chosen backend."""
        kept = QueryDict(super().get_preserved_filters(request)).get("_changelist_filters", "")
        if alias := chosen_backend.get():
            filters = QueryDict(kept, mutable=True)
            filters[PARAMETER] = alias
            kept = filters.urlencode()
        return urlencode({"_changelist_filters": kept}) if kept else ""

    def list_queryset(self, rows: Rows) -> Rows:
        """Return the rows with the columns that the list needs."""
        return rows

    def with_details(self, request: HttpRequest, rows: list[Row]) -> list[Row]:
        """Return the rows with data that is queried for all of them together."""
        return rows

    def get_changelist(self, request: HttpRequest, **kwargs: object) -> type[ChangeList]:
        return ReadOnlyChangeList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Allow only the filters of the page.

        Others, such as ``kwargs__password__startswith``, would reveal hidden values.
        """
        offered = set()
        for each in self.get_list_filter(request) if request else self.list_filter:
            field: Any = each[0] if isinstance(each, (list, tuple)) else each
            offered |= (
                {f"{field}__exact", f"{field}__isnull"}
                if isinstance(field, str)
                else {field.parameter_name}
            )
        return lookup in offered

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        title = capfirst(self.opts.verbose_name_plural)
        context = {
            "title": title,
            "hint": self.hint,
            "backends": offered_backends(),
            **(extra_context or {}),
        }
        return super().changelist_view(request, context)

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Row:
        """Return the row with its details; read once for a request, which asks twice."""
        read = request.__dict__.setdefault("_dbqueue_rows", {})
        key = self.model, object_id
        if key not in read:
            # PostgreSQL has no text with NUL.
            found = (
                None if "\0" in object_id else super().get_object(request, object_id, from_field)
            )
            read[key] = self.with_details(request, [found])[0] if found else None
        return read[key]

    def page_context(self, request: HttpRequest, row: Row) -> dict[str, object]:
        """Return the template context of a row's page, in addition to its fields."""
        return {"title": capfirst(self.opts.verbose_name)}

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, object] | None = None,
    ) -> HttpResponse:
        may = self.has_view_permission(request)
        row = self.get_object(request, unquote(object_id)) if may else None
        context = {**(self.page_context(request, row) if row else {}), **(extra_context or {})}
        return super().change_view(request, object_id, form_url, context)

    def get_fieldsets(self, request: HttpRequest, obj: Row = None) -> Fields:
        return self.fieldsets or ()

    def get_readonly_fields(self, request: HttpRequest, obj: Row = None) -> Fields:
        return flatten_fieldsets(self.get_fieldsets(request, obj))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Row = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Row = None) -> bool:
        return False


class PageAdmin(ReadOnlyAdmin):
    """One page of its own, in place of a list of rows.

    permission: the codename of the permission to see it. template: its name.
    """

    permission: str
    template: str

    def get_urls(self) -> list[URLPattern]:
        """Return the address of the page: there are no rows."""
        name = f"dbqueue_{self.opts.model_name}_changelist"
        return [each for each in super().get_urls() if each.name == name]

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return request.user.has_perm(f"dbqueue.{self.permission}")

    def context(self, request: HttpRequest) -> dict[str, object]:
        """Return the template context of the page."""
        raise NotImplementedError

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": capfirst(str(self.opts.verbose_name)),
            "opts": self.opts,
            "media": self.media,
            "backends": offered_backends(),
            **self.context(request),
            **(extra_context or {}),
        }
        return TemplateResponse(request, self.template, context)
