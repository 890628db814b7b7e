"""Operators: they change hundreds of jobs; and transactions that lock rows for seconds."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from django.db import connection, transaction

from django_dbqueue.engine.recurring import run_now
from django_dbqueue.models import Batch, Job, Queue, RecurringTask, Semaphore
from django_dbqueue.models.locking import lock
from django_dbqueue.recurrence.target import enqueue

from . import tasks
from .background import Background
from .load import PAUSABLE, UNSERVED


class RandomActor(Background):
    """Does a random action of its list at intervals."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self._pause = pause
        self.done: Counter[str] = Counter()

    def actions(self) -> list[tuple[str, Callable[[], Any]]]:
        raise NotImplementedError

    def pause(self) -> float:
        return random.uniform(0, 2 * self._pause)

    def act(self) -> None:
        name, action = random.choice(self.actions())
        action()
        self.done[name] += 1


class Operators(RandomActor):
    """``retried``: jobs that may run again. ``stopped``: by job, the last attempt that may run."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.retried: set[str] = set()
        self.stopped: dict[str, int] = {}

    def actions(self) -> list[tuple[str, Callable[[], Any]]]:
        jobs = self._jobs()
        return [
            (
                "discard hundreds",
                lambda: jobs.filter(pk__in=self._sample(jobs.discardable())).discard(),
            ),
            ("reprioritise hundreds", lambda: jobs.reprioritise(random.choice([-1, 0, 1]))),
            ("move hundreds", lambda: jobs.move(random.choice(["default", PAUSABLE, UNSERVED]))),
            ("run a hundred recurring tasks now", self._run_now),
            *[("retry hundreds", self._retry)] * 2,
            *[("stop running jobs", self._stop_running)] * 3,
            *[("pause a queue", lambda: Queue.objects.named(PAUSABLE).pause())],
            *[("resume a queue", lambda: Queue.objects.named(PAUSABLE).resume())] * 2,
            ("move from an unserved queue", self._move_unserved),
        ]

    def stop(self) -> None:
        super().stop()
        Queue.objects.named(PAUSABLE).resume()

    def _jobs(self) -> Any:
        return Job.objects.filter(task__in=tasks.OPERATED)

    def _sample(self, jobs: Any) -> list[Any]:
        return list(jobs.order_by("pk").values_list("pk", flat=True)[: random.randrange(500)])

    def _retry(self) -> None:
        ids = self._sample(self._jobs().retriable())
        # Recorded before the retry, which may be committed in spite of an error.
        self.retried.update(map(str, ids))
        for pk in ids:
            self.stopped.pop(str(pk), None)
        Job.objects.filter(pk__in=ids).retry()

    def _stop_running(self) -> None:
        before = dict(self._jobs().stoppable().values_list("pk", "attempt"))
        if random.random() < 0.5:
            self.retried.update(map(str, before))
            Job.objects.filter(pk__in=list(before)).stop(then="retry")
            return
        Job.objects.filter(pk__in=list(before)).stop()
        # A later call of a key runs in spite of the stop.
        stopped = (
            self._jobs()
            .stop_requested()
            .filter(pk__in=list(before), key=None)
            .values_list("pk", "attempt")
        )
        self.stopped.update({str(pk): attempt for pk, attempt in stopped if before[pk] == attempt})

    def _move_unserved(self) -> None:
        """Move the last ones: the first ones must stay ahead of other waiters."""
        last = Job.objects.filter(queue=UNSERVED).order_by("-pk").values_list("pk", flat=True)[:10]
        Job.objects.filter(pk__in=list(last)).move("default")

    def _run_now(self) -> None:
        tasks_by_hand = RecurringTask.objects.filter(name__startswith="by hand")
        run_now(tasks_by_hand, lambda row, wait: enqueue(row, wait))


class LockHolder(RandomActor):
    """Holds row locks that the queue needs."""

    # In seconds: for rows that calls, operators or workers wait for, and for others.
    SHORT, LONG = (0.5, 2.0), (10.0, 20.0)

    def __init__(self) -> None:
        super().__init__(2.0)

    def actions(self) -> list[tuple[str, Callable[[], Any]]]:
        jobs = Job.objects.filter(state__in=["ready", "running", "scheduled", "blocked"]).order_by(
            "?"
        )
        others = jobs.filter(key=None).exclude(task__in=tasks.OPERATED)
        return [
            ("lock rows of jobs", lambda: self._lock_rows(jobs[:200], self.SHORT)),
            *[("lock rows of jobs for long", lambda: self._lock_rows(others[:200], self.LONG))] * 2,
            (
                "lock rows of limits",
                lambda: self._lock_rows(Semaphore.objects.order_by("pk"), self.SHORT),
            ),
            (
                "lock rows of batches",
                lambda: self._lock_rows(Batch.objects.filter(finished_at=None), self.SHORT),
            ),
        ]

    def _lock_rows(self, rows: Any, seconds: tuple[float, float]) -> None:
        ids = list(rows.values_list("pk", flat=True))
        with transaction.atomic():
            list(lock(rows.model.objects.filter(pk__in=ids).order_by("pk")))
            time.sleep(random.uniform(*seconds))
            connection.cursor().execute("SELECT 1")
