"""Progress that a job has reported: a bar, and in words."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..core.progress_value import ProgressValue
from ..models import Job
from ..models.enums import WAITING, State
from ..models.progress import progress_of
from . import columns, formatting
from .limit_text import named


@admin.display(description=gettext_lazy("state"))
def state_and_progress(job: Job) -> str:
    """Return the state of a job, and for a running job its progress.

    Earlier progress is on the job's page only. For a waiting job, return the cause of
    the wait, or that the job has expired.
    """
    beneath = _beneath(job)
    return format_html("{}<br>{}", columns.state(job), beneath) if beneath else columns.state(job)


def _beneath(job: Any) -> str:
    if job.state == State.RUNNING and (progress := progress_of(job)):
        return bar(progress.value)
    if job.state in WAITING and job.expires_at and job.expires_at <= job.seen_at:
        return format_html('<span class="dbq-quiet">{}</span>', _("expired"))
    if job.state == State.SCHEDULED:
        return formatting.ago(job.run_after, job.seen_at)
    if job.state == State.BLOCKED:
        return format_html(
            '<span class="dbq-quiet">{}</span>', Truncator(named(job.blocked_by)).chars(60)
        )
    return ""


def described(job: Any) -> str:
    """Return the progress for the job's page; empty if the job has not reported any."""
    progress = progress_of(job)
    if progress is None:
        return ""
    noted, when = progress.value, formatting.ago(progress.noted_at, job.seen_at)
    return format_html('{} {} <span class="dbq-quiet">({})</span>', bar(noted), noted.note, when)


def bar(noted: ProgressValue) -> str:
    """Return the progress bar, or a text if the total is unknown."""
    said = _said(noted)
    if noted.fraction is None:
        return format_html('<span class="dbq-quiet">{}</span>', said)
    value = f"{noted.fraction:.4f}"
    return format_html(
        '<progress class="dbq-bar" value="{}" aria-label="{}"></progress> {}', value, said, said
    )


def _said(noted: ProgressValue) -> str:
    done = number_format(noted.done, force_grouping=True)
    if noted.total is None:
        return _("%(done)s done") % {"done": done}
    total = number_format(noted.total, force_grouping=True)
    percent = number_format(int((noted.fraction or 0) * 100))
    return _("%(done)s of %(total)s (%(percent)s %%)") % {
        "done": done,
        "total": total,
        "percent": percent,
    }
