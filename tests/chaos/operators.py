"""Operators, who pause, move, call off, stop and retry hundreds of jobs; and somebody who holds rows for seconds."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from django.db import connection, transaction

from django_dbqueue.models import Batch, Job, Queue, RecurringTask, Semaphore
from django_dbqueue.models.locking import lock
from django_dbqueue.recurrence.target import enqueue

from . import tasks
from .background import Background
from .load import PAUSABLE, UNSERVED


class Acting(Background):
    """Does one thing of its list every while."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self._pause = pause
        self.done: Counter[str] = Counter()

    def deeds(self) -> list[tuple[str, Callable[[], Any]]]:
        raise NotImplementedError

    def pause(self) -> float:
        return random.uniform(0, 2 * self._pause)

    def act(self) -> None:
        name, deed = random.choice(self.deeds())
        deed()
        self.done[name] += 1


class Operators(Acting):
    """``retried``: jobs that may run again for that. ``stopped``: by job, the attempt after which it may not."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.retried: set[str] = set()
        self.stopped: dict[str, int] = {}

    def deeds(self) -> list[tuple[str, Callable[[], Any]]]:
        jobs = self._jobs()
        return [
            (
                "discard hundreds",
                lambda: jobs.filter(pk__in=self._some(jobs.discardable())).discard(),
            ),
            ("reprioritise hundreds", lambda: jobs.reprioritise(random.choice([-1, 0, 1]))),
            ("move hundreds", lambda: jobs.move(random.choice(["default", PAUSABLE, UNSERVED]))),
            ("run now a hundred recurring tasks", self._run_now),
            *[("retry hundreds", self._retry)] * 2,
            *[("stop what runs", self._stop_what_runs)] * 3,
            *[("pause a queue", lambda: Queue.objects.named(PAUSABLE).pause())],
            *[("resume a queue", lambda: Queue.objects.named(PAUSABLE).resume())] * 2,
            ("move from a queue that nobody serves", self._move_unserved),
        ]

    def stop(self) -> None:
        super().stop()
        Queue.objects.named(PAUSABLE).resume()

    def _jobs(self) -> Any:
        return Job.objects.filter(task__in=tasks.AT_WILL)

    def _some(self, jobs: Any) -> list[Any]:
        return list(jobs.order_by("pk").values_list("pk", flat=True)[: random.randrange(500)])

    def _retry(self) -> None:
        ids = self._some(self._jobs().retriable())
        # Before, as it may be committed though it seems to fail.
        self.retried.update(map(str, ids))
        for pk in ids:
            self.stopped.pop(str(pk), None)
        Job.objects.filter(pk__in=ids).retry()

    def _stop_what_runs(self) -> None:
        before = dict(self._jobs().stoppable().values_list("pk", "attempt"))
        Job.objects.filter(pk__in=list(before)).stop()
        stopped = (
            self._jobs().asked_to_stop().filter(pk__in=list(before)).values_list("pk", "attempt")
        )
        self.stopped.update({str(pk): attempt for pk, attempt in stopped if before[pk] == attempt})

    def _move_unserved(self) -> None:
        """The last ones: those before them are to stay where they are in the way of others."""
        last = Job.objects.filter(queue=UNSERVED).order_by("-pk").values_list("pk", flat=True)[:10]
        Job.objects.filter(pk__in=list(last)).move("default")

    def _run_now(self) -> None:
        RecurringTask.objects.filter(name__startswith="by hand").run_now(
            lambda row, wait: enqueue(row, wait)
        )


class Holder(Acting):
    """Has transactions open that hold rows which the queue needs."""

    # In seconds: of rows for which calls, operators or workers wait, and of others.
    SHORT, LONG = (0.5, 2.0), (10.0, 20.0)

    def __init__(self) -> None:
        super().__init__(2.0)

    def deeds(self) -> list[tuple[str, Callable[[], Any]]]:
        jobs = Job.objects.filter(state__in=["ready", "running", "scheduled", "blocked"]).order_by(
            "?"
        )
        others = jobs.filter(key=None).exclude(task__in=tasks.AT_WILL)
        return [
            ("hold rows of jobs", lambda: self._hold(jobs[:200], self.SHORT)),
            *[("hold rows of jobs for long", lambda: self._hold(others[:200], self.LONG))] * 2,
            (
                "hold rows of limits",
                lambda: self._hold(Semaphore.objects.order_by("pk"), self.SHORT),
            ),
            (
                "hold rows of batches",
                lambda: self._hold(Batch.objects.filter(finished_at=None), self.SHORT),
            ),
        ]

    def _hold(self, rows: Any, seconds: tuple[float, float]) -> None:
        ids = list(rows.values_list("pk", flat=True))
        with transaction.atomic():
            list(lock(rows.model.objects.filter(pk__in=ids).order_by("pk")))
            time.sleep(random.uniform(*seconds))
            connection.cursor().execute("SELECT 1")
