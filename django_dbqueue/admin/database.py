"""The database: what its checks find, the sizes of the tables, and what they grow to."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.template.defaultfilters import filesizeformat
from django.template.response import TemplateResponse
from django.utils.formats import number_format
from django.utils.translation import gettext as _

from ..doctor.database import QueueDatabase
from ..doctor.runner import examine
from ..doctor.size import TableSize, forecast, sizes
from ..models import DatabaseHealth
from .backend_choice import offered_backends
from .base import ReadOnlyAdmin
from .config import backend, backends_in, options
from .problems import problems, verdict


@admin.register(DatabaseHealth)
class DatabaseAdmin(ReadOnlyAdmin):
    def get_urls(self) -> list[Any]:
        """Return the one page: there are no rows."""
        name = f"dbqueue_{self.opts.model_name}_changelist"
        return [each for each in super().get_urls() if each.name == name]

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return request.user.has_perm("dbqueue.view_process")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, object] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        of = backend()
        database = of and QueueDatabase(of.database, backends_in(of.database))
        results = list(examine(database)) if database else []
        found = problems(results)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Database"),
            "subtitle": f"{database.alias} ({database.product})" if database else "",
            "opts": self.opts,
            "media": self.media,
            "backends": offered_backends(),
            "verdict": verdict(found),
            "is_well": not found,
            "problems": found,
            "not_checked": [each for _name, each in results if not each.severity],
            **(_sizes(database) if database else {}),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/dbqueue/database.html", context)


def _sizes(database: QueueDatabase) -> dict[str, object]:
    """Return the sizes of the tables as text, and the forecast as a sentence."""
    try:
        with database.bounded():
            tables = sizes(database)
            expected = forecast(database, tables, options())
    except Error:  # The findings say what is wrong with the database.
        return {}
    total = TableSize(_("all"), sum(each.size for each in tables), sum(t.rows for t in tables))
    rows = [
        (each.name, filesizeformat(each.size), number_format(each.rows, force_grouping=True))
        for each in [*tables, *[total] * bool(tables)]
    ]
    if expected is None:
        return {"tables": rows}
    said = _(
        "If each week is like the last one, with %(a_day)s jobs a day, the retention keeps about "
        "%(jobs)s jobs, which take about %(size)s with their attempts."
    )
    named = {
        "a_day": number_format(round(expected.jobs_a_day), force_grouping=True),
        "jobs": number_format(round(expected.jobs), force_grouping=True),
        "size": filesizeformat(expected.size),
    }
    return {"tables": rows, "forecast": said % named}
