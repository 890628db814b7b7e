"""The places in the documentation that messages refer to."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata

from django.core.checks import CheckMessage

DISTRIBUTION = "django-dbqueue-tasks"


def reference(page: str, heading: str = "") -> str:
    """Return the address of a page, or of a heading in it.

    It begins with the address "Documentation" in the metadata of the installed package. Without
    one, it is the page's path in the source distribution.
    """
    anchor = "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") if heading else ""
    site = _site()
    return f"{site}{page}.html{anchor}" if site else f"docs/{page}.md{anchor}"


def with_reference(message: CheckMessage) -> CheckMessage:
    """Let the hint of a system check end with the place that explains its code."""
    see = f"See {reference('errors', message.id or '')}."
    message.hint = f"{message.hint} {see}" if message.hint else see
    return message


@cache
def _site() -> str:
    """Return the address of the documentation, with a slash at its end; "" if there is none."""
    try:
        urls = metadata.metadata(DISTRIBUTION).get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    for url in urls:
        label, _, address = str(url).partition(", ")
        if label.lower() == "documentation":
            return address.rstrip("/") + "/"
    return ""
