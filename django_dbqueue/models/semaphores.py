"""Who may run: what can be done to the rows that limit jobs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.models import Count, Exists, F, OuterRef, Q, Subquery
from django.db.models.functions import Coalesce

from ..ids import uuid7
from .expressions import Now, after, lock
from .primary import PrimaryQuerySet
from .series import InARow, alone, next_in_line
from .slot import Slot
from .states import State

if TYPE_CHECKING:
    from .semaphore import Semaphore

# Of so many keys a call that enqueues looks whether there is a line.
FEW = 20
# So far ahead, in seconds, jobs get their times. Until then, priority decides who is next.
AHEAD = 5.0


class SemaphoreQuerySet(PrimaryQuerySet["Semaphore"]):
    """Whoever decides who runs holds the locks of the semaphores in question, taken in the order of their keys.

    The lock is taken by one statement and the slots are counted by the next: in one statement both would see the same
    moment, and six claimers ran 4 to 12 jobs with a limit of 2.
    """

    def acquire(self, jobs: Sequence[Any], limit: int, in_a_row: InARow = alone) -> list[Any]:
        """Of locked ready jobs that are to be claimed, those that may run now. The others are BLOCKED, or ``called_off``.

        Up to the limit, those follow that are next in line, and run one after the other with one of them.
        """
        limited = [job for job in jobs if job.limits]
        semaphores = self._hold({limit["key"]: limit for job in limited for limit in job.limits})
        taken = Slot.objects.using(self.db).count_by_key(semaphores)
        admitted = [job for job in limited if _admit(job, semaphores, taken)]
        self._store([each for each in semaphores.values() if each.is_changed])
        blocked = defaultdict(list)
        for job in limited:
            if job.blocked_by:
                blocked[job.blocked_by].append(job.pk)
        for key, ids in blocked.items():
            self._jobs().filter(pk__in=ids, state=State.READY).update(state=State.BLOCKED, blocked_by=key)
        if rates := [key for key in blocked if semaphores[key].every]:
            self.book(rates)
        behind = next_in_line(self._jobs(), admitted, limit - len(jobs), in_a_row)
        Slot.objects.using(self.db).take([*admitted, *behind])
        return [*(job for job in jobs if not job.blocked_by), *behind]

    def line_up(self, jobs: Sequence[Any]) -> None:
        """Of jobs about to be written, those that are sure to find no slot wait from the beginning: nobody claims them in vain.

        What is seen here may be over by the time that they are committed; the sweep finds those.
        """
        waiting = [job for job in jobs if job.limits and job.state == State.READY]
        keys = {limit["key"] for job in waiting for limit in job.limits}
        lines = {key for key in keys if self._blocked().filter(blocked_by=key).exists()} if len(keys) <= FEW else set()
        ahead: Counter[str] = Counter()
        for job in waiting:
            for limit in job.limits:
                ahead[limit["key"]] += 1
                is_full = limit["key"] in lines or ahead[limit["key"]] > limit.get("most", limit.get("burst"))
                if is_full and not limit.get("discard"):
                    job.state, job.blocked_by = State.BLOCKED, limit["key"]
                    break

    def waiting(self) -> SemaphoreQuerySet:
        """Those that jobs wait for."""
        # Not Exists(), which PostgreSQL may make a join with all of a long line.
        first = self._blocked().filter(blocked_by=OuterRef("pk")).order_by("-priority", "id").values("pk")[:1]
        return self.alias(first=Subquery(first)).filter(first__isnull=False)

    def signal(self, keys: Iterable[str]) -> list[str]:
        """Have as many of the jobs that wait for them become ready as there are free slots. Returns the queue of each."""
        with transaction.atomic(using=self.db, savepoint=False):
            held = {row.pk: row.most for row in self._locked(keys) if row.most}
            lines = list(self.filter(pk__in=list(held)).waiting().values_list("pk", flat=True))
            taken = Slot.objects.using(self.db).count_by_key(lines) if lines else {}
            return [queue for key in lines for queue in self._unblock(key, held[key] - taken[key])]

    def sweep(self, limit: int) -> list[str]:
        """As signal, for all that have free slots and jobs that wait."""
        found = self.waiting().annotate(free=_free()).filter(free__gt=0)
        return self.signal(keys) if (keys := list(found.values_list("pk", flat=True)[:limit])) else []

    def revive(self, limit: int) -> list[str]:
        """Begin lines anew that have no semaphore: whoever was to be claimed first, and to make it, was called off before.

        As signal. It reads all jobs that wait, so it is for now and then.
        """
        lost = self._blocked().exclude(Exists(self.filter(pk=OuterRef("blocked_by")))).order_by("blocked_by")
        keys = list(lost.values_list("blocked_by", flat=True).distinct()[:limit])
        with transaction.atomic(using=self.db):
            return [queue for key in keys for queue in self._unblock(key, 1)]

    def book(self, keys: Iterable[str] | None = None) -> None:
        """Give those that wait for a rate the times of the next seconds."""
        rows: Any = self.filter(booked__lt=after(AHEAD)) if keys is None else self.filter(pk__in=list(keys), booked__isnull=False)
        if waiting := list(rows.waiting().values_list("pk", flat=True)):
            with transaction.atomic(using=self.db, savepoint=False):
                for row in self._locked(waiting):
                    self._give_times(row)

    def _give_times(self, row: Any) -> None:
        times = row.free_times()
        jobs = list(lock(self._jobs().waiting_for(row.pk))[: len(times)])
        for job, time in zip(jobs, times, strict=False):
            job.state, job.blocked_by, job.run_after = State.SCHEDULED, None, time
            row.booked = time + row.every
        self._jobs().bulk_update(jobs, ["state", "blocked_by", "run_after"])
        self._store([row])

    def leave(self, jobs: Sequence[Any]) -> list[str]:
        """Jobs that were settled give back their slots. Returns the queue of each job that is ready for that."""
        if not (keys := {limit["key"] for job in jobs for limit in job.limits or () if "most" in limit}):
            return []
        Slot.objects.using(self.db).filter(job__in=[job.pk for job in jobs if job.limits])._raw_delete(self.db)
        return self.signal(keys)

    def prune(self, limit: int) -> int:
        """Forget those that nobody holds or waits for. Returns how many."""
        found = list(self._unused().values_list("pk", flat=True)[:limit])
        with transaction.atomic(using=self.db):
            held = [row.pk for row in lock(self.filter(pk__in=found).order_by("pk"))]
            # Once more, under the lock: a claim may have come before it, and its slots must stay.
            unused = list(self._unused().filter(pk__in=held).values_list("pk", flat=True))
            Slot.objects.using(self.db).filter(semaphore__in=unused)._raw_delete(self.db)
            return self.filter(pk__in=unused)._raw_delete(self.db)

    def _unused(self) -> SemaphoreQuerySet:
        taken = Slot.objects.using(self.db).taken().filter(semaphore=OuterRef("pk"))
        waited_for = self._blocked().filter(blocked_by=OuterRef("pk"))
        return self.exclude(Exists(taken)).exclude(Exists(waited_for)).filter(Q(earliest=None) | Q(earliest__lt=Now()))

    def _hold(self, limits: dict[str, dict[str, Any]]) -> dict[str, Semaphore]:
        """The locked rows of the keys; made where there is none, before any is locked: so two do not wait in a circle."""
        mysql = connections[self.db].vendor == "mysql"
        how: Any = {"update_conflicts": True, "update_fields": ["most"]} if mysql else {"ignore_conflicts": True}
        held: dict[str, Semaphore] = {}
        while len(held) < len(limits):
            missing = limits.keys() - set(self.filter(pk__in=list(limits)).values_list("pk", flat=True))
            self.bulk_create([self.model(pk=key) for key in sorted(missing)], **how)
            held = {row.pk: row for row in self._locked(limits)}
        for key, row in held.items():
            row.adopt(limits[key])
        return held

    def _locked(self, keys: Iterable[str]) -> list[Any]:
        rows: Any = self.filter(pk__in=list(keys)).order_by("pk").annotate(db_now=Now())
        return list(rows.select_for_update() if connections[self.db].features.has_select_for_update else rows)

    def _unblock(self, key: str, number: int) -> list[str]:
        waiting = lock(self._jobs().waiting_for(key)).values_list("pk", "queue")
        found = dict(waiting[: max(0, number)])
        self._jobs().filter(pk__in=list(found), state=State.BLOCKED).update(state=State.READY, blocked_by=None)
        return list(found.values())

    def _store(self, rows: list[Semaphore]) -> None:
        self.bulk_update(rows, ["most", "every", "burst", "earliest", "booked"])

    def _jobs(self) -> Any:
        return Slot._meta.get_field("job").related_model._default_manager.using(self.db)

    def _blocked(self) -> Any:
        return self._jobs().filter(state=State.BLOCKED)


def _free() -> Any:
    taken = (
        Slot.objects.taken()
        .filter(semaphore=OuterRef("pk"))
        .order_by()
        .values("semaphore")
        .annotate(number=Count("series", distinct=True))
    )
    return F("most") - Coalesce(Subquery(taken.values("number")), 0)


def _admit(job: Any, semaphores: dict[str, Semaphore], taken: Counter[str]) -> bool:
    """Whether the job may run now. It takes from all of its semaphores, or from none."""
    for limit in job.limits:
        row = semaphores[limit["key"]]
        if row.is_free(taken[row.pk]):
            continue
        if limit.get("discard"):
            job.called_off = f"There was no slot free of {row.pk!r}, of which there are {row.most}."
        else:
            job.blocked_by = row.pk
        return False
    job.series = uuid7()
    for limit in job.limits:
        taken[limit["key"]] += 1
        semaphores[limit["key"]].use()
    return True
