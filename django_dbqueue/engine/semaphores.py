"""Lock, read and write semaphores and the slots that running attempts hold of them.

Locks are taken in the order of the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any
from uuid import UUID

from django.db import connections

from ..core.serialization import Json
from ..models import ClaimedJob, Semaphore, Slot
from ..models.expressions import Now
from ..models.locking import by_primary_key, delete, lock_waiting
from ..models.semaphore import SemaphoreQuerySet

_SLOT = ("semaphore", "job", "attempt", "slot_group", "max_running")


class Pruned(Exception):
    """A semaphore was deleted before it was locked.

    Inserting it again now would break the lock order, so the caller starts over.
    """


def rows_of(database: str) -> SemaphoreQuerySet:
    return Semaphore.objects.using(database)


def insert_and_lock(database: str, limits: dict[str, dict[str, Json]]) -> dict[str, Semaphore]:
    """Lock and return the rows of the keys.

    Missing rows are inserted before any row is locked, which avoids deadlocks.
    """
    mysql = connections[database].vendor == "mysql"
    how: Any = (
        {"update_conflicts": True, "update_fields": ["max_running"]}
        if mysql
        else {"ignore_conflicts": True}
    )
    if missing := limits.keys() - set(
        rows_of(database).filter(pk__in=list(limits)).values_list("pk", flat=True)
    ):
        # On MySQL, other transactions wait for a new row that is not committed, so the same
        # statement locks the existing rows. This clears their numbers; adopt() restores them.
        rows_of(database).bulk_create(
            [Semaphore(pk=key) for key in sorted(limits if mysql else missing)], **how
        )
    held = {row.pk: row for row in locked(database, limits)}
    if len(held) < len(limits):
        raise Pruned
    for key, row in held.items():
        row.adopt(limits[key])
    return held


def locked(database: str, keys: Iterable[str]) -> list[Semaphore]:
    """Lock and return the rows of the keys that exist, each with the database's time."""
    return list(lock_waiting(in_order(database, keys)))


def in_order(database: str, keys: Iterable[str]) -> SemaphoreQuerySet:
    rows = rows_of(database).filter(pk__in=list(keys))
    return by_primary_key(rows.order_by("pk").annotate(db_now=Now()))


def store(database: str, rows: list[Semaphore]) -> None:
    rows_of(database).save_locked(rows, ["max_running", "interval", "burst", "earliest", "booked"])


def count_slots(database: str, semaphores: Mapping[str, Semaphore]) -> None:
    """Set ``taken`` and ``smallest`` of these semaphores, by key."""
    for key, number, smallest in Slot.objects.using(database).totals(semaphores):
        semaphores[key].taken, semaphores[key].smallest = number, smallest


def count_lines(database: str, rows: Iterable[Semaphore]) -> dict[str, Semaphore]:
    """Return those of the locked semaphores that jobs wait for a slot of, by key, counted."""
    held = {row.pk: row for row in rows if row.max_running}
    lines = rows_of(database).filter(pk__in=list(held)).waiting().values_list("pk", flat=True)
    found = {key: held[key] for key in lines}
    if found:
        count_slots(database, found)
    return found


def take_slots(database: str, jobs: Iterable[ClaimedJob]) -> None:
    """Take one slot of each semaphore of each job, for the attempt that begins now."""
    rows = [
        (limit["key"], job.pk, job.attempt + 1, job.slot_group, limit["max_running"])
        for job in jobs
        for limit in job.limits
        if "max_running" in limit
    ]
    Slot.objects.using(database).upsert(_SLOT, rows, key=_SLOT[:2], fields=_SLOT[2:])


def delete_slots(database: str, jobs: Iterable[UUID]) -> None:
    delete(Slot.objects.using(database).filter(job__in=list(jobs)))


def breadth(limit: dict[str, Json]) -> float:
    """Sort key: a job waits for its narrowest limit that has no free slot.

    Jobs of a busy account wait for the account's limit, not for that of the bank of all accounts.
    """
    return float(limit.get("max_running", inf))
