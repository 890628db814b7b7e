"""Sweeps of the dispatcher over limits: what no claim and no settlement has unblocked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic

from django.db.models import Count, Exists, F, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce

from ..core.transactions import writing
from ..models import Job, Slot
from ..models.enums import State
from ..models.expressions import Now, now_plus
from ..models.locking import lock
from ..models.semaphore import RESERVED_AHEAD_SECONDS
from .ready_jobs import ReadyJobs
from .semaphores import count_lines, in_order, locked, rows_of, store
from .unblock import assign_times, unblock

# Number of semaphores that a sweep locks together.
AT_ONCE = 50
# Seconds after which a sweep begins no further part.
LONGEST_SWEEP = 0.5


def sweep(database: str, limit: int, ready: ReadyJobs) -> list[str]:
    """Unblock jobs of semaphores with free slots and waiting jobs, of each kind of job.

    ready: the ready jobs as the caller's sweeps have seen them.
    """
    # In random order: if there are more than ``limit``, each semaphore has its turn.
    found = (
        rows_of(database)
        .waiting()
        .alias(slots_taken=_slots_taken())
        .filter(max_running__gt=F("slots_taken"))
        .order_by("?")
    )
    if not (keys := list(found.values_list("pk", flat=True)[:limit])):
        return []
    queues, kinds = list[str](), ready.count()
    for part in _parts(keys):
        with writing(database, savepoint=False):
            # Locked ones are passed over: their transactions unblock jobs themselves.
            lines = count_lines(database, lock(in_order(database, part)))
            free = {key: row.free for key, row in lines.items()}
            queues += unblock(database, free, lines, kinds)
    return queues


def _slots_taken() -> Coalesce:
    slots = (
        Slot.objects.taken()
        .filter(semaphore=OuterRef("pk"))
        .order_by()
        .values("semaphore")
        .annotate(number=Count("slot_group", distinct=True))
    )
    return Coalesce(Subquery(slots.values("number")), 0)


def unblock_orphans(database: str, limit: int, ready: ReadyJobs) -> list[str]:
    """Unblock jobs whose semaphore row is missing, as sweep() does. Return the queue of each.

    The job whose claim would have inserted the row was discarded before that claim. This reads
    all waiting jobs; with very many, it is not for every sweep.
    """
    lost = (
        Job.objects.using(database)
        .filter(state=State.BLOCKED)
        .exclude(Exists(rows_of(database).filter(pk=OuterRef("blocked_by"))))
        .order_by("blocked_by")
    )
    keys = [key for key in lost.values_list("blocked_by", flat=True).distinct()[:limit] if key]
    if not keys:
        return []
    queues, kinds = list[str](), ready.count()
    for part in _parts(keys):
        free = {}
        for key in part:
            waiting = Job.objects.using(database).waiting_for(key)
            first = waiting.values_list("limits", flat=True)[:1]
            own = {each["key"]: each for limits in first for each in limits or ()}
            free[key] = own.get(key, {}).get("max_running", 1)
        with writing(database):
            queues += unblock(database, free, {}, kinds)
    return queues


def reserve_times(database: str) -> bool:
    """Reserve start times of the next seconds for jobs that wait for a rate.

    Return whether some semaphores are left to the next sweep.
    """
    soon = rows_of(database).filter(booked__lt=now_plus(RESERVED_AHEAD_SECONDS)).order_by("booked")
    left = list(soon.waiting().values_list("pk", flat=True))
    for part in _parts(left):
        with writing(database, savepoint=False):
            assign_times(database, list(lock(in_order(database, part))))
        left = left[len(part) :]
    return bool(left)


def replan_rates(database: str) -> None:
    """Correct rates whose times are later than the rate allows.

    They were reserved while the database's clock was ahead.
    """
    is_late = Q(earliest__gt=Now()) | Q(booked__gt=now_plus(RESERVED_AHEAD_SECONDS))
    late = rows_of(database).filter(is_late).annotate(db_now=Now())
    ahead = [row.pk for row in late if row.is_ahead]
    for start in range(0, len(ahead), AT_ONCE):
        with writing(database):
            rows = locked(database, ahead[start : start + AT_ONCE])
            store(database, [row for row in rows if row.come_back()])


def _parts(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield semaphores to sweep in parts, until this has taken too long for the dispatcher."""
    end = monotonic() + LONGEST_SWEEP
    for start in range(0, len(keys), AT_ONCE):
        yield keys[start : start + AT_ONCE]
        if monotonic() > end:
            return
