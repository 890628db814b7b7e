from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.db import models
from django.utils.translation import gettext_lazy as _

from .counts import LIMIT, Many, count
from .expressions import Now
from .job import Job
from .states import Lane, State


@dataclass
class Load:
    """What a queue holds, as far as it can be counted cheaply, and since when its oldest ready job could have run."""

    ready: int = 0
    scheduled: int = 0
    running: int = 0
    oldest: datetime | None = None


class QueueQuerySet(models.QuerySet["Queue"]):
    def paused(self) -> QueueQuerySet:
        return self.filter(paused_at__isnull=False)

    def pause(self) -> int:
        """No worker claims from them until they are resumed. Returns how many were not paused before."""
        return self.unpaused().update(paused_at=Now())

    def resume(self) -> int:
        """Workers claim from them again. Returns how many were paused."""
        return self.paused().update(paused_at=None)

    def unpaused(self) -> QueueQuerySet:
        return self.filter(paused_at__isnull=True)

    def loads(self, lanes: Iterable[Lane]) -> dict[str, Load]:
        """What the queues hold that have these lanes, or scheduled or running jobs: a few looks into indexes for each lane."""
        found: defaultdict[str, Load] = defaultdict(Load)
        jobs = Job.objects.using(self._db)  # type: ignore[attr-defined]
        for lane in lanes:
            waiting, load = jobs.ready().filter(queue=lane.queue, priority=lane.priority), found[lane.queue]
            load.ready = _sum(load.ready, count(waiting))
            first = waiting.order_by("run_after").values_list("run_after", flat=True).first()
            load.oldest = min(filter(None, (load.oldest, first)), default=None)
        for state in (State.SCHEDULED, State.RUNNING):
            for queue, number in _by_queue(jobs.filter(state=state)).items():
                setattr(found[queue], state.value, number)
        return found

    def know(self, names: Iterable[str]) -> None:
        """Have a row for each of the names, so that operators see the queue and can pause it."""
        new = set(names) - set(self.filter(name__in=list(names)).values_list("name", flat=True))
        self.bulk_create([Queue(name=name) for name in sorted(new)], ignore_conflicts=True)


def _sum(one: int, other: int) -> int:
    return Many(LIMIT) if Many in (type(one), type(other)) or one + other > LIMIT else one + other


def _by_queue(jobs: models.QuerySet[Job]) -> dict[str, int]:
    found = Counter(jobs.values_list("queue", flat=True)[: LIMIT + 1])
    number = Many if found.total() > LIMIT else int
    return {queue: number(each) for queue, each in found.items()}


class Queue(models.Model):
    """A name that jobs wait under, and whether they may be claimed."""

    name = models.CharField(_("name"), max_length=100, primary_key=True)
    paused_at = models.DateTimeField(_("paused at"), null=True, blank=True)

    objects = QueueQuerySet.as_manager()

    class Meta:
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name
