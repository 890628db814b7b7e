"""The reason why a job is not running yet, in one sentence, from a few index lookups."""

from __future__ import annotations

from collections.abc import Callable

from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import Execution, Job, Process, Queue, Semaphore, Slot, TaskState
from ..models.bounded_count import count
from ..models.enums import WAITING, State
from .columns import pause_span, seen_at
from .config import limit_of
from .formatting import ago, duration, link, timestamp


def why_waiting(job: Job) -> str:
    """Return the reason; empty for a job that does not wait."""
    if text := _expired(job):
        return text
    reasons: dict[str, Callable[[Job], str]] = {
        State.SCHEDULED: _scheduled,
        State.BLOCKED: _blocked,
        State.READY: _ready,
    }
    return reasons[job.state](job) if job.state in reasons else ""


def _expired(job: Job) -> str:
    """Return the reason if a waiting job expires before it can run; otherwise empty."""
    if job.expires_at is None or job.state not in WAITING:
        return ""
    now = seen_at(job)
    if job.expires_at <= now:
        text = _("It expired {}, at {}. It does not run: the next worker discards it.")
    elif job.state == State.SCHEDULED and job.run_after >= job.expires_at:
        text = _("It does not run: it expires {}, at {}, before its time, and is discarded.")
    else:
        return ""
    return format_html(text, ago(job.expires_at, now), timestamp(job.expires_at))


def _scheduled(job: Job) -> str:
    now = seen_at(job)
    if job.run_after > now:
        text = _("It is scheduled {}, at {}.")
        if Execution.objects.is_task_unknown(job):
            text = _(
                "No live worker knows its task. It is tried again {}, at {}. "
                "Deploy workers that have the task, or discard the job."
            )
        elif job.failures:
            text = _("It failed, and is retried {}, at {}.")
        return format_html(text, ago(job.run_after, now), timestamp(job.run_after))
    if not _alive(Process.Kind.DISPATCHER):
        return _(
            "It is due, but no dispatcher is alive to make it ready. "
            "Start one with “manage.py runqueue”."
        )
    return _("It is due. A dispatcher makes it ready within seconds.")


def _blocked(job: Job) -> str:
    semaphore = Semaphore.objects.filter(pk=job.blocked_by).first()
    ahead = count(Job.objects.in_line_before(job))
    if semaphore and semaphore.interval:
        text = _("It is waiting on the limit “{}”: one start every {}. Jobs ahead of it: {}.")
        return format_html(text, semaphore, duration(semaphore.interval), ahead)
    taken = Slot.objects.count_by_key([job.blocked_by or ""])[job.blocked_by or ""]
    text = _("It is waiting on the limit “{}”: {} of {} slots are taken. Jobs ahead of it: {}.")
    slots = semaphore.max_running if semaphore else "–"
    return format_html(text, job.blocked_by, taken, slots, ahead)


def _ready(job: Job) -> str:
    queue = Queue.objects.filter(name=job.queue).first() or Queue(name=job.queue)
    if queue.is_paused(seen_at(job)):
        return _paused(_("Its queue “{}” is paused, {}."), queue)
    if task := TaskState.objects.paused().filter(name=job.task).first():
        return _paused(_("Its task “{}” is paused, {}."), task)
    if text := _full(queue):
        return text
    there = [each for each in Process.objects.workers()[:1000] if each.has(job.queue)]
    serving = [worker for worker in there if not worker.is_quiet]
    if there and not serving:
        text = _(
            "It is ready, but all workers of the queue “{}” are quiet. Resume one on the page "
            "of processes."
        )
        return format_html(text, job.queue)
    if not serving:
        text = _(
            "It is ready, but no live worker serves the queue “{}”. "
            "Start one with “manage.py runqueue”."
        )
        return format_html(text, job.queue)
    ahead, workers = count(Job.objects.ahead_of(job)), len(serving)
    jobs = ngettext("%(count)s job is ahead of it", "%(count)s jobs are ahead of it", ahead) % {
        "count": ahead
    }
    by = ngettext(
        "%(count)d worker serves its queue", "%(count)d workers serve its queue", workers
    ) % {"count": workers}
    return _("It is ready: %(jobs)s, and %(by)s.") % {"jobs": jobs, "by": by}


def _full(queue: Queue) -> str:
    """Return the reason if the queue has reached its limit; otherwise empty."""
    if not (limit := limit_of(queue)):
        return ""
    running = count(Job.objects.running().filter(queue=queue.name), "process_id")
    text = _("It is ready, but its queue “{}” has reached its limit: {} of {} jobs are running.")
    return format_html(text, _linked(queue), running, limit) if running >= limit else ""


def _linked(row: Queue | TaskState) -> str:
    return link(str(row._meta.model_name), row.pk, row)


def _paused(text: str, row: Queue | TaskState) -> str:
    return format_html(text, _linked(row), pause_span(row))


def _alive(kind: Process.Kind) -> list[Process]:
    return list(Process.objects.alive().filter(kind=kind)[:1000])
