"""Why a job does not run yet, in one sentence, from a few looks into indexes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models import Job, Process, Queue
from ..models.counts import count
from ..models.states import State
from ..selector import QueueSelector
from .looks import ago, moment


def why_waiting(job: Job) -> str:
    """Nothing for a job that does not wait."""
    reasons: dict[str, Callable[[Job], str]] = {
        State.SCHEDULED: _scheduled,
        State.BLOCKED: lambda job: _("It waits for a slot of its concurrency key."),
        State.READY: _ready,
    }
    return reasons[job.state](job) if job.state in reasons else ""


def _scheduled(job: Job) -> str:
    if job.run_after - job.seen_at > timedelta():  # type: ignore[attr-defined]
        said = _("It failed before, and is tried again {}, at {}.") if job.failures else _("It is scheduled {}, at {}.")
        return format_html(said, ago(job.run_after, job.seen_at), moment(job.run_after))  # type: ignore[attr-defined]
    if not _alive(Process.Kind.DISPATCHER):
        return _("It is due, and no dispatcher is alive to make it ready. Start one with “manage.py runqueue”.")
    return _("It is due, and a dispatcher makes it ready in a moment.")


def _ready(job: Job) -> str:
    if paused := Queue.objects.paused().filter(name=job.queue).first():
        address = reverse("admin:dbqueue_queue_change", args=[quote(paused.pk)])
        said = _("Its queue “{}” is paused, since {}.")
        return format_html(said, format_html('<a href="{}">{}</a>', address, paused), moment(paused.paused_at))
    serving = [worker for worker in _alive(Process.Kind.WORKER) if _serves(worker, job.queue)]
    if not serving:
        said = _("It is ready, and no worker that serves the queue “{}” is alive. Start one with “manage.py runqueue”.")
        return format_html(said, job.queue)
    ahead, workers = count(Job.objects.ahead_of(job)), len(serving)
    jobs = ngettext("%(count)s job is ahead of it", "%(count)s jobs are ahead of it", ahead) % {"count": ahead}
    by = ngettext("%(count)d worker serves its queue", "%(count)d workers serve its queue", workers) % {"count": workers}
    return _("It is ready: %(jobs)s, and %(by)s.") % {"jobs": jobs, "by": by}


def _alive(kind: Process.Kind) -> list[Process]:
    return list(Process.objects.alive().filter(kind=kind)[:1000])


def _serves(worker: Process, queue: str) -> bool:
    patterns = tuple(name.strip() for name in str(worker.details.get("queues", "*")).split(","))
    return QueueSelector(patterns).rank(queue) is not None
