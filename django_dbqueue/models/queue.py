from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ..core.known_queues import check_known
from ..core.notify import notify_queues
from ..core.queue_selector import check_name
from .bounded_count import LIMIT, BoundedCount
from .enums import WAITING, Lane, State
from .expressions import Now, by_index, composed
from .identifier import IdentifierField
from .job import Job, JobQuerySet
from .pausing import Pausable, PausableQuerySet
from .union import union_all

# Maximum number of queues notified at once. Workers find the jobs of other queues by polling,
# within their poll interval.
WOKEN = 1000
# Number of jobs that one statement counts for the load of queues.
MOST_COUNTED = 100_000
# The states that are counted for all queues together, and the order of the index that holds them:
# see count().
OTHER_STATES = {
    State.SCHEDULED: "run_after",
    State.BLOCKED: "blocked_by",
    State.RUNNING: "process_id",
}
_COUNTED = ("queue", "attempt", "attempts_before")
_COUNT = (
    "SELECT {place}, queue, COUNT(*), SUM(CASE WHEN attempt > attempts_before THEN 1 ELSE 0 END) "
    "FROM ({rows}) AS part GROUP BY queue"
)
# Number of jobs that one statement of clear() discards.
CLEARED_TOGETHER = 1000


@dataclass
class Load:
    """Number of jobs by state, as far as they can be counted cheaply.

    oldest: the time since which the oldest ready job could have run.
    age: the time since then, by the database's clock; zero if no job is ready.
    retries: ready and scheduled jobs that have been tried before in this run, among the first ones.
    """

    ready: int = 0
    scheduled: int = 0
    blocked: int = 0
    running: int = 0
    oldest: datetime | None = None
    age: timedelta = timedelta()
    retries: int = 0


class QueueQuerySet(PausableQuerySet["Queue"]):
    """Queues: pause, clear, restrict, and their load."""

    def named(self, *names: str) -> QueueQuerySet:
        """Filter by name, and insert missing rows first.

        Raises ValueError for an invalid name, and for a queue without a row that is not in
        ``QUEUES``.
        """
        for name in names:
            check_name(name)
        for name in set(names) - set(self.filter(name__in=names).values_list("name", flat=True)):
            check_known(self.db, name)
        return super().named(*names)

    def clear(self) -> int:
        """Discard waiting jobs, a thousand at a time; running jobs go on. Return their number."""
        return sum(_clear(jobs) for jobs in self._waiting_in_index_order())

    def resume(self) -> int:
        """Let workers claim again, and wake idle ones. Return how many queues were paused."""
        names = list(self.paused().values_list("name", flat=True)[:WOKEN])
        resumed = super().resume()
        notify_queues(self.db, names)
        return resumed

    def waiting(self) -> JobQuerySet:
        """Return the waiting jobs of these queues."""
        names = list(self.values_list("name", flat=True))
        # One condition per state: each state has its own index, and PostgreSQL would use none of
        # them for a list of states.
        states = [Q(state=state, queue__in=names) for state in WAITING]
        return Job.objects.using(self.db).filter(states[0] | states[1] | states[2])

    def _waiting_in_index_order(self) -> Iterator[JobQuerySet]:
        """Yield the waiting jobs, in parts that an index holds in the order of ``run_after``."""
        jobs, names = Job.objects.using(self.db), list(self.values_list("name", flat=True))
        for lane in jobs.lanes(names):
            yield jobs.ready().filter(queue=lane.queue, priority=lane.priority)
        for state in (State.SCHEDULED, State.BLOCKED):
            yield jobs.filter(state=state, queue__in=names)

    def restrict(self, limit: int | None) -> int:
        """Set the number of jobs that may run at a time in each queue, over all hosts.

        None restores the limit from the settings. Return the number of changed queues. Raises
        ValueError unless ``limit`` is a whole number of at least 1.
        """
        if limit is not None and (type(limit) is not int or not 1 <= limit < 10**6):
            raise ValueError(
                f"limit={limit!r} is not a whole number of at least 1. "
                "Pause the queue if none is to run."
            )
        others = self.exclude(limit__isnull=True) if limit is None else self.exclude(limit=limit)
        return others.update(limit=limit)

    def load(self, queue: str) -> Load:
        """Return the load of one queue. The cost does not depend on the number of jobs."""
        lanes = Job.objects.using(self.db).lanes([queue])
        return self.loads(lanes).get(queue, Load())

    def loads(self, lanes: Iterable[Lane]) -> dict[str, Load]:
        """Return the load of queues that have these lanes, or jobs in other states than READY.

        Takes two statements for hundreds of lanes, and reads MOST_COUNTED jobs. Of many queues,
        fewer jobs of each are counted.
        """
        found: defaultdict[str, Load] = defaultdict(Load)
        jobs, of = Job.objects.using(self.db), list(lanes)
        for lane, (oldest, now) in jobs.oldest(of).items():
            load = found[lane.queue]
            if load.oldest is None or oldest < load.oldest:
                load.oldest, load.age = oldest, max(now - oldest, timedelta())
        for state, queue, number, retries in _counted(jobs, {lane.queue for lane in of}):
            load = found[queue]
            setattr(load, state.value, number)
            if state in (State.READY, State.SCHEDULED):
                load.retries += retries
        return found


