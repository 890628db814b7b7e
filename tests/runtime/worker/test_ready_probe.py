"""An idle worker hears of new jobs soon, whatever its ``poll_interval``, on every database."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, connections

from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.models import ClaimedJob
from django_dbqueue.models.enums import Lane
from django_dbqueue.runtime.worker import notify_listener, ready_probe
from django_dbqueue.runtime.worker.notify_listener import NotifyListener
from django_dbqueue.runtime.worker.ready_probe import ReadyProbe

from ... import tasks
from ...conftest import LONG

pytestmark = pytest.mark.django_db(transaction=True)
FOUND_BY_PROBE = pytest.mark.skipif(
    connection.vendor == "postgresql", reason="PostgreSQL has NOTIFY."
)


def a_probe(*patterns: str, lanes: list[Lane] | None = None) -> ReadyProbe:
    allowed = frozenset({"default", "mail"})
    selector = QueueSelector(patterns or ("*",), allowed)
    return ReadyProbe(ClaimedJob.objects.all(), selector, ([] if lanes is None else lanes).append)


@pytest.fixture
def listener() -> Iterator[NotifyListener]:
    listener = NotifyListener("default", lambda payload: True, lambda: None)
    yield listener
    listener.close()


def elsewhere(action) -> None:
    """Run on a connection of another thread: SQLite does not tell of a connection's own writes."""

    def run() -> None:
        action()
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@FOUND_BY_PROBE
def test_ready_jobs_of_the_served_queues_are_found():
    every, mail = a_probe(), a_probe("mail")
    every.finds()
    mail.finds()

    elsewhere(tasks.nothing.enqueue)
    assert (every.finds(), mail.finds()) == (True, False)

    elsewhere(tasks.nothing.using(queue_name="mail", run_after=timedelta(hours=1)).enqueue)
    assert not mail.finds()

    elsewhere(tasks.nothing.using(queue_name="mail").enqueue)
    assert mail.finds()


@FOUND_BY_PROBE
def test_most_urgent_lane_of_a_queue_is_told():
    lanes: list[Lane] = []
    probe = a_probe("default", lanes=lanes)
    probe.finds()
    for priority in (-5, 7, 0):
        elsewhere(tasks.nothing.using(priority=priority).enqueue)
    elsewhere(tasks.nothing.using(queue_name="mail", priority=9).enqueue)

    assert probe.finds()

    assert lanes == [Lane("default", 7)]


@FOUND_BY_PROBE
@pytest.mark.parametrize("is_told", [True, False])
def test_wait_ends_soon_after_a_job_was_enqueued(is_told, monkeypatch, listener):
    """With and without a watch on SQLite's file."""
    if not is_told:
        monkeypatch.setattr(ready_probe.FileWatch, "of", lambda database: None)
    probe = a_probe()
    delays = []
    for _ in range(5):
        timer = threading.Timer(0.2, lambda: elsewhere(enqueue))
        enqueued_at = []

        def enqueue(enqueued_at=enqueued_at):
            tasks.nothing.enqueue()
            enqueued_at.append(time.monotonic())

        timer.start()
        listener.wait(30, probe)
        delays.append(time.monotonic() - (enqueued_at or [time.monotonic()])[0])
        timer.join()
        ClaimedJob.objects.all().delete()
    probe.close()

    assert sorted(delays)[2] < 0.1, delays


def test_idle_worker_starts_a_job_long_before_its_next_poll(worker):
    worker(poll_interval=60)
    for pause in (1.0, 0.0, 0.3, 1.2):
        time.sleep(pause)
        began = time.monotonic()
        tasks.nothing.enqueue().wait(timeout=LONG)
        assert time.monotonic() - began < 20


@FOUND_BY_PROBE
def test_error_of_the_probe_ends_the_wait(monkeypatch, listener):
    def fail(probe):
        raise OperationalError("The database is away.")

    monkeypatch.setattr(ReadyProbe, "finds", fail)
    probe = a_probe()

    began = time.monotonic()
    listener.wait(30, probe)

    probe.close()
    assert time.monotonic() - began < 10
    assert notify_listener._finds(probe)


@pytest.mark.skipif(connection.vendor != "sqlite", reason="Others have no file to watch.")
def test_idle_sqlite_worker_does_not_look_again_and_again(monkeypatch, listener):
    probe = a_probe()
    if probe._watch is None:
        pytest.skip("The database is in memory, or the system does not tell of writes.")
    looks = []
    monkeypatch.setattr(ReadyProbe, "_has_changed", lambda self: bool(looks.append(1)))

    listener.wait(1.0, probe)

    probe.close()
    assert 0 < len(looks) < 20


@pytest.mark.skipif(connection.vendor != "sqlite", reason="Others have no file to watch.")
def test_closed_probes_leave_no_open_file():
    a_probe().close()
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("The system does not list open files.")
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(20):
        a_probe().close()

    assert len(os.listdir("/proc/self/fd")) <= before
