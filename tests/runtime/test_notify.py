"""LISTEN and NOTIFY: a ready job notifies idle workers, and a lost listener falls back to polling."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import OperationalError, connection, connections
from django.utils import timezone

from django_dbqueue.core import notify
from django_dbqueue.core.notify import wake
from django_dbqueue.core.options import Options
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job
from django_dbqueue.models.enums import Lane
from django_dbqueue.runtime import dispatcher as dispatcher_module
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.logging_setup import RepeatedProblem
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.worker import settler as settler_module
from django_dbqueue.runtime.worker.notify_listener import NotifyListener
from django_dbqueue.runtime.worker.services import WorkerServices
from django_dbqueue.runtime.worker.settler import Settler

from .. import direct, tasks
from ..conftest import LONG, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="Only PostgreSQL has NOTIFY."),
]


@pytest.fixture
def notified(monkeypatch):
    """The queues that were notified."""
    notified = []
    monkeypatch.setattr(notify, "wake", lambda database, queue: notified.append(queue))
    return notified


def test_job_within_notify_throttle_does_not_wait_for_next_poll(worker):
    """NOTIFY is throttled, so such a job sends none."""
    worker(poll_interval=60)
    tasks.nothing.enqueue().wait(timeout=LONG)

    for pause in (0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08):
        time.sleep(pause)
        tasks.nothing.enqueue().wait(timeout=30)


def test_retried_and_rerun_jobs_do_not_wait_for_next_poll(worker):
    worker(poll_interval=60)

    again = tasks.succeed_at_third.enqueue()
    assert again.wait(timeout=30).attempts == 3

    first = tasks.wait_with_key.enqueue("a key", 0.5)
    until(lambda: Job.objects.filter(pk=first.id, state="running"))
    time.sleep(0.1)
    tasks.wait_with_key.enqueue("a key", 0)
    until(lambda: Job.objects.get(pk=first.id).attempt == 2, seconds=30)
    until(lambda: Job.objects.get(pk=first.id).state == "successful", seconds=30)


def test_job_released_by_another_worker_is_claimed_at_once(worker, process):
    jobs = tasks.nothing.enqueue_many([()] * 3)
    claimed = direct.claim(Lane("default", 0), process, 3)
    worker(poll_interval=60)
    time.sleep(0.3)

    direct.release(claimed)

    for each in jobs:
        each.wait(timeout=30)


def test_key_reenqueued_while_running_notifies_its_new_queue(claim):
    tasks.wait_with_key.enqueue("a key", 0)
    (job,) = claim()
    tasks.wait_with_key.using(queue_name="mail").enqueue("a key", 0)

    settled = direct.settle(
        [AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)]
    )

    assert settled.unblocked == ["mail"]
    assert (Job.objects.get().queue, Job.objects.get().state) == ("mail", "ready")


def test_notify_in_open_transaction_does_not_start_throttle(monkeypatch):
    monkeypatch.setattr(notify, "_last", {})
    connection.set_autocommit(False)
    try:
        wake("default", "mail")
        assert not notify._last
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    wake("default", "mail")
    assert list(notify._last) == [("default", "mail")]


class ListenerProbe:
    """A listener that records its payloads, and how often LISTEN started or was lost."""

    def __init__(self):
        self.notified, self.changes = [], 0
        self.listener = NotifyListener("default", self._on_notify, self._on_change)
        self.listener.start()

    def _on_notify(self, payload):
        self.notified.append(payload)
        return "mail" in payload

    def _on_change(self):
        self.changes += 1

    def wait_until(self, condition):
        end = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < end
            self.listener.wait(0.1)


def terminate_listeners():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        )


@pytest.fixture
def probe():
    probe = ListenerProbe()
    yield probe
    probe.listener.close()
    until(lambda: "listener" not in {thread.name for thread in threading.enumerate()})
    probe.listener.wake()  # A thread that finishes a job may wake a closed listener.


def test_listener_behind_transaction_pooler_keeps_polling(monkeypatch, request):
    psycopg = pytest.importorskip("psycopg")
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda info: -1))
    probe = request.getfixturevalue("probe")
    probe.wait_until(lambda: probe.changes)
    assert probe.listener.patience == 1


def test_connection_that_was_not_taken_over_is_replaced(probe):
    probe.wait_until(lambda: probe.changes == 1)
    probe.listener.listen_anew()
    unused = until(lambda: probe.listener._made)

    probe.listener.listen_anew()
    until(lambda: unused[0].status)  # The driver's CONNECTION_BAD: it was closed.

    probe.wait_until(lambda: probe.changes == 3)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT pg_notify({notify.CHANNEL_SQL}, 'mail')")
    probe.wait_until(lambda: probe.notified)


def test_listener_polls_after_reconnect(probe):
    probe.wait_until(lambda: probe.changes == 1)
    assert probe.listener.patience > 1
    terminate_listeners()
    probe.wait_until(lambda: probe.changes == 3)  # Once for the loss, once for the new LISTEN.
    assert probe.listener.patience > 1
    wake("default", "mail", 3)
    probe.wait_until(lambda: probe.notified == ["mail,3"])


def test_listener_logs_an_outage_once_a_minute(probe, monkeypatch, caplog):
    """It tries to connect each second."""
    caplog.set_level("INFO", "django_dbqueue")
    probe.wait_until(lambda: probe.changes == 1)
    refused = []

    def refuse(alias):
        refused.append(alias)
        raise OperationalError("connection refused")

    def lines():
        return [line for line in caplog.messages if line.startswith("listener: ")]

    with monkeypatch.context() as outage:
        outage.setattr(connections, "create_connection", refuse)
        terminate_listeners()
        probe.wait_until(lambda: len(refused) == 3)
        assert len(lines()) == 1 and "polling for new jobs" in lines()[0]

        outage.setattr(RepeatedProblem, "AGAIN", 0.0)  # The minute is over.
        probe.wait_until(lambda: len(refused) == 4 and len(lines()) == 2)
        outage.setattr(RepeatedProblem, "AGAIN", 60.0)
        probe.wait_until(lambda: len(refused) == 5)

    probe.wait_until(lambda: probe.changes == 3)
    assert len(lines()) == 3 and "resolved after" in lines()[2]


def test_listener_with_closed_connection_does_not_spin(probe):
    """The driver closes its connection itself after a protocol error."""
    probe.wait_until(lambda: probe.changes == 1)
    probe.listener._line.finish()
    probe.wait_until(lambda: probe.changes == 2)
    assert probe.listener.patience == 1
    began = time.thread_time()
    probe.listener.wait(0.5)
    assert time.thread_time() - began < 0.1
    probe.wait_until(lambda: probe.changes == 3)


def test_notify_for_unserved_queue_does_not_wake_listener(probe):
    probe.wait_until(lambda: probe.changes)
    began = time.monotonic()
    wake("default", "invoices")
    probe.listener.wait(0.5)
    assert probe.notified == ["invoices"]
    assert time.monotonic() - began >= 0.5


def test_wake_before_wait_skips_one_wait(probe):
    probe.wait_until(lambda: probe.changes)
    for _ in range(3):
        probe.listener.wake()
        probe.listener.wake()
        began = time.monotonic()
        probe.listener.wait(LONG)
        assert time.monotonic() - began < LONG / 2
    began = time.monotonic()
    probe.listener.wait(0.3)
    assert time.monotonic() - began >= 0.3


def test_retry_notifies_each_queue_once(notified):
    for queue in ("mail", "mail", "default"):
        tasks.fail.using(queue_name=queue).enqueue()
    Job.objects.update(state="failed", finished_at=timezone.now())

    assert Job.objects.all().retry() == 3
    assert sorted(notified) == ["default", "mail"]


def test_due_jobs_are_notified_although_sweep_fails(backend, notified, process, monkeypatch):
    tasks.add.enqueue(1)
    Job.objects.update(state="scheduled")
    tasks.one_at_a_time.enqueue_many([(), ()])
    direct.claim(Lane("default", 0), process, 2)

    def fail(*args):
        raise OperationalError("deadlock detected")

    monkeypatch.setattr(dispatcher_module, "sweep", fail)
    Dispatcher(backend, backend.config, SharedStatus.private(10))._work()

    assert notified == ["default"]


def test_outcome_written_at_second_try_is_reported(claim, monkeypatch):
    settle, calls, notified = settler_module.settle, [], []

    def refuse_once(database, outcomes, *args):
        calls.append(outcomes)
        if len(calls) == 1:
            raise OperationalError("a passing error")
        return settle(database, outcomes, *args)

    monkeypatch.setattr(settler_module, "settle", refuse_once)
    tasks.one_at_a_time.enqueue()
    (job,) = claim()
    settler = Settler("default", Options(), WorkerServices(settled=notified.append))

    assert (
        settler._write([AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)])
        == []
    )

    assert [settled.written[0].job for settled in notified] == [job]


@pytest.mark.parametrize(
    ("payload", "lane"),
    [
        ("mail,-100", ("mail", -100)),
        ("mail", ("mail", None)),
        ("mail,", ("mail", None)),
        ("mail,x", ("mail", None)),
        ("mail,1,2", ("mail", None)),
        ("mail,99999999999999999999", ("mail", None)),
        ("mail,\u0663", ("mail", None)),
        ("", ("", None)),
    ],
)
def test_malformed_priority_in_a_payload_is_none(payload, lane):
    assert notify.parse_payload(payload) == lane


def test_malformed_payloads_interrupt_neither_listening_nor_claiming(worker, caplog):
    worker(poll_interval=60)
    tasks.nothing.enqueue().wait(timeout=LONG)
    with connection.cursor() as cursor:
        for payload in (
            "default,x",
            ",",
            "",
            "default,99999999999999999999",
            "default,\u0663",
            "default,999",
            "a" * 7000,
        ):
            cursor.execute("SELECT pg_notify(%s, %s)", [notify.CHANNEL, payload])

    for _ in range(3):
        tasks.nothing.enqueue().wait(timeout=30)

    assert "interrupted" not in caplog.text and "unavailable" not in caplog.text
