"""Enqueues jobs of all kinds at a steady rate, and knows which of them were committed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import Error, connections, transaction

from django_dbqueue import batch
from django_dbqueue.models import Job, RecurringTask

from . import tasks

LIMITED_KEYS = 3
# So many seconds a key is asked for, and then no more: what was its last version must have been run.
LIFE = 4
# Of a recurring task, in seconds.
EVERY = 2


class Load:
    """``confirmed`` are the jobs whose enqueueing was committed, ``versions`` the newest of each key, ``batches`` their ids."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._asked: Counter[str] = Counter()
        self._error: Exception | None = None
        self.confirmed: set[str] = set()
        self.versions: dict[str, int] = {}
        self.batches: set[str] = set()
        # Each writes about five jobs, and returns their results and what to note once they are committed.
        self._deeds: list[Callable[[], tuple[list[Any], Callable[[], Any]]]] = [
            *[self._effects] * 10,
            *[self._versions] * 5,
            *[self._limited] * 3,
            *[self._walks] * 2,
            self._batch,
        ]

    def start(self) -> None:
        task = tasks.effect_of_a_time.module_path
        every = {"every": timedelta(seconds=EVERY), "missed": "all", "most_missed": 1000}
        RecurringTask.objects.create(name="the schedule", task=task, **every)
        self._thread.start()

    def stop(self) -> None:
        """Raises what has ended it before."""
        self._stopped.set()
        self._thread.join()
        if self._error:
            raise self._error

    def wait(self, seconds: float) -> bool:
        """Until all jobs are finished. Returns whether they are."""
        RecurringTask.objects.all().disable()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not Job.objects.exclude(state__in=["successful", "failed", "discarded"]).exists():
                return True
            time.sleep(0.2)
        return False

    def _run(self) -> None:
        try:
            self._enqueue_until_stopped()
        except Exception as error:
            self._error = error

    def _enqueue_until_stopped(self) -> None:
        while not self._stopped.wait(5 / self._rate):
            try:
                with transaction.atomic():
                    results, note = random.choice(self._deeds)()
                self.confirmed |= {result.id for result in results}
                note()
            except Error:  # It may have been committed or not: such jobs are not counted.
                connections.close_all()
        connections.close_all()

    def _effects(self):
        results = random.choice(tasks.ALL).enqueue_many([(random.uniform(0, 0.2),) for _ in range(5)])
        if random.random() < 0.02:
            results += [tasks.effect_that_hangs_at_first.enqueue(0.1)]
        return results, lambda: None

    def _versions(self):
        """Of two keys, which are others every few seconds; and once more an old version of each, which is to do nothing."""
        names = [f"key {int(time.monotonic() // LIFE)}{letter}" for letter in "ab"]
        self._asked.update(names)
        asked = {name: self._asked[name] for name in names}
        calls = [(name, each) for name, version in asked.items() for each in (version, max(version - 2, 0))]
        results = [tasks.effect_of_a_version.using(version=version).enqueue(name, version) for name, version in calls]
        return results, lambda: self.versions.update(asked)

    def _limited(self):
        """One by one: as nobody sees a line, all are ready, and all workers claim them at once."""
        key = f"limit {random.randrange(LIMITED_KEYS)}"
        return [tasks.effect_within_a_limit.enqueue(key, random.uniform(0, 0.2)) for _ in range(6)], lambda: None

    def _walks(self):
        return tasks.WALK.enqueue_many([(random.choice([0, 0, 2]),) for _ in range(2)]), lambda: None

    def _batch(self):
        with batch(on_finish=tasks.effect_after_a_batch) as opened:
            results = tasks.effect.enqueue_many([(0.05,)] * 3)
            results += [tasks.effect_that_adds_to_its_batch.enqueue(0.05), tasks.WALK.enqueue(2)]
        return results, lambda: self.batches.add(str(opened.id))
