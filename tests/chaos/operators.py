"""Operators, who pause, move, call off, stop and retry hundreds of jobs; and somebody who holds rows for seconds."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from django.db import Error, connection, connections, transaction

from django_dbqueue.models import Batch, Job, Queue, RecurringTask, Semaphore
from django_dbqueue.models.locking import lock
from django_dbqueue.recurring_calls import enqueue

from . import tasks
from .load import PAUSABLE, UNSERVED, is_behind


class Acting(threading.Thread):
    """Does something of its list every while, until it is told to end. What the database does not let it do is left out."""

    def __init__(self, pause: float) -> None:
        super().__init__(daemon=True)
        self._pause, self._ended = pause, threading.Event()
        self.done: Counter[str] = Counter()
        self.error: Exception | None = None

    def deeds(self) -> list[tuple[str, Callable[[], Any]]]:
        raise NotImplementedError

    def run(self) -> None:
        try:
            while not self._ended.wait(random.uniform(0, 2 * self._pause)):
                try:
                    name, deed = random.choice(self.deeds())
                    deed()
                    self.done[name] += 1
                except Error:
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


class Operators(Acting):
    """``retried``: jobs that may run again for that. ``stopped``: by job, the attempt after which it may not."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.retried: set[str] = set()
        self.stopped: dict[str, int] = {}

    def deeds(self) -> list[tuple[str, Callable[[], Any]]]:
        jobs = self._jobs()
        return [
            ("discard hundreds", lambda: jobs.filter(pk__in=self._some(jobs.discardable())).discard()),
            ("reprioritise hundreds", lambda: jobs.reprioritise(random.choice([-1, 0, 1]))),
            ("move hundreds", lambda: jobs.move(random.choice(["default", PAUSABLE, UNSERVED]))),
            ("run now a hundred recurring tasks", self._run_now),
            *[("retry hundreds", self._retry)] * (0 if is_behind() else 2),
            *[("stop what runs", self._stop)] * 2,
            *[("pause a queue", lambda: Queue.objects.named(PAUSABLE).pause())],
            *[("resume a queue", lambda: Queue.objects.named(PAUSABLE).resume())] * 2,
            ("move from a queue that nobody serves", lambda: Job.objects.filter(queue=UNSERVED).move("default")),
        ]

    def end(self) -> None:
        super().end()
        Queue.objects.named(PAUSABLE).resume()

    def _jobs(self) -> Any:
        return Job.objects.filter(task=tasks.effect_at_will.module_path)

    def _some(self, jobs: Any) -> list[Any]:
        return list(jobs.order_by("pk").values_list("pk", flat=True)[: random.randrange(500)])

    def _retry(self) -> None:
        ids = self._some(self._jobs().retriable())
        # Before, as it may be committed though it seems to fail.
        self.retried.update(map(str, ids))
        for pk in ids:
            self.stopped.pop(str(pk), None)
        Job.objects.filter(pk__in=ids).retry()

    def _stop(self) -> None:
        before = dict(self._jobs().stoppable().values_list("pk", "attempt"))
        Job.objects.filter(pk__in=list(before)).stop()
        stopped = self._jobs().asked_to_stop().filter(pk__in=list(before)).values_list("pk", "attempt")
        self.stopped.update({str(pk): attempt for pk, attempt in stopped if before[pk] == attempt})

    def _run_now(self) -> None:
        RecurringTask.objects.filter(name__startswith="by hand").run_now(lambda row, wait: enqueue(row, wait))


class Holder(Acting):
    """Has transactions open that hold rows which the queue needs."""

    # In seconds. Of semaphores and batches, others wait for them.
    LONGEST, LONGEST_OF_FEW = 8.0, 2.0

    def __init__(self) -> None:
        super().__init__(4.0)

    def deeds(self) -> list[tuple[str, Callable[[], Any]]]:
        unfinished = Job.objects.filter(state__in=["ready", "running", "scheduled", "blocked"])
        return [
            *[("hold rows of jobs", lambda: self._hold(unfinished.order_by("?")[:200], self.LONGEST))] * 2,
            ("hold rows of limits", lambda: self._hold(Semaphore.objects.order_by("pk"), self.LONGEST_OF_FEW)),
            ("hold rows of batches", lambda: self._hold(Batch.objects.filter(finished_at=None), self.LONGEST_OF_FEW)),
        ]

    def _hold(self, rows: Any, longest: float) -> None:
        ids = list(rows.values_list("pk", flat=True))
        with transaction.atomic():
            list(lock(rows.model.objects.filter(pk__in=ids).order_by("pk")))
            time.sleep(random.uniform(0.5, longest))
            connection.cursor().execute("SELECT 1")
