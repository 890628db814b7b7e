"""A project's model receivers without a sender do not change the queue's behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, models
from django.db.models.signals import m2m_changed, post_delete, post_save, pre_delete, pre_save

from django_dbqueue import batch, recurring
from django_dbqueue.compat import task_backends
from django_dbqueue.contrib import operations
from django_dbqueue.engine import retention, row_operations
from django_dbqueue.engine.recurring import delete_undeclared
from django_dbqueue.models import (
    Batch,
    Execution,
    Failure,
    Job,
    Operation,
    Process,
    Queue,
    RecurringExecution,
    RecurringTask,
    StackTrace,
)
from django_dbqueue.models.expressions import Now, now_plus
from django_dbqueue.recurrence.target import enqueue
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.heartbeat import Heartbeat
from django_dbqueue.runtime.scheduler import Scheduler
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.testing import drain

from .. import direct, tasks

SIGNALS = (pre_save, post_save, pre_delete, post_delete, m2m_changed)

pytestmark = pytest.mark.django_db


@pytest.fixture
def receivers() -> Iterator[None]:
    """Receivers without a sender, of an audit log that fails for the queue's rows."""

    def audit(sender: type[models.Model], **kwargs: Any) -> None:
        if sender._meta.app_label == "dbqueue":
            raise RuntimeError(f"The audit log cannot store a row of {sender.__name__}.")

    for signal in SIGNALS:
        signal.connect(audit)
    yield
    for signal in SIGNALS:
        signal.disconnect(audit)


def long_ago() -> Any:
    return now_plus(-86_400 * 400)


