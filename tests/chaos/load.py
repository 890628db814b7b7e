"""Enqueue jobs of all kinds at a steady rate, and record the committed ones."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

from django.db import connection, transaction

from django_dbqueue import batch
from django_dbqueue.models import Batch, Execution, Job, RecurringTask
from django_dbqueue.models.expressions import now_plus

from . import tasks
from .background import Background

LIMITED_KEYS = 3
# Seconds for which a key is in use: afterwards its last version must have run.
KEY_SECONDS = 4
# The interval of the recurring task, in seconds, and its name.
EVERY, SCHEDULE = 2, "the schedule"
# A queue that operators pause and resume, and one without workers.
PAUSABLE, UNSERVED = "pausable", "unserved"
ACCOUNTS = 2
# The maximum number of waiting jobs that no worker serves.
MOST_UNSERVED = 100
# Calls after which a batch waits for a run.
NEW_RUNS = ("created", "merged")
# With this many waiting jobs nothing is enqueued, so that all jobs can end on a busy machine.
MOST_WAITING = 1000


class Load(Background):
    """``confirmed``: committed jobs. ``versions``: the newest of each key. ``batches``: their ids.

    put_off: by debounced job, the intervals in which it must not start. members: by batch, the
    time of its call, and the jobs with keys that it waits for.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate
        self._calls: Counter[str] = Counter()
        self.confirmed: set[str] = set()
        self.versions: dict[str, int] = {}
        self.batches: set[str] = set()
        self.put_off: defaultdict[str, list[tuple[datetime, datetime]]] = defaultdict(list)
        self.members: dict[str, tuple[datetime, list[str]]] = {}
        # Each writes about five jobs, and returns results and a callback for after the commit.
        self._actions: list[Callable[[], tuple[list[Any], Callable[[], Any]]]] = [
            *[self._effects] * 10,
            *[self._versions] * 5,
            *[self._unversioned] * 8,
            *[self._batches_of_keys] * 3,
            *[self._expiring] * 5,
            *[self._limited] * 3,
            *[self._pipelines] * 2,
            *[self._two_limits] * 3,
            *[self._debounced] * 3,
            *[self._operated] * 2,
            *([self._by_sql] if connection.vendor == "postgresql" else []),
            self._large,
            self._batch,
            self._batch_of_a_job,
        ]

    def start(self) -> None:
        task = tasks.effect_of_a_time.module_path
        by_hand = [
            RecurringTask(
                name=f"by hand {n}",
                task=tasks.effect_at_will_and_short.module_path,
                every=timedelta(days=1),
            )
            for n in range(100)
        ]
        RecurringTask.objects.bulk_create(by_hand)
        every = {"every": timedelta(seconds=EVERY), "missed": "all", "most_missed": 1000}
        RecurringTask.objects.create(name=SCHEDULE, task=task, **every)
        super().start()

    def wait(self, seconds: float) -> bool:
        """Wait until all jobs are finished, or until no attempt has ended for this many seconds.

        Return whether all are finished. Batches of dead openers are sealed.
        """
        RecurringTask.objects.all().disable()
        Job.objects.filter(queue=UNSERVED).move(PAUSABLE)
        ended, since, is_finished = 0, time.monotonic(), False
        while not is_finished and time.monotonic() - since < seconds:
            if (number := Execution.objects.count()) != ended:
                ended, since = number, time.monotonic()
            unfinished = Job.objects.exclude(state__in=["successful", "failed", "discarded"])
            if not unfinished.filter(task=tasks.effect_that_opens_a_batch.module_path).exists():
                Batch.objects.filter(opened_until__isnull=False, sealed_at=None).update(
                    opened_until=now_plus(-1)
                )
            # In this order: a batch's end enqueues its callback.
            is_finished = (
                not Batch.objects.filter(finished_at=None).exists() and not unfinished.exists()
            )
            time.sleep(0.2)
        return is_finished

    def pause(self) -> float:
        return 5 / self._rate

    def act(self) -> None:
        """After a database error the commit is uncertain: such jobs are not recorded."""
        if (
            Job.objects.filter(state__in=["ready", "blocked"])[:MOST_WAITING].count()
            == MOST_WAITING
        ):
            return
        with transaction.atomic():
            results, note = random.choice(self._actions)()
        self.confirmed |= {result.id for result in results}
        note()

    def _effects(self):
        results = random.choice(tasks.ALL).enqueue_many(
            [(random.uniform(0, 0.2),) for _ in range(5)]
        )
        if random.random() < 0.02:
            results += [tasks.effect_that_hangs_at_first.enqueue(0.1)]
        return results, lambda: None

    def _versions(self):
        """Enqueue two keys that differ by case only, and a stale version of each.

        The keys change every few seconds. A stale version must have no effect.
        """
        names = [f"key {int(time.monotonic() // KEY_SECONDS)}{letter}" for letter in "aA"]
        self._calls.update(names)
        asked = {name: self._calls[name] for name in names}
        calls = [
            (name, each)
            for name, version in asked.items()
            for each in (version, max(version - 2, 0))
        ]
        results = [
            tasks.effect_of_a_version.using(version=version).enqueue(name, version)
            for name, version in calls
        ]
        return results, lambda: self.versions.update(asked)

    def _unversioned(self):
        """Enqueue a key without a version, mostly onto its running job; by SQL where it can be."""
        task = tasks.effect_of_a_version
        running = Job.objects.running().filter(task=task.module_path, version=None)
        running = running.order_by("?").first()
        name = f"last {int(time.monotonic() // KEY_SECONDS)}{random.choice('aA')}"
        name = running.args[0] if running and random.random() < 0.7 else name
        self._calls[name] += 1
        by_sql = connection.vendor == "postgresql" and random.random() < 0.5
        asked = {name: self._calls[name]}
        result = (_call_by_sql if by_sql else task.enqueue)(name, asked[name])
        return [result], lambda: self.versions.update(asked)

    def _batches_of_keys(self):
        """Enqueue keys in two batches, which share a run; other calls use the same keys."""
        calls = random.choice([self._versions, self._unversioned, self._operated_keys])
        (first, note_first), (second, note_second) = self._keys_in(calls), self._keys_in(calls)
        return [*first, *second], lambda: (note_first(), note_second())

    def _keys_in(self, calls):
        called_at = datetime.now(timezone.utc)
        with batch(on_finish=tasks.effect_after_a_batch) as opened:
            results, note_calls = calls()
        pk, operated = str(opened.id), calls == self._operated_keys
        # The SQL function is a call from outside. Operators may discard a run.
        members = [each.id for each in results if getattr(each, "enqueued", "") in NEW_RUNS]

        def note():
            note_calls()
            self.batches.add(pk)
            self.members[pk] = called_at, [] if operated else members

        return results, note

    def _operated_keys(self):
        name = f"at will {int(time.monotonic() // KEY_SECONDS)}"
        task = tasks.effect_at_will.using(key=name, queue_name=random.choice(["default", PAUSABLE]))
        return [task.enqueue(random.uniform(0, 3))], lambda: None

    def _expiring(self):
        """Enqueue jobs that start in time or expire: behind a pause, a limit or a failure."""
        now, wait = datetime.now(timezone.utc), random.choice([0, 0, 2])
        expires_at = now + timedelta(seconds=wait + random.uniform(0.5, 15))
        task = tasks.effect_before_expiry.using(
            queue_name=random.choice(["default", PAUSABLE, _unserved()]),
            run_after=now + timedelta(seconds=wait) if wait else None,
            expires=expires_at,
            on_lost=random.choice(["retry", "fail"]),
        )
        calls = [(expires_at.isoformat(), random.uniform(0, 0.3))] * 4
        return task.enqueue_many(calls), lambda: None

    def _limited(self):
        """Enqueue one by one: no call sees waiters, so all jobs are ready."""
        key = f"limit {random.randrange(LIMITED_KEYS)}"
        task = random.choice(
            [tasks.effect_within_a_limit, tasks.effect_of_a_coroutine_within_a_limit]
        )
        return [task.enqueue(key, random.uniform(0, 0.2)) for _ in range(6)], lambda: None

    def _pipelines(self):
        return tasks.PIPELINE.enqueue_many(
            [(random.choice([0, 0, 2]),) for _ in range(2)]
        ), lambda: None

    def _two_limits(self):
        """Enqueue jobs of one account and the bank, some in a queue that cannot run."""
        queue = random.choice(["default", "default", PAUSABLE, _unserved()])
        account, seconds = f"account {random.randrange(ACCOUNTS)}", random.uniform(0, 0.2)
        calls = [(account, seconds)] * (30 if queue == UNSERVED else random.choice([1, 1, 6]))
        results = tasks.effect_within_two_limits.using(queue_name=queue).enqueue_many(calls)
        return [
            *results,
            tasks.effect_within_the_same_group.using(queue_name=queue).enqueue(seconds),
        ], lambda: None

    def _debounced(self):
        """Enqueue mostly onto a running job: the call must wait, however the attempt ends."""
        name = f"debounced {int(time.monotonic() // (3 * KEY_SECONDS))}{random.choice('ab')}"
        running = Job.objects.running().filter(task=tasks.effect_of_a_debounce.module_path).first()
        name = running.args[0] if running and random.random() < 0.7 else name
        began = datetime.now(timezone.utc)
        result = tasks.effect_of_a_debounce.using(
            run_after=timedelta(seconds=tasks.PUT_OFF)
        ).enqueue(name)

        def note():
            self.put_off[result.id].append(
                (datetime.now(timezone.utc), began + timedelta(seconds=tasks.PUT_OFF))
            )

        return [result], note

    def _operated(self):
        wait = random.choice([None, None, timedelta(seconds=random.uniform(0, 20))])
        queue = random.choice(["default", PAUSABLE])
        how = {"run_after": wait, "queue_name": queue}
        results = tasks.effect_at_will.using(**how).enqueue_many([(random.uniform(0, 3),)] * 5)
        return [
            *results,
            *tasks.effect_at_will_and_short.using(**how).enqueue_many([()] * 15),
        ], lambda: None

    def _by_sql(self):
        return [_enqueue_by_sql(tasks.effect, [0.05], None)], lambda: None

    def _large(self):
        return tasks.effect_of_much.enqueue_many([("x" * 1_000_000, 0.05)] * 4), lambda: None

    def _batch_of_a_job(self):
        return [tasks.effect_that_opens_a_batch.enqueue(random.uniform(0, 0.5))], lambda: None

    def _batch(self):
        with batch(on_finish=tasks.effect_after_a_batch) as opened:
            results = tasks.effect.enqueue_many([(0.05,)] * 3)
            results += [
                tasks.effect_that_adds_to_its_batch.enqueue(0.05),
                tasks.PIPELINE.enqueue(2),
            ]
        return results, lambda: self.batches.add(str(opened.id))


def _unserved() -> str:
    """Return the queue without workers, or another one if enough jobs wait there."""
    number = Job.objects.filter(queue=UNSERVED).count()
    return UNSERVED if number < MOST_UNSERVED else PAUSABLE


def _call_by_sql(name: str, number: int) -> Any:
    return _enqueue_by_sql(tasks.effect_of_a_version, [name, number], name)


def _enqueue_by_sql(task: Any, args: list[Any], key: str | None) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT dbqueue_enqueue(%s, %s::jsonb, key => %s)",
            [task.module_path, json.dumps(args), key],
        )
        return SimpleNamespace(id=str(cursor.fetchone()[0]))
