"""Many producers and workers on a few keys: the newest version runs last."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time

import pytest
from django.db import connections
from django.db.models import Max

from django_dbqueue.models import Job

from ..conftest import until
from ..models import Effect
from ..tasks import leave_version

SECONDS = float(os.environ.get("DBQUEUE_KEYS_SECONDS", 6))
KEYS = 5

pytestmark = pytest.mark.django_db(transaction=True)


class Producers:
    """Threads that enqueue versions of a few keys, and record the newest of each."""

    def __init__(self) -> None:
        self._versions = itertools.count(1)
        self._lock = threading.Lock()
        self.newest: dict[str, int] = {}
        self.errors: list[Exception] = []
        self.calls = 0

    def run(self, number: int) -> None:
        threads = [
            threading.Thread(target=self._produce, args=(time.monotonic() + SECONDS,))
            for _ in range(number)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _produce(self, end: float) -> None:
        try:
            while time.monotonic() < end:
                for key in random.sample(range(KEYS), random.randint(1, KEYS)):
                    self._enqueue(str(key))
                # In any order: one call writes its rows in the order of their keys.
                leave_version.enqueue_many(
                    [(str(key), 0) for key in random.sample(range(KEYS), KEYS)]
                )
        except Exception as error:
            self.errors.append(error)
        finally:
            connections.close_all()

    def _enqueue(self, key: str) -> None:
        with self._lock:
            version = next(self._versions)
        # Another thread may be faster with a later version; then this one is stale.
        leave_version.using(version=version).enqueue(key, version)
        with self._lock:
            self.newest[key] = max(self.newest.get(key, 0), version)
            self.calls += 1


@pytest.mark.skipif(connections["default"].vendor == "sqlite", reason="one writer at a time")
@pytest.mark.timeout(120 + 2 * SECONDS)
def test_newest_version_runs_last(runqueue):
    producers = Producers()
    runqueue("--processes", "2", "--threads", "4")

    producers.run(6)
    # A call without a version would replace the newest one.
    for key in producers.newest:
        producers._enqueue(key)
    until(lambda: not Job.objects.exclude(state=Job.State.SUCCESSFUL).exists())

    assert producers.errors == []
    assert len(producers.newest) == Job.objects.count() == KEYS
    last = {
        key: Effect.objects.filter(pk=pk).values_list("attempt", flat=True).get()
        for key, pk in Effect.objects.values_list("job").annotate(last=Max("pk"))
    }
    print(f"{producers.calls} calls, {Effect.objects.count()} runs")
    assert last == producers.newest
