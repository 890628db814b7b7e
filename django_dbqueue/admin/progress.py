"""Progress that a job has reported, as a bar and as text."""

from __future__ import annotations

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
from .limits import limit_name


@admin.display(description=gettext_lazy("state"))
def state_and_progress(job: Job) -> str:
    """Return the state of a job, with its progress while it runs.

    A waiting job has the reason for the wait instead, or the text that it has expired.
    """
    detail = _detail(job)
    return format_html("{}<br>{}", columns.state(job), detail) if detail else columns.state(job)


def _detail(job: Job) -> str:
    if job.state == State.RUNNING and (progress := progress_of(job)):
        return bar(progress.value)
    if job.state in WAITING and job.expires_at and job.expires_at <= columns.seen_at(job):
        return formatting.quiet(_("expired"))
    if job.state == State.SCHEDULED:
        return formatting.ago(job.run_after, columns.seen_at(job))
    if job.state == State.BLOCKED:
        return formatting.quiet(Truncator(limit_name(job.blocked_by)).chars(60))
    return ""


def summary(job: Job) -> str:
    """Return the progress for the job's page; empty if the job has not reported any."""
    progress = progress_of(job)
    if progress is None:
        return ""
    value = progress.value
    when = format_html("({})", formatting.ago(progress.updated_at, columns.seen_at(job)))
    return format_html("{} {} {}", bar(value), value.note, formatting.quiet(when))


def bar(value: ProgressValue) -> str:
    """Return the progress bar, or a text if the total is unknown."""
    text = _text(value)
    if value.fraction is None:
        return formatting.quiet(text)
    return format_html(
        '<progress class="dbq-bar" value="{}" aria-label="{}"></progress> {}',
        f"{value.fraction:.4f}",
        text,
        text,
    )


def _text(value: ProgressValue) -> str:
    done = number_format(value.done, force_grouping=True)
    if value.total is None:
        return _("%(done)s done") % {"done": done}
    total = number_format(value.total, force_grouping=True)
    percent = number_format(int((value.fraction or 0) * 100))
    return _("%(done)s of %(total)s (%(percent)s %%)") % {
        "done": done,
        "total": total,
        "percent": percent,
    }
