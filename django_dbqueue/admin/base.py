"""Base of all pages: read-only views of tables that may be huge."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.exceptions import DisallowedModelAdminLookup
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import flatten_fieldsets, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.functional import cached_property
from django.utils.text import capfirst

from ..models.bounded_count import count


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Count rows up to the limit: rows beyond it are found by a filter, not by paging."""

    @cached_property
    def count(self) -> int:
        return count(self.object_list)  # type: ignore[arg-type]


class Page(ChangeList):
    """Load only the displayed columns of its rows, and their related data for all rows at once.

    Actions get the unchanged rows.
    """

    model_admin: Any

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Return the page's own ordering for any request: a huge table is sorted by no other."""
        return list(self.model_admin.ordering)

    def get_filters(self, request: HttpRequest) -> Any:
        try:
            return super().get_filters(request)
        except DisallowedModelAdminLookup as error:
            raise IncorrectLookupParameters from error

    def get_results(self, request: HttpRequest) -> None:
        self.queryset = self.model_admin.listed(self.queryset)
        super().get_results(request)
        if not self.query and not self.get_filters_params():
            # The list leaves no row out: a link to all rows is not needed.
            self.full_result_count = self.result_count
        self.result_list = self.model_admin.completed(list(self.result_list))


class ReadingAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Read-only pages for users with the view permission.

    They offer no form, and therefore not Django's delete action either.
    """

    list_per_page = 50
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by = ()
    empty_value_display = "–"
    paginator = BoundedPaginator
    hint: Any = ""

    class Media:
        css = {"all": ["django_dbqueue/admin.css"]}

    def listed(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows of the list, with the columns that the list needs."""
        return rows

    def completed(self, rows: list[Any]) -> list[Any]:
        """Return the rows of one page, with data that is queried for all of them together."""
        return rows

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return Page

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        """Allow only the filters that the page offers.

        Others, such as ``kwargs__password__startswith``, would read hidden values.
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
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        context = {
            "title": capfirst(self.opts.verbose_name_plural),
            "hint": self.hint,
            **(extra_context or {}),
        }
        return super().changelist_view(request, context)

    def beside(self, request: HttpRequest, one: Any) -> dict[str, Any]:
        """Return the context of one object's page, beside its fields."""
        return {"title": capfirst(self.opts.verbose_name)}

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        one = (
            self.get_object(request, unquote(object_id))
            if self.has_view_permission(request)
            else None
        )
        context = self.beside(request, one) if one else {}
        return super().change_view(
            request, object_id, form_url, {**context, **(extra_context or {})}
        )

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return flatten_fieldsets(self.fieldsets or ())

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