def test_heartbeat_during_recovery_keeps_process_alive(process, claim):
    tasks.add.enqueue(1)
    (job,) = claim()
    Process.objects.update(expires_at=now_plus(-1))
    pre_delete.connect(ignore := lambda **kwargs: None)
    has_beaten = []

    def beat(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if sql.startswith("DELETE") and "dbqueue_process" in sql and not has_beaten:
            has_beaten.append(True)
            Process.objects.filter(pk=process.pk).beat(3600)
        return execute(sql, parameters, many, context)

    try:
        with connection.execute_wrapper(beat):
            recovery.recover(
                task_backends["default"],
                Process.objects.silent(),
                recovery.ExitReason(how="was silent"),
                list,
            )
    finally:
        pre_delete.disconnect(ignore)

    assert has_beaten
    assert Process.objects.filter(pk=process.pk).exists()
    job.refresh_from_db()
    assert (job.state, job.process_id) == ("running", process.pk)


@pytest.mark.django_db(transaction=True)
def test_role_registers_and_deregisters_despite_receivers(receivers, backend):
    heartbeat = Heartbeat(
        Process.Kind.WORKER, "default", backend.config, SharedStatus.private(), {}
    )

    process = heartbeat.start()
    registered = Process.objects.get()
    heartbeat.stop()

    assert (registered.pk, registered.name) == (process.pk, process.name)
    assert not Process.objects.exists()


def test_supervisor_reregisters_under_its_id_despite_receivers(receivers, backend):
    heartbeat = Heartbeat(
        Process.Kind.SUPERVISOR, "default", backend.config, SharedStatus.private(), {}
    )
    heartbeat._register()
    pk = heartbeat.process.pk
    Process.objects.filter(pk=pk).erase()

    heartbeat._beat()

    assert Process.objects.get().pk == pk


def test_dead_process_is_recovered_despite_receivers(receivers, backend):
    dead = a_process_without_signals()
    job = tasks.add.enqueue(1)
    Job.objects.update(state="running", process=dead, started_at=now_plus(0), attempt=1)

    assert (
        recovery.recover(
            backend, Process.objects.all(), recovery.ExitReason(how="was killed"), list
        )
        == 1
    )

    assert not Process.objects.exists()
    assert Execution.objects.get(job=job.id).outcome == Execution.Outcome.LOST


def test_jobs_are_enqueued_and_run_despite_receivers(receivers):
    with batch(on_finish=tasks.sum_up) as opened:
        one = tasks.add.enqueue(1)
        tasks.add.enqueue_many([(2,), (3,)])
        tasks.add.using(key="one").enqueue(4)

    drain()

    one.refresh()
    assert (one.return_value, set(Job.objects.values_list("state", flat=True))) == (
        1,
        {"successful"},
    )
    assert Batch.objects.get(pk=opened.id).finished_at


def test_recurring_tasks_are_declared_run_and_deleted_despite_receivers(receivers, backend):
    recurring(every=timedelta(minutes=1))(tasks.nothing)
    scheduler = Scheduler(backend)
    scheduler.turn(waiting=True)
    RecurringTask.objects.update(next_run_at=now_plus(-1))

    scheduler._known_at = 0.0
    scheduler.turn(waiting=True)

    execution = RecurringExecution.objects.get()
    assert execution.job == Job.objects.get().pk
    assert direct.run_now(enqueue) == 1
    RecurringTask.objects.update(declared_at=long_ago())
    delete_undeclared(direct.DATABASE, 86_400)
    assert not RecurringTask.objects.exists() and not RecurringExecution.objects.exists()


def test_recurring_task_declared_during_deletion_is_kept(backend):
    RecurringTask.objects.bulk_create(
        [
            RecurringTask(
                name="a",
                task="a",
                every=timedelta(minutes=1),
                is_from_code=True,
                declared_at=long_ago(),
            )
        ]
    )
    pre_delete.connect(ignore := lambda **kwargs: None)

    def declare(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if sql.startswith("DELETE") and "dbqueue_recurringtask" in sql:
            RecurringTask.objects.update(declared_at=now_plus(0))
        return execute(sql, parameters, many, context)

    try:
        with connection.execute_wrapper(declare):
            delete_undeclared(direct.DATABASE, 86_400)
    finally:
        pre_delete.disconnect(ignore)

    assert RecurringTask.objects.exists()


def test_failures_and_batches_are_pruned_despite_receivers(receivers, backend):
    tasks.fail.enqueue()
    drain()
    retention.erase(direct.DATABASE, [Job.objects.get().pk])
    Failure.objects.update(last_seen=long_ago())
    Batch.objects.bulk_create([Batch(finished_at=long_ago())])

    retention.prune_failures(direct.DATABASE, 86_400)
    direct.prune_batches(86_400)

    assert not Failure.objects.exists() and not Batch.objects.exists()


def test_stack_of_hanged_job_is_recorded_despite_receivers(receivers):
    tasks.add.enqueue(1)
    job = Job.objects.get()

    StackTrace.objects.record(job, "first", {})
    StackTrace.objects.record(job, "second", {})

    assert StackTrace.objects.get().text == "second"


def test_operations_run_and_are_undone_despite_receivers(receivers, backend):
    tasks.add.enqueue_many([(1,), (2,)])
    (queue,) = Queue.objects.bulk_create([Queue(name="mail")])
    queues = Queue.objects.filter(pk=queue.pk)

    discarded = operations.start(Job.objects.all(), "discard", "", None)
    undone = operations.undo(discarded, None)
    paused = row_operations.record(queues, "pause", lambda: queues.update(paused_at=Now()))
    resumed = row_operations.undo(paused)

    assert (discarded.changed, undone.changed, paused.changed, resumed.changed) == (2, 2, 1, 1)
    assert set(Job.objects.values_list("state", flat=True)) == {"ready"}


@pytest.mark.skipif(connection.vendor != "mysql", reason="Other databases return what they insert.")
def test_operation_has_its_id_where_inserts_return_none(monkeypatch):
    monkeypatch.setattr(connection.features, "can_return_columns_from_insert", False)

    operation = Operation.objects.insert(Operation(verb="discard"))

    assert operation.pk == Operation.objects.get().pk


def a_process_without_signals() -> Process:
    process = Process(
        name="worker@here:1:abc", kind="worker", hostname="here", pid=1, expires_at=now_plus(3600)
    )
    Process.objects.register(process)
    return process
