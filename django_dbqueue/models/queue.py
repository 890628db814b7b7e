from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, models, router
from django.db.models import F, Q, Value
from django.db.models.functions import Coalesce, NullIf
from django.utils.translation import gettext_lazy as _

from ..core.notify import notify_queues
from ..core.queue_selector import check_name
from .clearing import clear
from .cluster import certify
from .counts import LIMIT, BoundedCount, count
from .expressions import Now
from .identifier import IdentifierField
from .job import Job
from .jobs import JobQuerySet
from .pausing import Pausable, PausableQuerySet
from .states import WAITING, Lane, State

# Maximum number of queues notified at once. Workers find the jobs of other queues by polling,
# within their poll interval.
WOKEN = 1000


@dataclass
class Load:
    """Number of jobs by state, as far as they can be counted cheaply.

    oldest: the time since which the oldest ready job could have run.
    age: the time since then, by the database's clock; zero if no job is ready.
    """

    ready: int = 0
    scheduled: int = 0
    blocked: int = 0
    running: int = 0
    oldest: datetime | None = None
    age: timedelta = timedelta()


class QueueQuerySet(PausableQuerySet["Queue"]):
    def clear(self) -> int:
        """Discard waiting jobs, a thousand at a time; running jobs go on. Return their number."""
        return clear(self.waiting())

    def resume(self) -> int:
        """Let workers claim again, and wake idle ones. Return how many queues were paused."""
        names = list(self.paused().values_list("name", flat=True)[:WOKEN])
        resumed = super().resume()
        notify_queues(router.db_for_write(self.model) if self._db is None else self._db, names)  # type: ignore[attr-defined]
        return resumed

    def waiting(self) -> JobQuerySet:
        """Return the waiting jobs of these queues."""
        names = list(self.values_list("name", flat=True))
        # One condition per state: each state has its own index, and PostgreSQL would use none of
        # them for a list of states.
        states = [Q(state=state, queue__in=names) for state in WAITING]
        return Job.objects.using(self._db).filter(states[0] | states[1] | states[2])  # type: ignore[attr-defined]

    def room(self, queue: str, limit: int) -> int:
        """Lock a queue and return how many more of its jobs may run.

        The caller keeps the lock until the end of its transaction.
        """
        row = self.filter(name=queue)
        list(row.select_for_update() if connections[self.db].features.has_select_for_update else row)
        certify(row, {"limit": Coalesce(F("limit"), 0) + 1}, {"limit": NullIf(F("limit") - 1, Value(0))})
        return limit - Job.objects.using(self.db).running().filter(queue=queue).count()

    def restrict(self, limit: int | None) -> int:
        """Set the number of jobs that may run at a time in each queue, over all hosts.

        None restores the limit from the settings. Return the number of changed queues. Raises
        ValueError unless ``limit`` is a whole number of at least 1.
        """
        if limit is not None and (type(limit) is not int or not 1 <= limit < 10**6):
            raise ValueError(f"limit={limit!r} is not a whole number of at least 1. Pause the queue if none is to run.")
        others = self.exclude(limit__isnull=True) if limit is None else self.exclude(limit=limit)
        return others.update(limit=limit)

    def load(self, queue: str) -> Load:
        """Return the load of one queue. The cost does not depend on the number of jobs."""
        lanes = Job.objects.using(self._db).lanes([queue])  # type: ignore[attr-defined]
        return self.loads(lanes).get(queue, Load())

    def loads(self, lanes: Iterable[Lane]) -> dict[str, Load]:
        """Return the load of queues that have these lanes, or jobs in other states than READY.

        Takes a few index probes for each lane.
        """
        found: defaultdict[str, Load] = defaultdict(Load)
        jobs = Job.objects.using(self._db)  # type: ignore[attr-defined]
        for lane in lanes:
            waiting, load = jobs.ready().filter(queue=lane.queue, priority=lane.priority), found[lane.queue]
            load.ready = _sum(load.ready, count(waiting, "run_after"))
            first = waiting.order_by("run_after").values_list("run_after", Now()).first()
            if first and (load.oldest is None or first[0] < load.oldest):
                load.oldest, load.age = first[0], max(first[1] - first[0], timedelta())
        # Each state in the order of its index: see count().
        for state, along in ((State.SCHEDULED, "run_after"), (State.BLOCKED, "blocked_by"), (State.RUNNING, "process_id")):
            for queue, number in _by_queue(jobs.filter(state=state).order_by(along)).items():
                setattr(found[queue], state.value, number)
        return found


def _sum(one: int, other: int) -> int:
    return BoundedCount(LIMIT) if BoundedCount in (type(one), type(other)) or one + other > LIMIT else one + other


def _by_queue(jobs: models.QuerySet[Job]) -> dict[str, int]:
    found = Counter(jobs.values_list("queue", flat=True)[: LIMIT + 1])
    number = BoundedCount if found.total() > LIMIT else int
    return {queue: number(each) for queue, each in found.items()}


class Queue(Pausable):
    """A name that jobs wait under, and whether they may be claimed."""

    name = IdentifierField(_("name"), max_length=100, primary_key=True)
    limit = models.PositiveIntegerField(
        _("limit"), null=True, blank=True, help_text=_("So many of its jobs run at a time. Empty: as the settings say.")
    )

    objects = QueueQuerySet.as_manager()

    class Meta:
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.name)

    @classmethod
    def check_name(cls, name: Any) -> None:
        check_name(name)
