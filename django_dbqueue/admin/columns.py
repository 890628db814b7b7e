"""Columns for jobs and processes in lists and on pages: one function for each column."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import Job, Process
from . import formatting

# Columns of a job that lists do not read.
NOT_LISTED = ("args", "kwargs", "result", "metadata", "limits", "pipeline")


@admin.display(description=gettext_lazy("job"))
def task_and_id(job: Job) -> str:
    """Return task, id and, if there is one, key: users know the job by its key."""
    named = formatting.short(job.task)
    if job.key:
        named = format_html(
            '{} <span class="dbq-key">{}</span>', named, Truncator(key(job)).chars(60)
        )
    return format_html("{}<br>{}", named, formatting.brief(job.pk))


@admin.display(description=gettext_lazy("job"))
def linked_job(job: Job) -> str:
    return format_html(
        '<a href="{}">{}</a>', reverse("admin:dbqueue_job_change", args=[job.pk]), task_and_id(job)
    )


@admin.display(description=gettext_lazy("state"))
def state(row: Any) -> str:
    return formatting.state(row.get_state_display(), row.state)


@admin.display(description=gettext_lazy("queue"))
def linked_queue(job: Job) -> str:
    query = urlencode({"queue": job.queue})
    return format_html(
        '<a href="{}?{}">{}</a>', reverse("admin:dbqueue_job_changelist"), query, job.queue
    )


@admin.display(description=gettext_lazy("task"))
def linked_task(job: Job) -> str:
    """Return a link to the page on which the task can be paused."""
    return format_html(
        '<a href="{}">{}</a>',
        reverse("admin:dbqueue_taskstate_change", args=[quote(job.task)]),
        job.task,
    )


@admin.display(description=gettext_lazy("key"))
def key(job: Job) -> str:
    """Return the key without the task, which precedes it in the row."""
    return (job.key or "").partition(" ")[2]


@admin.display(description=gettext_lazy("batch"))
def linked_batch(job: Job) -> str:
    if job.batch is None:
        return "–"
    return format_html(
        '<a href="{}">{}</a>', reverse("admin:dbqueue_batch_change", args=[job.batch.pk]), job.batch
    )


@admin.display(description=gettext_lazy("state"))
def paused(row: Any) -> str:
    """Return whether a queue or a task is paused, as a badge."""
    if not row.is_paused(row.seen_at):
        return formatting.badge(_("Active"), "▸", "good")
    return format_html("{} {}", formatting.badge(_("Paused"), "‖", "waits"), span_of_pause(row))


def span_of_pause(row: Any) -> str:
    """Return the start of a pause, and its end if known."""
    if row.resume_at is None:
        return format_html(_("since {}"), formatting.moment(row.paused_at))
    return format_html(
        _("since {}, until {}"), formatting.moment(row.paused_at), formatting.moment(row.resume_at)
    )


@admin.display(description=gettext_lazy("attempts"))
def attempts(job: Job) -> str:
    said = str(job.attempt - job.attempts_before)
    if job.failures:
        said = _("%(attempts)s (%(failures)d failed)") % {
            "attempts": said,
            "failures": job.failures,
        }
    return (
        _("%(attempts)s, and %(before)d before it was asked for again")
        % {"attempts": said, "before": job.attempts_before}
        if job.attempts_before
        else said
    )


@admin.display(description=gettext_lazy("enqueued"))
def enqueued(job: Job) -> str:
    return formatting.ago(job.enqueued_at)


@admin.display(description=gettext_lazy("last error"))
def last_error(job: Any) -> str:
    """Return the error of the newest attempt, from the columns that the list adds."""
    if not job.error:
        return ""
    return format_html(
        '{}<br><span class="dbq-quiet dbq-said">{}</span>',
        formatting.short(job.error),
        job.said[:100],
    )


@admin.display(description=gettext_lazy("running for"))
def running_for(job: Any) -> str:
    return formatting.duration(job.seen_at - job.started_at) if job.started_at else "–"


@admin.display(description=gettext_lazy("timeout"))
def timeout(job: Job) -> str:
    return formatting.duration(job.timeout) if job.timeout else "–"


@admin.display(description=gettext_lazy("process"))
def owner(job: Any) -> str:
    """Return the process that runs a job, and whether it is alive.

    A process may be gone before its jobs are recovered.
    """
    if job.process_id is None:
        return "–"
    if job.process is None:
        return formatting.badge(_("Gone"), "✕", "bad")
    return format_html(
        "{} {}", formatting.alive(job.process.is_alive(job.seen_at)), linked_process(job.process)
    )


@admin.display(description=gettext_lazy("process"))
def owner_and_heartbeat(job: Any) -> str:
    if job.process is None:
        return owner(job)
    said = format_html(
        _("last heartbeat {}"), formatting.ago(job.process.heartbeat_at, job.seen_at)
    )
    return format_html('{}<br><span class="dbq-quiet">{}</span>', owner(job), said)


@admin.display(description=gettext_lazy("last heartbeat"))
def heartbeat(process: Any) -> str:
    return formatting.ago(process.heartbeat_at, process.seen_at)


@admin.display(description=gettext_lazy("state"))
def alive(process: Any) -> str:
    return formatting.alive(process.is_alive(process.seen_at))


def linked_process(process: Process) -> str:
    address = reverse("admin:dbqueue_process_change", args=[process.pk])
    return format_html('<a href="{}">{}</a>', address, formatting.process(process.name))


def time(name: str, description: Any) -> Any:
    """Return a column for a time field: the exact time, and its age."""

    @admin.display(description=description)
    def column(row: Any) -> str:
        value = getattr(row, name)
        return (
            format_html(
                '{} <span class="dbq-quiet">({})</span>',
                formatting.moment(value),
                formatting.ago(value),
            )
            if value
            else "–"
        )

    column.__name__ = name
    return column


def age(name: str, description: Any) -> Any:
    """Return a column for a time field: its age."""

    @admin.display(description=description)
    def column(row: Any) -> str:
        return formatting.ago(getattr(row, name))

    column.__name__ = name
    return column
