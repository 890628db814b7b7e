"""Enqueues jobs at a steady rate, and knows which of them were committed."""

from __future__ import annotations

import random
import threading
import time

from django.db import Error, connections, transaction

from django_dbqueue.models import Job

from . import tasks


class Load:
    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.confirmed: set[str] = set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def wait(self, seconds: float) -> bool:
        """Until all jobs are finished. Returns whether they are."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not Job.objects.exclude(state__in=["successful", "failed", "discarded"]).exists():
                return True
            time.sleep(0.2)
        return False

    def _run(self) -> None:
        while not self._stopped.wait(5 / self._rate):
            try:
                with transaction.atomic():
                    calls = [(random.uniform(0, 0.2),) for _ in range(5)]
                    results = random.choice(tasks.ALL).enqueue_many(calls)
                    if random.random() < 0.02:
                        results.append(tasks.effect_that_hangs_at_first.enqueue(0.1))
                self.confirmed |= {result.id for result in results}
            except Error:  # It may have been committed or not: such jobs are not counted.
                connections.close_all()
        connections.close_all()
