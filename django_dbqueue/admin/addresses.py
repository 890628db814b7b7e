"""Addresses of pages, on the admin site of the present page."""

from __future__ import annotations

from contextvars import ContextVar
from uuid import UUID

from django.contrib.admin.utils import quote
from django.urls import reverse

# The name of the admin site whose view runs. A project may have several sites.
current_site: ContextVar[str | None] = ContextVar("current_site", default=None)


def page_address(page: str, *of_row: UUID | int | str) -> str:
    """Return the address of a page, such as ``job_changelist`` or ``job_change`` of a row."""
    args = [quote(pk) for pk in of_row]
    return reverse(f"admin:dbqueue_{page}", args=args, current_app=current_site.get())
