from __future__ import annotations

from typing import Any, ClassVar, Protocol

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import Job, Process, StackTrace
from ..models.expressions import Now
from . import columns, formatting
from .actions import QUIET, RESUME_PROCESS, STOP_PROCESS
from .base import Fields
from .base_actions import ActionAdmin
from .hanged_jobs import doing

# Number of jobs of a process that its page shows.
MOST_JOBS = 100


class CountedProcess(Protocol):
    """A process with the number of its running jobs."""

    pk: int
    threads: int
    running: int


@admin.display(description=_("name"))
def name(process: Process) -> str:
    """Return the name, which contains the kind, the host and the pid."""
    return formatting.process(process.name)


@admin.display(description=_("state"))
def state(process: Process) -> str:
    """Return whether the process is alive, and what an operator has asked of it."""
    if not process.is_quiet:
        return columns.alive(process)
    text = process.get_request_display() or Process.Request.QUIET.label
    asked = formatting.badge(text, "‖", "waits")
    return format_html("{} {}", columns.alive(process), asked)


@admin.display(description=_("running jobs"))
def running(process: CountedProcess) -> str:
    """Return the number of jobs that the process runs or holds to run next, and its threads."""
    number = formatting.job_count(process.running, process=process.pk)
    if threads := process.threads:
        said = format_html(gettext("threads: {}"), threads)
        return format_html("{}<br>{}", number, formatting.quiet(said))
    return number


@admin.display(description=_("queues"))
def queues(process: Process) -> str:
    return str(process.facts.get("queues", "–"))


@admin.display(description=_("memory"))
def memory(process: Process) -> str:
    return "–" if process.memory is None else filesizeformat(process.memory)


@admin.display(description=_("supervisor"))
def supervisor(process: Process) -> str:
    return columns.linked_process(process.supervisor) if process.supervisor else "–"


@admin.display(description=_("details"))
def details(process: Process) -> str:
    return formatting.json_text(process.details)


@admin.register(Process)
class ProcessAdmin(ActionAdmin):
    hint = _(
        "Workers, dispatchers and supervisors. "
        "A process without a heartbeat is declared dead, and its jobs are recovered."
    )
    actions = (QUIET, RESUME_PROCESS, STOP_PROCESS)
    list_display = (
        name,
        state,
        columns.heartbeat,
        running,
        queues,
        memory,
        "release",
        columns.age("started_at", _("started")),
    )
    list_filter = (("kind", admin.ChoicesFieldListFilter),)
    ordering = ("hostname", "kind", "pk")
    fieldsets: ClassVar[Fields] = (
        (
            None,
            {
                "fields": (
                    (state, columns.heartbeat, columns.time("started_at", _("started"))),
                    ("name", "kind", supervisor),
                    ("hostname", "pid", "release", memory),
                    (queues, running),
                    details,
                )
            },
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Process]:
        rows: Any = super().get_queryset(request)
        return rows.select_related("supervisor").seen()  # type: ignore[no-any-return]

    def with_details(
        self, request: HttpRequest, rows: list[CountedProcess]
    ) -> list[CountedProcess]:
        numbers = Job.objects.count_running()
        for process in rows:
            process.running = numbers.get(process.pk, 0)
        return rows

    def page_context(self, request: HttpRequest, row: Process) -> dict[str, object]:
        may_view_jobs = request.user.has_perm("dbqueue.view_job")
        is_worker = row.kind == Process.Kind.WORKER
        return {
            **super().page_context(request, row),
            "jobs": _jobs_of(row) if may_view_jobs and is_worker else [],
            "may_view_jobs": may_view_jobs,
            "is_worker": is_worker,
            "has_run": formatting.jobs_link(gettext("Jobs that it has run"), worker=row.name),
        }


def _jobs_of(process: Process) -> list[dict[str, str]]:
    """Return the jobs that a worker runs, or holds to run next, those that run longest first."""
    owned: Any = Job.objects.running().filter(process=process.pk)
    rows = owned.defer(*columns.NOT_LISTED).select_related("progress").annotate(seen_at=Now())
    jobs = list(rows.order_by("started_at", "pk")[:MOST_JOBS])
    stacks = StackTrace.objects.of(jobs)
    for job in jobs:
        job.stack_text = stacks.get(job.pk, "")
    return [
        {
            "job": columns.linked_job(job),
            "queue": job.queue,
            "running_for": columns.running_for(job),
            "doing": doing(job),
        }
        for job in jobs
    ]
