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
    "quiet-processes": "process",
    "lag": "queue",
    "overdue-recurring-tasks": "recurringtask",
    "failures": "failure",
    "unknown-tasks": "job",
    "hanged-jobs": "hangedjob",
    "stalled-operations": "operation",
    "orphaned-jobs": "hangedjob",
    "retention": "job",
}
Results = Iterable[tuple[str, Finding | NotChecked]]


def verdict(results: Results) -> dict[str, object]:
    """Return the context of ``problems.html``: what is wrong, the most serious first."""
    found = [(name, each) for name, each in results if each.severity]
    found.sort(key=lambda it: it[1].severity != Severity.CRITICAL)
    problems = [_problem(name, each) for name, each in found]
    critical = sum(each.severity == Severity.CRITICAL for _name, each in found)
    return {"verdict": _sentence(len(found), critical), "is_well": not found, "problems": problems}


def _problem(name: str, each: Finding | NotChecked) -> dict[str, object]:
    page = PAGES.get(name)
    return {
        "what": each.what,
        "why": each.why if isinstance(each, Finding) else "",
        "remedy": each.remedy,
        "is_critical": each.severity == Severity.CRITICAL,
        "page": with_backend(page_address(f"{page}_changelist")) if page else "",
    }


def _sentence(number: int, critical: int) -> str:
    if not number:
        return _("All is well: no problem was found.")
    text = ngettext(
        "%(number)d problem, of which critical: %(critical)d.",
        "%(number)d problems, of which critical: %(critical)d.",
        number,
    )
    return text % {"number": number, "critical": critical}
