"""What lists and pages show of a job, a process: one function for each column."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import Job, Process
from . import looks


@admin.display(description=gettext_lazy("job"))
def task_and_id(job: Job) -> str:
    return format_html("{}<br>{}", looks.short(job.task), looks.brief(job.pk))


@admin.display(description=gettext_lazy("job"))
def linked_job(job: Job) -> str:
    return format_html('<a href="{}">{}</a>', reverse("admin:dbqueue_job_change", args=[job.pk]), task_and_id(job))


@admin.display(description=gettext_lazy("state"))
def state(row: Any) -> str:
    return looks.state(row.get_state_display(), row.state)


@admin.display(description=gettext_lazy("queue"))
def linked_queue(job: Job) -> str:
    query = urlencode({"queue": job.queue})
    return format_html('<a href="{}?{}">{}</a>', reverse("admin:dbqueue_job_changelist"), query, job.queue)


@admin.display(description=gettext_lazy("attempts"))
def attempts(job: Job) -> str:
    if not job.failures:
        return str(job.attempt)
    return _("%(attempts)d (%(failures)d failed)") % {"attempts": job.attempt, "failures": job.failures}


@admin.display(description=gettext_lazy("run after"))
def run_after(job: Job) -> str:
    """Nothing for a job that could run as soon as it was enqueued."""
    return looks.ago(job.run_after) if job.run_after - job.enqueued_at > timedelta(seconds=1) else "–"


@admin.display(description=gettext_lazy("enqueued"))
def enqueued(job: Job) -> str:
    return looks.ago(job.enqueued_at)


@admin.display(description=gettext_lazy("last error"))
def last_error(job: Any) -> str:
    """Of the newest attempt, as the list has looked it up."""
    if not job.error:
        return ""
    return format_html('{}<br><span class="dbq-quiet dbq-said">{}</span>', looks.short(job.error), job.said[:100])


@admin.display(description=gettext_lazy("running for"))
def running_for(job: Any) -> str:
    return looks.duration(job.seen_at - job.started_at) if job.started_at else "–"


@admin.display(description=gettext_lazy("timeout"))
def timeout(job: Job) -> str:
    return looks.duration(job.timeout) if job.timeout else "–"


@admin.display(description=gettext_lazy("process"))
def owner(job: Any) -> str:
    """Who runs it, and whether it still lives; a process may be gone before its jobs are recovered."""
    if job.process_id is None:
        return "–"
    if job.process is None:
        return looks.badge(_("Gone"), "✕", "bad")
    return format_html("{} {}", looks.alive(job.process.is_alive(job.seen_at)), linked_process(job.process))


@admin.display(description=gettext_lazy("last heartbeat"))
def owner_heartbeat(job: Any) -> str:
    return looks.ago(job.process.heartbeat_at, job.seen_at) if job.process else "–"


@admin.display(description=gettext_lazy("last heartbeat"))
def heartbeat(process: Any) -> str:
    return looks.ago(process.heartbeat_at, process.seen_at)


@admin.display(description=gettext_lazy("state"))
def alive(process: Any) -> str:
    return looks.alive(process.is_alive(process.seen_at))


def linked_process(process: Process) -> str:
    return format_html('<a href="{}">{}</a>', reverse("admin:dbqueue_process_change", args=[process.pk]), process.name)


def time(name: str, description: Any) -> Any:
    """A column for a field that is a time: exact, and how long ago."""

    @admin.display(description=description)
    def column(row: Any) -> str:
        value = getattr(row, name)
        return format_html('{} <span class="dbq-quiet">({})</span>', looks.moment(value), looks.ago(value)) if value else "–"

    column.__name__ = name
    return column


def age(name: str, description: Any) -> Any:
    """A column for a field that is a time: how long ago."""

    @admin.display(description=description)
    def column(row: Any) -> str:
        return looks.ago(getattr(row, name))

    column.__name__ = name
    return column
