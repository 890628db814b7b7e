"""Lock order: transactions of the engine take locks in one order and do not deadlock."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import suppress
from datetime import timedelta
from itertools import chain

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.utils import timezone

from django_dbqueue import Rate, limit, task, testing
from django_dbqueue.batches import batch
from django_dbqueue.compat import task_backends
from django_dbqueue.contrib import operations
from django_dbqueue.core import error_reports
from django_dbqueue.core.alert_targets import AlertTarget
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.doctor.finding import Finding
from django_dbqueue.engine import alerts
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.engine.retention import erase, prune_failures
from django_dbqueue.engine.statistics import count_enqueued, fold
from django_dbqueue.models import Alert, Execution, Failure, Job, Operation, Queue
from django_dbqueue.models.enums import State
from django_dbqueue.models.locking import lock_first
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.connections import prepare
from django_dbqueue.runtime.worker.claimer import Claimer

from .. import direct
from ..conftest import a_process
from ..reliability.conftest import held_open
from ..tasks import add, fail, row

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one lock"),
]
Outcome = Execution.Outcome
SECONDS = float(os.environ.get("DBQUEUE_LOAD_SECONDS", "8"))
# PostgreSQL; MySQL and MariaDB.
DEADLOCK = ("40P01", 1213)
QUEUES = ["a", "b", "c"]
AT_LEAST = 6


class Load:
    """Run threads that act as processes, each with its own connection.

    They end after SECONDS, or when each has acted AT_LEAST times: a tracer makes them slow.
    """

    def __init__(self):
        self.deadlocks: list[str] = []
        self.errors: list[BaseException] = []
        self.done: dict[str, int] = {}
        self._end = time.monotonic() + SECONDS

    def run(self, *acts):
        threads = [threading.Thread(target=self._run, args=(n, act)) for n, act in enumerate(acts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, number, act):
        chance = random.Random(number)
        prepare("default", 30.0)
        with connection.execute_wrapper(self._watchdog):
            try:
                while not self._has_ended(act) and not self.errors:
                    try:
                        act(chance)
                    except DatabaseError as error:
                        if not self._is_deadlock(error):
                            raise
                    self.done[act.__name__] = self.done.get(act.__name__, 0) + 1
            except BaseException as error:
                self.errors.append(error)
        connection.close()

    def _has_ended(self, act):
        has_acted = self.done.get(act.__name__, 0) >= AT_LEAST
        return time.monotonic() > self._end + (0 if has_acted else 10 * SECONDS)

    def _watchdog(self, execute, sql, params, many, context):
        try:
            return execute(sql, params, many, context)
        except DatabaseError as error:
            if self._is_deadlock(error):
                self.deadlocks.append(f"{sql[:150]}\n{error}\n{_innodb_deadlock_report()}")
            raise

    def _is_deadlock(self, error):
        code = getattr(error.__cause__, "sqlstate", None) or error.args[0]
        return code in DEADLOCK


def _innodb_deadlock_report():
    """Return the report of the latest deadlock (InnoDB only)."""
    if connection.vendor != "mysql":
        return ""
    with connection.cursor() as cursor:
        cursor.execute("SHOW ENGINE INNODB STATUS")
        text = cursor.fetchone()[2]
    return text.partition("LATEST DETECTED DEADLOCK")[2].partition("\nTRANSACTIONS\n")[0][:9000]


def _deadlock_count():
    if connection.vendor != "postgresql":
        return 0
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_stat_clear_snapshot(), deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        return cursor.fetchone()[1]


def test_mixed_load_has_no_deadlock():
    bank, desk = limit(3, group="bank"), limit(2, group="desk", key=lambda a: a % 4)
    limited = task(concurrency=(limit(1, key=lambda a: a), bank))(add.func)
    other_way = task(concurrency=(bank, desk))(add.func)
    rated = task(concurrency=desk, rate=Rate(500, per=1, group="calls", burst=20))(add.func)
    keyed = task(key=lambda a: a, concurrency=desk)(add.func)
    plain = task()(row.func)
    load, backend = Load(), task_backends["default"]
    Queue.objects.named(*QUEUES).restrict(8)
    Queue.objects.named("c").restrict(None)

    def enqueue(chance):
        if Job.objects.filter(state__in=[State.READY, State.BLOCKED]).count() > 400:
            time.sleep(0.02)
        at = {"queue_name": chance.choice(QUEUES), "priority": chance.choice([0, 1])}
        which = chance.choice([limited, other_way, rated, keyed, keyed])
        which.using(**at).enqueue_many(
            [(chance.randrange(8), 0) for _ in range(chance.randint(1, 12))]
        )
        if chance.random() < 0.2:
            with batch():
                plain.using(**at).enqueue_many([(str(n),) for n in range(4)])
                limited.using(**at).enqueue(chance.randrange(8), 0)

    def outcome(job, chance):
        if job.not_to_run:
            return AttemptResult.of(job, Outcome.DISCARDED, State.DISCARDED)
        if chance.random() < 0.1:
            error = error_reports.report(ValueError(chance.choice("abcdef")))
            return AttemptResult.of(job, Outcome.FAILED, State.SCHEDULED, wait=0.01, error=error)
        return AttemptResult.of(job, Outcome.SUCCESSFUL, State.SUCCESSFUL, result=1)

    def worker(name):
        process = a_process(name)
        claimer = Claimer("default", process, QueueSelector(("*",)), Options(), lambda job, line: 2)

        def work(chance):
            jobs = list(chain.from_iterable(claimer.claim(chance.randint(1, 20))))
            chance.shuffle(jobs)
            given_back = [job for job in jobs if chance.random() < 0.1 and not job.not_to_run]
            direct.release(given_back)
            ends = [outcome(job, chance) for job in jobs if job not in given_back]
            if chance.random() < 0.03:
                return  # Lost: recover() moves it to a dead process.
            settled = direct.settle(ends)
            while settled.locked_elsewhere:
                settled = direct.settle(settled.locked_elsewhere)
            if batches := {end.job.batch_id for end in ends} - {None}:
                backend.finish_batches(batches)

        return work

    def dispatch(chance):
        direct.dispatch(100)
        direct.reserve_times()
        direct.sweep(100)
        direct.unblock_orphans(100)
        direct.prune_semaphores(100)
        direct.finish_batches()
        direct.prune_jobs([State.SUCCESSFUL, State.DISCARDED], 1, 100)

    def recover(chance):
        time.sleep(0.2)
        gone = a_process(f"gone {chance.random()}")
        running = Job.objects.running().order_by("pk").values_list("pk", flat=True)
        with transaction.atomic():
            lost = lock_first(running, 1)  # As the engine locks: by primary key.
            Job.objects.filter(pk__in=lost).update(process=gone)
        recovery.recover(
            backend,
            type(gone).objects.filter(pk=gone.pk),
            recovery.ExitReason(how="was killed"),
            list,
        )

    def operate(chance):
        time.sleep(0.05)
        jobs = Job.objects.filter(queue=chance.choice(QUEUES))
        verbs = [
            jobs.retry,
            jobs.discard,
            jobs.stop,
            lambda: jobs.move(chance.choice(QUEUES)),
            lambda: jobs.reprioritise(1),
            lambda: operations.start(jobs, chance.choice(["discard", "retry"]), "", backend),
            undo_last,
        ]
        chance.choice(verbs)()

    def undo_last():
        if last := Operation.objects.undoable().order_by("-pk").first():
            with suppress(IntegrityError):  # Another thread was faster.
                operations.undo(last, backend)

    before = _deadlock_count()
    load.run(
        *(worker(f"worker {n}") for n in range(4)),
        enqueue,
        enqueue,
        dispatch,
        dispatch,
        recover,
        operate,
        operate,
    )

    assert not load.errors, load.errors
    assert min(load.done.values()) >= AT_LEAST and len(load.done) == 5, load.done
    assert not load.deadlocks, f"{len(load.deadlocks)} of {load.done}:\n" + "\n\n".join(
        load.deadlocks[:2]
    )
    assert _deadlock_count() == before


def test_folds_of_statistics_have_no_deadlock():
    """Of many tasks: the rows of few are found in the same order, whatever the index."""
    load = Load()

    def count(chance):
        tasks = {(chance.choice(QUEUES), f"t{chance.randrange(60)}"): 1 for _ in range(5)}
        with transaction.atomic():
            count_enqueued("default", tasks)

    def fold_some(chance):
        fold("default", chance.randint(5, 60))

    before = _deadlock_count()
    load.run(count, count, fold_some, fold_some, fold_some)

    assert not load.errors, load.errors
    assert not load.deadlocks, "\n\n".join(load.deadlocks[:2])
    assert _deadlock_count() == before


def test_pruning_has_no_deadlock(process):
    """Jobs and failures are deleted by two dispatchers each, and both have executions."""
    load = Load()

    def fail(chance):
        while Job.objects.count() > 400:
            time.sleep(0.02)
        reports = [error_reports.report(ValueError(chance.choice("abcdef"))) for _ in range(40)]
        groups = Failure.objects.identify({each.fingerprint: (each, "") for each in reports})
        now = timezone.now()
        jobs = Job.objects.bulk_create(
            Job(task="t", queue="q", state=State.FAILED, attempt=1, finished_at=now)
            for _ in reports
        )
        Execution.objects.bulk_create(
            Execution(
                job=job,
                attempt=1,
                outcome=Outcome.FAILED,
                process=process.name,
                claimed_at=now,
                started_at=now,
                finished_at=now,
                failure_id=groups[each.fingerprint],
            )
            for job, each in zip(chance.sample(jobs, len(jobs)), reports, strict=True)
        )

    def prune(chance):
        direct.prune_jobs([State.FAILED], 0.2, 100)

    def prune_groups(chance):
        prune_failures("default", 0.2)

    before = _deadlock_count()
    load.run(fail, fail, prune, prune, prune_groups, prune_groups)

    assert not load.errors, load.errors
    assert not load.deadlocks, f"{len(load.deadlocks)}\n" + "\n\n".join(load.deadlocks[:2])
    assert _deadlock_count() == before


@pytest.mark.timeout(60)
def test_failures_do_not_wait_for_jobs_that_are_deleted():
    """A wait for their executions could be part of a deadlock."""
    fail.enqueue()
    testing.drain()
    Failure.objects.update(last_seen=timezone.now() - timedelta(days=2))

    with held_open(lambda: erase("default", [Job.objects.get().pk])):
        prune_failures("default", 86_400)
        assert Failure.objects.exists()

    prune_failures("default", 86_400)
    assert not Failure.objects.exists()


def test_new_alerts_are_inserted_in_one_order():
    """Several dispatchers find the same new problems at a time."""
    target = AlertTarget(way="function", to=("a.b",))
    keys = [("check", f"queue {n}") for n in range(9)]

    alerts.note("default", target, {key: Finding("a", "b", "c") for key in reversed(keys)})

    rows = Alert.objects.order_by("pk").values_list("check_name", "subject")
    assert list(rows) == keys
