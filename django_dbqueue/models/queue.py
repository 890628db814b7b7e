from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections, models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ..core.notify import notify_queues
from ..core.queue_selector import check_name
from .bounded_count import LIMIT, BoundedCount
from .enums import WAITING, Lane, State
from .expressions import Now, composed
from .identifier import IdentifierField
from .job import Job, JobQuerySet
from .pausing import Pausable, PausableQuerySet

# Maximum number of queues notified at once. Workers find the jobs of other queues by polling,
# within their poll interval.
WOKEN = 1000
# Number of lanes whose load is read in one statement.
TOGETHER = 100
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

    def clear(self) -> int:
        """Discard waiting jobs, a thousand at a time; running jobs go on. Return their number."""
        return clear(self.waiting())

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

        Takes a few index probes for each lane, and one statement for very many lanes.
        """
        found: defaultdict[str, Load] = defaultdict(Load)
        jobs = Job.objects.using(self.db)
        for queue, ready, retries, oldest, now in _load_of_lanes(jobs, list(lanes)):
            load = found[queue]
            load.ready = _sum(load.ready, BoundedCount(LIMIT) if ready > LIMIT else ready)
            load.retries += retries
            if oldest and (load.oldest is None or oldest < load.oldest):
                load.oldest, load.age = oldest, max(now - oldest, timedelta())
        # Each state in the order of its index: see count().
        for state, along in (
            (State.SCHEDULED, "run_after"),
            (State.BLOCKED, "blocked_by"),
            (State.RUNNING, "process_id"),
        ):
            for queue, number in _by_queue(jobs.filter(state=state).order_by(along)).items():
                setattr(found[queue], state.value, number)
        for queue, number in _retries(jobs.scheduled()).items():
            found[queue].retries += number
        return found


def _load_of_lanes(jobs: JobQuerySet, lanes: list[Lane]) -> Iterator[tuple[Any, ...]]:
    """Yield the queue of each lane, its ready jobs, their retries, the oldest's time, and now."""
    connection = connections[jobs.db]
    time = models.Value(None, output_field=models.DateTimeField())

    def converted(value: Any) -> Any:
        for convert in connection.ops.get_db_converters(time):
            value = convert(value, time, connection)
        return value

    for start in range(0, len(lanes), TOGETHER):
        part = lanes[start : start + TOGETHER]
        statements, values = [], []
        for place, lane in enumerate(part):
            rows = jobs.of_lane(lane)
            first, tried = rows.values("pk")[: LIMIT + 1], rows.values("attempt", "attempts_before")
            oldest, now = rows.values("run_after"), rows.annotate(now=Now()).values("now")
            of = [composed(each) for each in (first, tried[:LIMIT], oldest[:1], now[:1])]
            statements.append(
                f"SELECT {place}, (SELECT COUNT(*) FROM ({of[0][0]}) AS ready), (SELECT COUNT(*) "
                f"FROM ({of[1][0]}) AS tried WHERE tried.attempt > tried.attempts_before), "
                f"({of[2][0]}), ({of[3][0]})"
            )
            values += [value for _sql, those in of for value in those]
        with connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(statements), values)
            for place, ready, retries, oldest_at, now_at in cursor.fetchall():
                times = converted(oldest_at), converted(now_at)
                yield part[place].queue, ready, retries, *times


def _sum(one: int, other: int) -> int:
    return (
        BoundedCount(LIMIT)
        if BoundedCount in (type(one), type(other)) or one + other > LIMIT
        else one + other
    )


def _by_queue(jobs: models.QuerySet[Job]) -> dict[str, int]:
    found = Counter(jobs.values_list("queue", flat=True)[: LIMIT + 1])
    number = BoundedCount if found.total() > LIMIT else int
    return {queue: number(each) for queue, each in found.items()}


def _retries(waiting: JobQuerySet) -> Counter[str]:
    """Count the retries among the first waiting jobs, for each queue."""
    columns = "queue", "attempt", "attempts_before"
    rows = waiting.order_by("run_after").values_list(*columns)[:LIMIT]
    return Counter(queue for queue, attempt, before in rows if attempt > before)


def clear(jobs: JobQuerySet) -> int:
    """Discard the waiting jobs that were enqueued before the call. Return their number."""
    return sum(_clear(rows) for rows in _in_index_order(jobs))


def _in_index_order(jobs: JobQuerySet) -> Iterator[JobQuerySet]:
    """Yield the waiting jobs, in parts that an index holds in the order of ``run_after``."""
    for lane in jobs.lanes():
        yield jobs.ready().filter(queue=lane.queue, priority=lane.priority)
    yield jobs.filter(state=State.SCHEDULED)
    yield jobs.filter(state=State.BLOCKED)


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
