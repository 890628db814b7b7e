"""What the checks of the queue and its database find, for the pages."""

from __future__ import annotations

from collections.abc import Iterable

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..doctor.finding import Finding, NotChecked, Severity
from .addresses import page_address
from .backend_choice import with_backend

# The page that shows more of a finding; for others, there is none.
PAGES = {
    "processes": "process",
    "silent-processes": "process",
    "lag": "queue",
    "overdue-recurring-tasks": "recurringtask",
    "failures": "failure",
    "hanged-jobs": "hangedjob",
    "stalled-operations": "operation",
    "orphaned-jobs": "hangedjob",
    "retention": "job",
}
Results = Iterable[tuple[str, Finding | NotChecked]]


def problems(results: Results) -> list[dict[str, object]]:
    """Return what is wrong, the most serious first."""
    found = [(name, each) for name, each in results if each.severity]
    found.sort(key=lambda it: it[1].severity != Severity.CRITICAL)
    return [
        {
            "what": each.what,
            "why": each.why if isinstance(each, Finding) else "",
            "remedy": each.remedy,
            "is_critical": each.severity == Severity.CRITICAL,
            "page": with_backend(page_address(f"{PAGES[name]}_changelist"))
            if name in PAGES
            else "",
        }
        for name, each in found
    ]


def verdict(found: list[dict[str, object]]) -> str:
    if not found:
        return _("All is well: no problem was found.")
    critical = sum(bool(each["is_critical"]) for each in found)
    text = ngettext(
        "%(number)d problem, of which critical: %(critical)d.",
        "%(number)d problems, of which critical: %(critical)d.",
        len(found),
    )
    return text % {"number": len(found), "critical": critical}