def _counted(jobs: JobQuerySet, queues: Collection[str]) -> Iterator[tuple[State, str, int, int]]:
    """Yield the number of jobs of each queue in each state, and of retries among them."""
    most_ready = min(LIMIT, (MOST_COUNTED - len(OTHER_STATES) * LIMIT) // max(1, len(queues)))
    parts = [
        (State.READY, most_ready, _ready(jobs, queue).values(*_COUNTED)) for queue in sorted(queues)
    ]
    parts += [
        (state, LIMIT, jobs.filter(state=state).order_by(along).values(*_COUNTED))
        for state, along in OTHER_STATES.items()
    ]
    selects = []
    for place, (_state, most, rows) in enumerate(parts):
        sql, values = composed(rows[: most + 1])
        selects.append((_COUNT.format(place=place, rows=sql), values))
    by_part: defaultdict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for place, queue, number, retries in union_all(jobs.db, selects):
        by_part[place].append((queue, number, int(retries)))
    for place, counted in by_part.items():
        state, most, _rows = parts[place]
        is_bounded = sum(number for _queue, number, _retries in counted) > most
        for queue, number, retries in counted:
            shown = BoundedCount(min(number, most)) if is_bounded else number
            yield state, queue, shown, retries


def _ready(jobs: JobQuerySet, queue: str) -> JobQuerySet:
    rows = jobs.ready().filter(queue=queue).order_by("priority", "run_after", "id")
    return by_index(rows, "dbqueue_job_lane")


def _clear(rows: JobQuerySet) -> int:
    cleared, rest = 0, rows
    while found := list(
        rest.order_by("run_after").values_list("pk", "run_after", Now())[:CLEARED_TOGETHER]
    ):
        cleared += rows.filter(pk__in=[pk for pk, after, now in found]).discard()
        if rest is rows:
            # Jobs enqueued from here on are left alone: otherwise the loop might not end.
            rows = rows.filter(enqueued_at__lte=found[0][2])
        # Not from the beginning: it may be full of other queues' jobs, and on PostgreSQL of the
        # dead rows of this loop. SQLite compares times as text: a time that it has written itself,
        # to the millisecond, is less than the same time passed as a parameter.
        rest = rows.filter(run_after__gte=found[-1][1] - timedelta(milliseconds=1))
    return cleared


class Queue(Pausable):
    """A name that jobs wait under, and whether they may be claimed."""

    name = IdentifierField(_("name"), max_length=100, primary_key=True)
    limit = models.PositiveIntegerField(
        _("limit"),
        null=True,
        blank=True,
        help_text=_(
            "Maximum number of jobs that run at a time. Empty: the limit from the settings."
        ),
    )

    objects = QueueQuerySet.as_manager()

    class Meta:
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return str(self.name)

    @classmethod
    def check_name(cls, name: object) -> None:
        check_name(name)
