"""Watch for stalled work during the faults."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from django.db import transaction

from django_dbqueue.models import Batch, Job, Process, Queue, Semaphore, Slot
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.models.locking import lock_keys

from ..models import Interval
from .background import Background
from .load import UNSERVED

SAMPLE = 0.5
# In seconds: the longest interval of sweeps; and the time that a live process needs on a busy
# machine, with killed connections, to do found work and to write a result.
SWEEP, REACTION, WRITING = 2.4, 4.0, 3.0
# Stalls of this length are printed as they happen.
LONG = 3.0
# With fewer running jobs, workers are idle: a host has eight threads.
IDLE_BELOW = 4
# The number of rows that are read of each kind.
MAX_ROWS = 50


class Found(NamedTuple):
    """Pending work. ``can_now``: a responsible process is alive, and no row is locked."""

    what: str
    allowed: float
    can_now: bool


class Watch(Background):
    """``stalled``: seconds by stalled work. ``alive``: a worker and a dispatcher send heartbeats.

    Only time with a responsible live process counts. Time is counted in samples, which come later
    on a busy machine and fail while the database is down.
    """

    def __init__(self, dead_after: float) -> None:
        super().__init__()
        # After one and a half heartbeat intervals, a process may be dead or cut off.
        self._fresh = dead_after / 4
        self._reaction, self._writing = REACTION + self._fresh, WRITING + self._fresh
        # Other processes declare it dead, once they have observed for long enough.
        self._recovery = dead_after * 5 / 3 + SWEEP + REACTION
        self._stalled_for: dict[str, float] = {}
        self.alive = False
        self.samples = 0
        self.longest: dict[str, float] = {}
        self.stalled: dict[str, float] = {}

    def pause(self) -> float:
        return SAMPLE

    def refused(self) -> None:
        """Restart the time for recovery: all processes first need time for a heartbeat."""
        self.alive = False
        self._stalled_for = {
            what: seconds
            for what, seconds in self._stalled_for.items()
            if not what.startswith("not recovered")
        }

    def act(self) -> None:
        found = {each.what: each for each in self._find()}
        self.samples += 1
        for what in self._stalled_for.keys() - found.keys():
            if self._stalled_for[what] > LONG:
                _print(f"{what} stalled for {self._stalled_for[what]:g} s")
        self._stalled_for = {
            what: self._stalled_for[what] + SAMPLE * each.can_now
            if what in self._stalled_for
            else 0.0
            for what, each in found.items()
        }
        for what, seconds in self._stalled_for.items():
            kind = what.partition(":")[0]
            self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)
            if seconds > found[what].allowed:
                if what not in self.stalled:
                    _print(f"{what} has stalled for {seconds:g} s")
                self.stalled[what] = seconds

    def _find(self) -> Iterator[Found]:
        fresh = dict(
            Process.objects.filter(heartbeat_at__gt=now_plus(-self._fresh)).values_list(
                "pk", "kind"
            )
        )
        works, dispatches = (
            kind in fresh.values() for kind in (Process.Kind.WORKER, Process.Kind.DISPATCHER)
        )
        self.alive = works and dispatches
        ready, blocked = _first_waiters()
        due = list(Job.objects.due().order_by("run_after").values_list("pk", flat=True)[:MAX_ROWS])
        ended, left = _unsettled(fresh), _unrecovered(fresh)
        batches = list(Batch.objects.due().values_list("pk", flat=True)[:MAX_ROWS])
        free = _unlocked(
            Job.objects.all(), [*(job.pk for job in [*ready, *blocked]), *due, *ended, *left]
        )
        free_batches = _unlocked(Batch.objects.all(), batches)
        # Results and dispatcher rounds wait for all semaphores that they need together.
        keys = list(Semaphore.objects.values_list("pk", flat=True))
        semaphores = len(_unlocked(Semaphore.objects.all(), keys)) == len(keys)
        for job in ready:
            yield Found(
                f"ready: {job.pk} {job.task}",
                self._reaction,
                works and semaphores and job.pk in free,
            )
        for job in blocked:
            can = dispatches and semaphores and job.pk in free
            yield Found(f"slot free: {job.pk} {job.task}", SWEEP + self._reaction, can)
        for pk in due:
            yield Found(
                f"due: {pk}", SWEEP + self._reaction, dispatches and semaphores and pk in free
            )
        for pk in batches:
            yield Found(
                f"batch: {pk}",
                SWEEP + self._reaction,
                dispatches and semaphores and pk in free_batches,
            )
        for pk in ended:
            yield Found(f"not settled: {pk}", self._writing, semaphores and pk in free)
        for pk in left:
            yield Found(
                f"not recovered: {pk}",
                self._recovery,
                dispatches and semaphores and pk in free,
            )


def _print(what: str) -> None:
    print(f"    {time.strftime('%H:%M:%S')}  {what}", flush=True)


def _first_waiters() -> tuple[list[Job], list[Job]]:
    """Return the first startable job of each queue, and of each limit with a slot."""
    closed = [UNSERVED, *Queue.objects.paused().values_list("name", flat=True)]
    waiting = (
        Job.objects.filter(state__in=["ready", "blocked"])
        .exclude(queue__in=closed)
        .defer("args", "kwargs")
    )
    are_few = Job.objects.running().count() < IDLE_BELOW
    rows: list[Any] = [job for job in waiting[:5000] if are_few or job.state == "blocked"]
    keys = {each["key"] for job in rows for each in job.limits or ()}
    slots = {key: SimpleNamespace(taken=0, smallest=None) for key in keys}
    for key, taken, smallest in Slot.objects.totals(slots):
        slots[key].taken, slots[key].smallest = taken, smallest

    def has_room(limit: dict[str, Any]) -> bool:
        taken = slots[limit["key"]]
        return taken.taken < min(limit["max_running"], taken.smallest or limit["max_running"])

    # While others wait behind it, the first one changes with each acquired slot.
    first: dict[Any, Job] = {}
    for job in sorted(rows, key=_position):
        if all(map(has_room, job.limits or ())):
            first.setdefault((job.state, job.blocked_by or job.queue), job)
    return tuple(
        [job for job in first.values() if job.state == state] for state in ("ready", "blocked")
    )


def _position(job: Job) -> tuple[Any, ...]:
    """Return the position in the lane, or among the waiters of a limit."""
    return job.state, -job.priority, job.run_after if job.state == "ready" else job.pk, job.pk


def _unsettled(processes: Collection[int]) -> list[Any]:
    """Return running jobs of these processes whose attempts have recorded their end."""
    rows = Job.objects.running().filter(process__in=processes).values_list("pk", "attempt")
    running = {(str(pk), attempt): pk for pk, attempt in rows}
    ended = Interval.objects.filter(
        job__in=[pk for pk, _attempt in running], ended_at__isnull=False
    )
    return [running[fence] for fence in ended.values_list("job", "attempt") if fence in running]


def _unrecovered(processes: Collection[int]) -> list[Any]:
    """Return running jobs of no live process."""
    return list(
        Job.objects.running().exclude(process__in=processes).values_list("pk", flat=True)[:MAX_ROWS]
    )


def _unlocked(rows: Any, keys: Collection[Any]) -> set[Any]:
    """Return the keys whose rows are not locked."""
    if not keys:
        return set()
    with transaction.atomic():
        return set(lock_keys(rows, sorted(set(keys))))
