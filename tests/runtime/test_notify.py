"""An idle worker looks seldom: whatever makes a job ready tells of it, and who hears no more looks again."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from django_dbqueue.core import notify
from django_dbqueue.core.notify import wake
from django_dbqueue.core.options import Options
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job
from django_dbqueue.models.enums import Lane
from django_dbqueue.runtime import dispatcher as dispatcher_module
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.worker import settler as settler_module
from django_dbqueue.runtime.worker.notify_listener import NotifyListener
from django_dbqueue.runtime.worker.settler import Settler

from .. import direct, tasks
from ..conftest import LONG, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        connection.vendor != "postgresql", reason="Nobody is told of jobs elsewhere"
    ),
]


@pytest.fixture
def told(monkeypatch):
    """The queues that are told of."""
    told = []
    monkeypatch.setattr(notify, "wake", lambda database, queue: told.append(queue))
    return told


def test_what_comes_right_after_a_job_that_it_was_told_of_does_not_wait(worker):
    """Nobody is told of it: that is done a few times a second at most."""
    worker(poll_interval=60)
    tasks.nothing.enqueue().wait(timeout=LONG)

    for pause in (0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08):
        time.sleep(pause)
        tasks.nothing.enqueue().wait(timeout=30)


def test_what_is_ready_again_does_not_wait_until_it_looks_again(worker):
    worker(poll_interval=60)

    again = tasks.succeed_at_third.enqueue()
    assert again.wait(timeout=30).attempts == 3

    first = tasks.wait_with_key.enqueue("a key", 0.5)
    until(lambda: Job.objects.filter(pk=first.id, state="running"))
    time.sleep(0.1)
    tasks.wait_with_key.enqueue("a key", 0)
    until(lambda: Job.objects.get(pk=first.id).attempt == 2, seconds=30)
    until(lambda: Job.objects.get(pk=first.id).state == "successful", seconds=30)


def test_what_another_worker_gives_back_is_claimed_at_once(worker, process):
    jobs = tasks.nothing.enqueue_many([()] * 3)
    claimed = direct.claim(Lane("default", 0), process, 3)
    worker(poll_interval=60)
    time.sleep(0.3)

    direct.release(claimed)

    for each in jobs:
        each.wait(timeout=30)


def test_a_key_that_is_asked_for_in_another_queue_while_it_runs_is_told_of_there(claim):
    tasks.wait_with_key.enqueue("a key", 0)
    (job,) = claim()
    tasks.wait_with_key.using(queue_name="mail").enqueue("a key", 0)

    settled = direct.settle(
        [AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)]
    )

    assert settled.unblocked == ["mail"]
    assert (Job.objects.get().queue, Job.objects.get().state) == ("mail", "ready")


def test_a_notify_that_did_not_go_out_keeps_nobody_quiet(monkeypatch):
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


class Hearing:
    """A worker that only waits: what it is told, and how often it began to hear, or heard no more."""

    def __init__(self):
        self.told, self.begun = [], 0
        self.listener = NotifyListener("default", self._hear, self._begin)
        self.listener.start()

    def _hear(self, payload):
        self.told.append(payload)
        return "mail" in payload

    def _begin(self):
        self.begun += 1

    def wait_until(self, condition):
        end = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < end
            self.listener.wait(0.1)


@pytest.fixture
def hearing():
    hearing = Hearing()
    yield hearing
    hearing.listener.close()
    until(lambda: "listener" not in {thread.name for thread in threading.enumerate()})
    hearing.listener.wake()  # A thread that ends a job may come late.


def test_a_listener_behind_a_pool_by_transactions_does_not_think_that_it_hears(
    monkeypatch, request
):
    psycopg = pytest.importorskip("psycopg")
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda info: -1))
    hearing = request.getfixturevalue("hearing")
    hearing.wait_until(lambda: hearing.begun)
    assert hearing.listener.patience == 1


def test_a_listener_that_lost_its_connection_looks_again_when_it_hears_again(hearing):
    hearing.wait_until(lambda: hearing.begun == 1)
    assert hearing.listener.patience > 1
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        )
    hearing.wait_until(lambda: hearing.begun == 3)  # It heard no more, and hears again.
    assert hearing.listener.patience > 1
    wake("default", "mail", 3)
    hearing.wait_until(lambda: hearing.told == ["mail,3"])


def test_a_connection_that_was_closed_under_it_is_lost_and_does_not_keep_it_busy(hearing):
    """As the driver does by itself when what it reads makes no sense."""
    hearing.wait_until(lambda: hearing.begun == 1)
    hearing.listener._line.finish()
    hearing.wait_until(lambda: hearing.begun == 2)
    assert hearing.listener.patience == 1
    began = time.thread_time()
    hearing.listener.wait(0.5)
    assert time.thread_time() - began < 0.1
    hearing.wait_until(lambda: hearing.begun == 3)


def test_what_is_told_of_to_others_is_no_reason_to_look(hearing):
    hearing.wait_until(lambda: hearing.begun)
    began = time.monotonic()
    wake("default", "invoices")
    hearing.listener.wait(0.5)
    assert hearing.told == ["invoices"]
    assert time.monotonic() - began >= 0.5


def test_whoever_is_woken_while_it_works_does_not_wait(hearing):
    hearing.wait_until(lambda: hearing.begun)
    for _ in range(3):
        hearing.listener.wake()
        hearing.listener.wake()
        began = time.monotonic()
        hearing.listener.wait(LONG)
        assert time.monotonic() - began < LONG / 2
    began = time.monotonic()
    hearing.listener.wait(0.3)
    assert time.monotonic() - began >= 0.3


def test_a_retry_by_code_tells_of_each_queue(told):
    for queue in ("mail", "mail", "default"):
        tasks.fail.using(queue_name=queue).enqueue()
    Job.objects.update(state="failed", finished_at=timezone.now())

    assert Job.objects.all().retry() == 3
    assert sorted(told) == ["default", "mail"]


def test_what_was_due_is_told_of_even_if_the_sweep_after_it_fails(
    backend, told, process, monkeypatch
):
    tasks.add.enqueue(1)
    Job.objects.update(state="scheduled")
    tasks.one_at_a_time.enqueue_many([(), ()])
    direct.claim(Lane("default", 0), process, 2)

    def fail(*args):
        raise OperationalError("deadlock detected")

    monkeypatch.setattr(dispatcher_module, "sweep", fail)
    Dispatcher(backend, backend.config, SharedStatus.private(10))._work()

    assert told == ["default"]


def test_an_outcome_that_is_written_at_the_second_try_is_told_of(claim, monkeypatch):
    settle, calls, told = settler_module.settle, [], []

    def refuse_once(database, outcomes):
        calls.append(outcomes)
        if len(calls) == 1:
            raise OperationalError("a passing error")
        return settle(database, outcomes)

    monkeypatch.setattr(settler_module, "settle", refuse_once)
    tasks.one_at_a_time.enqueue()
    (job,) = claim()
    settler = Settler("default", Options(), lambda: True, told.append)

    assert (
        settler._write([AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)])
        == []
    )

    assert [settled.written[0].job for settled in told] == [job]


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
