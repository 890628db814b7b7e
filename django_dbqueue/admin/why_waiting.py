"""The reason why a job does not run yet, in one sentence, from a few index lookups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import Job, Process, Queue, Semaphore, Slot, TaskState
from ..models.bounded_count import count
from ..models.enums import WAITING, State
from .columns import span_of_pause
from .config import limit_of
from .formatting import ago, duration, moment


def why_waiting(job: Job) -> str:
    """Return the reason; empty for a job that does not wait."""
    if said := _too_late(job):
        return said
    reasons: dict[str, Callable[[Job], str]] = {
        State.SCHEDULED: _scheduled,
        State.BLOCKED: _blocked,
        State.READY: _ready,
    }
    return reasons[job.state](job) if job.state in reasons else ""


def _too_late(job: Job) -> str:
    """Return the reason if a waiting job expires before it can run; otherwise empty."""
    if job.expires_at is None or job.state not in WAITING:
        return ""
    now = job.seen_at  # type: ignore[attr-defined]
    if job.expires_at <= now:
        said = _(
            "It expired {}, at {}. It does not run: it is discarded when a worker comes to it."
        )
    elif job.state == State.SCHEDULED and job.run_after >= job.expires_at:
        said = _(
            "It does not run: it expires {}, at {}, before its time has come, and is discarded then."
        )
    else:
        return ""
    return format_html(said, ago(job.expires_at, now), moment(job.expires_at))


def _scheduled(job: Job) -> str:
    if job.run_after - job.seen_at > timedelta():  # type: ignore[attr-defined]
        said = (
            _("It failed before, and is tried again {}, at {}.")
            if job.failures
            else _("It is scheduled {}, at {}.")
        )
        return format_html(said, ago(job.run_after, job.seen_at), moment(job.run_after))  # type: ignore[attr-defined]
    if not _alive(Process.Kind.DISPATCHER):
        return _(
            "It is due, and no dispatcher is alive to make it ready. Start one with “manage.py runqueue”."
        )
    return _("It is due, and a dispatcher makes it ready in a moment.")


def _blocked(job: Job) -> str:
    semaphore = Semaphore.objects.filter(pk=job.blocked_by).first()
    ahead = count(Job.objects.in_line_before(job))
    if semaphore and semaphore.every:
        said = _("It waits for the rate of “{}”: one starts every {}, and jobs ahead of it: {}.")
        return format_html(said, semaphore, duration(semaphore.every), ahead)
    taken = Slot.objects.count_by_key([job.blocked_by or ""])[job.blocked_by or ""]
    said = _("It waits for a slot of “{}”, of which {} of {} are taken. Jobs ahead of it: {}.")
    return format_html(said, job.blocked_by, taken, semaphore.most if semaphore else "–", ahead)


def _ready(job: Job) -> str:
    if queue := Queue.objects.paused().filter(name=job.queue).first():
        return _paused(_("Its queue “{}” is paused, {}."), queue)
    if task := TaskState.objects.paused().filter(name=job.task).first():
        return _paused(_("Its task “{}” is paused, {}."), task)
    if said := _full(job.queue):
        return said
    serving = [worker for worker in _alive(Process.Kind.WORKER) if worker.serves(job.queue)]
    if not serving:
        said = _(
            "It is ready, and no worker that serves the queue “{}” is alive. Start one with “manage.py runqueue”."
        )
        return format_html(said, job.queue)
    ahead, workers = count(Job.objects.ahead_of(job)), len(serving)
    jobs = ngettext("%(count)s job is ahead of it", "%(count)s jobs are ahead of it", ahead) % {
        "count": ahead
    }
    by = ngettext(
        "%(count)d worker serves its queue", "%(count)d workers serve its queue", workers
    ) % {"count": workers}
    return _("It is ready: %(jobs)s, and %(by)s.") % {"jobs": jobs, "by": by}


def _full(name: str) -> str:
    """Return the reason if the queue is full; empty while it has room, or has no limit."""
    queue = Queue.objects.filter(name=name).first() or Queue(name=name)
    if not (limit := limit_of(queue)):
        return ""
    running = count(Job.objects.running().filter(queue=name), "process_id")
    said = _("It is ready, and its queue “{}” is full: {} of {} jobs run.")
    return format_html(said, _linked(queue), running, limit) if running >= limit else ""


def _linked(row: Queue | TaskState) -> str:
    address = reverse(f"admin:dbqueue_{row._meta.model_name}_change", args=[quote(row.pk)])
    return format_html('<a href="{}">{}</a>', address, row)


def _paused(said: str, row: Queue | TaskState) -> str:
    return format_html(said, _linked(row), span_of_pause(row))


def _alive(kind: Process.Kind) -> list[Process]:
    return list(Process.objects.alive().filter(kind=kind)[:1000])
