"""The database: what its checks find, the sizes of the tables, and what they grow to."""

from __future__ import annotations

from django.contrib import admin
from django.db import Error
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.formats import number_format
from django.utils.translation import gettext as _

from ..doctor.database import QueueDatabase, database_of
from ..doctor.runner import examine
from ..doctor.size import TableSize, forecast, sizes
from ..models import DatabaseHealth
from .base import PageAdmin
from .config import backend, options
from .problems import verdict


@admin.register(DatabaseHealth)
class DatabaseAdmin(PageAdmin):
    permission = "view_process"
    template = "admin/dbqueue/database.html"

    def context(self, request: HttpRequest) -> dict[str, object]:
        of = backend()
        database = of and database_of(of)
        results = list(examine(database)) if database else []
        return {
            **verdict(results),
            "subtitle": f"{database.alias} ({database.product})" if database else "",
            "not_checked": [each for _name, each in results if not each.severity],
            **(_sizes(database) if database else {}),
        }


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
