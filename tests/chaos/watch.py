"""Looks, while harm is done, whether what could go on does."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from django.db import transaction

from django_dbqueue.models import Batch, Job, Process, Queue, Semaphore, Slot
from django_dbqueue.models.expressions import after
from django_dbqueue.models.locking import lock_keys

from ..models import Interval
from .background import Background
from .load import UNSERVED

SAMPLE = 0.5
# In seconds: the longest between two sweeps of a dispatcher; and what a process that beats needs on a busy machine, with connections
# that are killed under it, to do what it has found, and to write an outcome.
SWEEP, REACTION, WRITING = 2.4, 4.0, 3.0
# What stood so long is told as it happens.
LONG = 3.0
# With fewer running, workers have nothing to do: a host has eight threads.
FEW = 4
# So many rows of a kind are looked at.
FIRST = 50


class Found(NamedTuple):
    """Work that is due. ``can_now``: a process that could do it is alive, and no other transaction holds its rows."""

    what: str
    may_stand: float
    can_now: bool


class Watch(Background):
    """``idle``: what could go on and did not, and for how many seconds. ``alive``: whether a worker and a dispatcher beat.

    Only time counts in which a process that beats could have gone on with it. It is counted in looks, which come later where
    the machine is busy, and none of which succeeds while the database is away.
    """

    def __init__(self, dead_after: float) -> None:
        super().__init__()
        # After one beat and a half, a process may be dead or cut off.
        self._fresh = dead_after / 4
        self._reaction, self._writing = REACTION + self._fresh, WRITING + self._fresh
        # Others declare it dead, once they have watched for long enough themselves.
        self._recovery = dead_after * 5 / 3 + SWEEP + REACTION
        self._stood: dict[str, float] = {}
        self.alive = False
        self.samples = 0
        self.longest: dict[str, float] = {}
        self.idle: dict[str, float] = {}

    def pause(self) -> float:
        return SAMPLE

    def refused(self) -> None:
        """Nobody is declared dead before all have had time to beat again."""
        self.alive = False
        self._stood = {
            what: seconds for what, seconds in self._stood.items() if not what.startswith("left")
        }

    def act(self) -> None:
        found = {each.what: each for each in self._find()}
        self.samples += 1
        for what in self._stood.keys() - found.keys():
            if self._stood[what] > LONG:
                _tell(f"{what} stood for {self._stood[what]:g} s")
        self._stood = {
            what: self._stood[what] + SAMPLE * each.can_now if what in self._stood else 0.0
            for what, each in found.items()
        }
        for what, seconds in self._stood.items():
            kind = what.partition(":")[0]
            self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)
            if seconds > found[what].may_stand:
                if what not in self.idle:
                    _tell(f"{what} stands for {seconds:g} s")
                self.idle[what] = seconds

    def _find(self) -> Iterator[Found]:
        fresh = dict(
            Process.objects.filter(heartbeat_at__gt=after(-self._fresh)).values_list("pk", "kind")
        )
        works, dispatches = (
            kind in fresh.values() for kind in (Process.Kind.WORKER, Process.Kind.DISPATCHER)
        )
        self.alive = works and dispatches
        ready, blocked = _first_of_lines()
        due = list(Job.objects.due().order_by("run_after").values_list("pk", flat=True)[:FIRST])
        ended, left = _ended_and_running(fresh), _left(fresh)
        batches = list(Batch.objects.due().values_list("pk", flat=True)[:FIRST])
        free = _unlocked(
            Job.objects.all(), [*(job.pk for job in [*ready, *blocked]), *due, *ended, *left]
        )
        free_batches = _unlocked(Batch.objects.all(), batches)
        # Outcomes, and the rounds of a dispatcher, wait for all semaphores that they need together.
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
            yield Found(f"ended, not written: {pk}", self._writing, semaphores and pk in free)
        for pk in left:
            yield Found(
                f"left by a dead process: {pk}",
                self._recovery,
                dispatches and semaphores and pk in free,
            )


def _tell(what: str) -> None:
    print(f"    {time.strftime('%H:%M:%S')}  {what}", flush=True)


def _first_of_lines() -> tuple[list[Job], list[Job]]:
    """The first that may run in each queue, if workers have room; and in the line of each limit, if it has a slot."""
    closed = [UNSERVED, *Queue.objects.paused().values_list("name", flat=True)]
    waiting = (
        Job.objects.filter(state__in=["ready", "blocked"])
        .exclude(queue__in=closed)
        .defer("args", "kwargs")
    )
    are_few = Job.objects.running().count() < FEW
    rows: list[Any] = [job for job in waiting[:5000] if are_few or job.state == "blocked"]
    keys = {each["key"] for job in rows for each in job.limits or ()}
    slots = {key: SimpleNamespace(taken=0, smallest=None) for key in keys}
    for key, taken, smallest in Slot.objects.totals(slots):
        slots[key].taken, slots[key].smallest = taken, smallest

    def has_room(limit: dict[str, Any]) -> bool:
        taken = slots[limit["key"]]
        return taken.taken < min(limit["most"], taken.smallest or limit["most"])

    # While others behind it wait, it changes with each slot that is given out.
    first: dict[Any, Job] = {}
    for job in sorted(rows, key=_place):
        if all(map(has_room, job.limits or ())):
            first.setdefault((job.state, job.blocked_by or job.queue), job)
    return tuple(
        [job for job in first.values() if job.state == state] for state in ("ready", "blocked")
    )


def _place(job: Job) -> tuple[Any, ...]:
    """In its lane, or in its line."""
    return job.state, -job.priority, job.run_after if job.state == "ready" else job.pk, job.pk


def _ended_and_running(processes: Collection[int]) -> list[Any]:
    """Jobs that one of the processes runs by their rows, and whose attempts have written that they have ended."""
    rows = Job.objects.running().filter(process__in=processes).values_list("pk", "attempt")
    running = {(str(pk), attempt): pk for pk, attempt in rows}
    ended = Interval.objects.filter(
        job__in=[pk for pk, _attempt in running], ended_at__isnull=False
    )
    return [running[fence] for fence in ended.values_list("job", "attempt") if fence in running]


def _left(processes: Collection[int]) -> list[Any]:
    """Jobs that none of the processes runs."""
    return list(
        Job.objects.running().exclude(process__in=processes).values_list("pk", flat=True)[:FIRST]
    )


def _unlocked(rows: Any, keys: Collection[Any]) -> set[Any]:
    """Those whose rows nobody holds at this moment."""
    if not keys:
        return set()
    with transaction.atomic():
        return set(lock_keys(rows, sorted(set(keys))))
