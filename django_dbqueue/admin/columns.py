"""Columns for jobs and processes in lists and on pages: one function for each column."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

from django.contrib import admin
from django.db.models import Model
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..models import Failure, Job, Process, RecurringTask
from ..models.pausing import Pausable
from . import formatting
from .base import Text

# Columns of a job that lists do not read.
NOT_LISTED = ("args", "kwargs", "result", "metadata", "limits", "pipeline", "source")

Column = Callable[[Model], str]


class WithLastError(Protocol):
    """A job with the error of its last attempt."""

    error: str | None
    error_message: str


def seen_at(row: Model) -> datetime:
    """Return the database's time at which the page's query read the row."""
    time: datetime = row.seen_at  # type: ignore[attr-defined]
    return time


@admin.display(description=gettext_lazy("job"))
def task_and_id(job: Job) -> str:
    """Return task, id and, if there is one, key: users know the job by its key."""
    task = formatting.last_part(job.task)
    if job.key:
        short_key = Truncator(key(job)).chars(60)
        task = format_html('{} <span class="dbq-key">{}</span>', task, short_key)
    return format_html("{}<br>{}", task, formatting.short_id(job.pk))


@admin.display(description=gettext_lazy("job"))
def linked_job(job: Job) -> str:
    return formatting.link("job", job.pk, task_and_id(job))


@admin.display(description=gettext_lazy("state"))
def state(row: Job | Failure) -> str:
    return formatting.state(row.get_state_display(), row.state)


@admin.display(description=gettext_lazy("queue"))
def linked_queue(job: Job) -> str:
    return formatting.jobs_link(job.queue, queue=job.queue)


@admin.display(description=gettext_lazy("task"))
def linked_task(job: Job) -> str:
    """Return a link to the page on which the task can be paused."""
    return formatting.link("taskstate", job.task, job.task)


@admin.display(description=gettext_lazy("key"))
def key(job: Job) -> str:
    """Return the key without the task, which precedes it in the row."""
    return (job.key or "").partition(" ")[2]


@admin.display(description=gettext_lazy("batch"))
def linked_batch(job: Job) -> str:
    return formatting.link("batch", job.batch.pk, job.batch) if job.batch else "–"


@admin.display(description=gettext_lazy("state"))
def paused(row: Pausable) -> str:
    """Return whether a queue or a task is paused, as a badge."""
    if not row.is_paused(seen_at(row)):
        return formatting.badge(_("Active"), "▸", "good")
    return format_html("{} {}", formatting.badge(_("Paused"), "‖", "waits"), pause_span(row))


def pause_span(row: Pausable) -> str:
    """Return the start of a pause, and its end if known."""
    start = formatting.timestamp(row.paused_at)
    if row.resume_at is None:
        return format_html(_("since {}"), start)
    return format_html(_("since {}, until {}"), start, formatting.timestamp(row.resume_at))


@admin.display(description=gettext_lazy("attempts"))
def attempts(job: Job) -> str:
    text = str(job.attempt - job.attempts_before)
    if job.failures:
        text = _("%(attempts)s (%(failures)d failed)") % {
            "attempts": text,
            "failures": job.failures,
        }
    if job.attempts_before:
        text = _("%(attempts)s, and %(before)d before it was re-enqueued") % {
            "attempts": text,
            "before": job.attempts_before,
        }
    return text


@admin.display(description=gettext_lazy("last error"))
def last_error(job: WithLastError) -> str:
    """Return the error of the last attempt, from the columns that the list adds."""
    if not job.error:
        return ""
    return format_html(
        '{}<br><span class="dbq-quiet dbq-said">{}</span>',
        formatting.last_part(job.error),
        job.error_message[:100],
    )


@admin.display(description=gettext_lazy("running for"))
def running_for(job: Job) -> str:
    return formatting.duration(seen_at(job) - job.started_at) if job.started_at else "–"


@admin.display(description=gettext_lazy("id"))
def full_id(job: Job) -> str:
    """Return the whole id, with a button that copies it."""
    return formatting.copyable(_("id"), format_html('<code dir="ltr">{}</code>', job.pk))


@admin.display(description=gettext_lazy("priority"))
def priority(row: Job | RecurringTask) -> str:
    return "–" if row.priority is None else formatting.number(row.priority)


@admin.display(description=gettext_lazy("queue"))
def queue_and_priority(job: Job) -> str:
    """Return the queue, and the priority if it is not the usual one."""
    if not job.priority:
        return str(job.queue)
    text = format_html(_("priority {}"), formatting.number(job.priority))
    return format_html("{}<br>{}", job.queue, formatting.quiet(text))


@admin.display(description=gettext_lazy("enqueued, last run"))
def enqueued_and_last_run(job: Job) -> str:
    """Return when a job was enqueued; and since when it runs, or when its last run ended."""
    return format_html(
        "{}<br>{}", formatting.ago(job.enqueued_at), formatting.quiet(_last_run(job))
    )


def _last_run(job: Job) -> str:
    if job.finished_at:
        ended = formatting.ago(job.finished_at)
        if not job.started_at:
            return format_html(_("ended {ended}"), ended=ended)
        length = formatting.duration(max(job.finished_at - job.started_at, timedelta()))
        return format_html(_("ended {ended}, ran for {length}"), ended=ended, length=length)
    if job.state == Job.State.RUNNING and job.started_at:
        return format_html(_("running for {length}"), length=running_for(job))
    if job.state == Job.State.SCHEDULED:
        return format_html(_("due {time}"), time=formatting.ago(job.run_after))
    return ""


@admin.display(description=gettext_lazy("timeout"))
def timeout(job: Job) -> str:
    return formatting.duration(job.timeout) if job.timeout else "–"


@admin.display(description=gettext_lazy("process"))
def owner(job: Job) -> str:
    """Return the process that runs a job, and whether it is alive.

    A process may be gone before its jobs are recovered.
    """
    if job.process_id is None:
        return "–"
    if job.process is None:
        return formatting.badge(_("Gone"), "✕", "bad")
    is_alive = formatting.alive(job.process.is_alive(seen_at(job)))
    return format_html("{} {}", is_alive, linked_process(job.process))


@admin.display(description=gettext_lazy("process"))
def owner_and_heartbeat(job: Job) -> str:
    if job.process is None:
        return owner(job)
    last = formatting.ago(job.process.heartbeat_at, seen_at(job))
    text = format_html(_("last heartbeat {}"), last)
    return format_html("{}<br>{}", owner(job), formatting.quiet(text))


@admin.display(description=gettext_lazy("last heartbeat"))
def heartbeat(process: Process) -> str:
    return formatting.ago(process.heartbeat_at, seen_at(process))


@admin.display(description=gettext_lazy("state"))
def alive(process: Process) -> str:
    return formatting.alive(process.is_alive(seen_at(process)))


def linked_process(process: Process) -> str:
    return formatting.link("process", process.pk, formatting.process(process.name))


def time(name: str, description: Text) -> Column:
    """Return a column for a time field: the exact time, and its age."""

    @admin.display(description=description)  # type: ignore[arg-type]
    def column(row: Model) -> str:
        value = getattr(row, name)
        if not value:
            return "–"
        relative = format_html("({})", formatting.ago(value))
        return format_html("{} {}", formatting.timestamp(value), formatting.quiet(relative))

    column.__name__ = name
    return column


def age(name: str, description: Text) -> Column:
    """Return a column for a time field: its age."""

    @admin.display(description=description)  # type: ignore[arg-type]
    def column(row: Model) -> str:
        return formatting.ago(getattr(row, name))

    column.__name__ = name
    return column
