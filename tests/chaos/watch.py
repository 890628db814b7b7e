"""Looks, while harm is done, whether what could go on does."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from django.db import Error, connections

from django_dbqueue.models import Batch, Job, Queue, Slot

from ..models import Interval
from .load import UNSERVED
from .operators import Holder

SAMPLE = 0.5
# What a dispatcher's sweep takes at most, in seconds; what a start, an end or a busy machine may need; and a frozen process, which
# is replaced after 20.
SWEEP, MARGIN, FROZEN = 2.4, 10.0, 20.0
# What is told as it happens.
LONG = 10.0
# With fewer running, workers have nothing to do: a host has eight threads.
FEW = 4


class Watch(threading.Thread):
    """``idle``: what could go on and did not, though the database could be asked all the time, and for how many seconds.

    Processes are suspended, and lines silent, for up to ``silence`` seconds. What only one of them could do is done after that.
    """

    def __init__(self, dead_after: float, silence: float) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.error: Exception | None = None
        # Somebody alive can do it: another host, or what has taken the place of a dead process.
        self._patience = max(dead_after, FROZEN) + SWEEP + MARGIN + Holder.LONGEST
        # Whose it is must be known to be dead before.
        self._longer = self._patience + silence + dead_after
        self._since: dict[str, float] = {}
        self.samples = 0
        self.longest: dict[str, float] = {}
        self.idle: dict[str, float] = {}

    def run(self) -> None:
        try:
            while not self._ended.wait(SAMPLE):
                try:
                    self._look()
                    self.samples += 1
                except Error:
                    # Nothing can go on without the database.
                    self._since.clear()
                    connections.close_all()
        except Exception as error:
            self.error = error
        finally:
            connections.close_all()

    def end(self) -> None:
        """Raises what has ended it before."""
        self._ended.set()
        self.join()
        if self.error:
            raise self.error

    def _look(self) -> None:
        now = time.monotonic()
        patience = {what: seconds for seconds, found in self._stands() for what in found}
        for what in self._since.keys() - patience.keys():
            if (stood := now - self._since[what]) > LONG:
                print(f"    {time.strftime('%H:%M:%S')}  {what} stood for {stood:.0f} s", flush=True)
        self._since = {what: self._since.get(what, now) for what in patience}
        for what, since in self._since.items():
            kind = what.partition(":")[0]
            self.longest[kind] = max(self.longest.get(kind, 0.0), now - since)
            if now - since > patience[what]:
                self.idle[what] = now - since

    def _stands(self) -> list[tuple[float, list[str]]]:
        """What could go on now, and how long it may stand."""
        closed = [UNSERVED, *Queue.objects.paused().values_list("name", flat=True)]
        waiting = Job.objects.filter(state__in=["ready", "blocked"]).exclude(queue__in=closed).defer("args", "kwargs")
        are_few = Job.objects.running().count() < FEW
        rows: list[Any] = [job for job in waiting[:5000] if are_few or job.state == "blocked"]
        keys = {each["key"] for job in rows for each in job.limits or ()}
        slots = {key: SimpleNamespace(taken=0, smallest=None) for key in keys}
        Slot.objects.look(slots)

        def has_room(limit: dict[str, Any]) -> bool:
            taken = slots[limit["key"]]
            return taken.taken < min(limit["most"], taken.smallest or limit["most"])

        # The first of each line: while others behind it wait, it changes with each slot that is given out.
        first: dict[Any, Job] = {}
        for job in sorted(rows, key=_place):
            if all(map(has_room, job.limits or ())):
                first.setdefault((job.state, job.blocked_by or job.queue), job)
        free = list(first.values())
        due = Job.objects.due().values_list("pk", flat=True)
        batches = Batch.objects.due().values_list("pk", flat=True)
        return [
            (self._patience, [f"ready: {job.pk} {job.task}" for job in free if job.state == "ready"]),
            (self._patience, [f"slot free: {job.pk} {job.task}" for job in free if job.state == "blocked"]),
            (self._patience, [f"due: {pk}" for pk in due]),
            (self._patience, [f"batch: {pk}" for pk in batches]),
            (self._longer, [f"ended, not written: {pk}" for pk in _ended_and_running()]),
        ]


def _place(job: Job) -> tuple[Any, ...]:
    """In its lane, or in its line."""
    return job.state, -job.priority, job.run_after if job.state == "ready" else job.pk, job.pk


def _ended_and_running() -> list[Any]:
    """Jobs that run by their rows, whose attempts have written that they have ended."""
    running = {(str(pk), attempt) for pk, attempt in Job.objects.running().values_list("pk", "attempt")}
    ended = Interval.objects.filter(job__in=[pk for pk, _attempt in running], ended_at__isnull=False)
    return [fence[0] for fence in ended.values_list("job", "attempt") if fence in running]
