"""Workers and callers behind a real PgBouncer, as in docs/scaling.md."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from django.db import Error, connection, connections

from django_dbqueue.models import Execution, Job
from django_dbqueue.runtime.connections import prepare
from django_dbqueue.runtime.socket_watchdog import deadline

from .. import servers, tasks
from ..conftest import is_found_within, log_of, most_at_a_time, until
from ..models import Interval, Run
from .conftest import Elsewhere
from .test_failover import Client, runs

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]
# No process dies: a worker that is slow on a busy machine must not be declared dead.
OPTIONS = {"beat_interval": 1, "dead_after": 60, "poll_interval": 0.5}


class Pool:
    """A PgBouncer in front of a PostgreSQL server."""

    def __init__(self, home, migrated, mode: str, **settings) -> None:
        self._home, self.mode = home, mode
        self.server = home.start(migrated.copy(home.folder / "server"))
        self.bouncer = servers.PgBouncer(
            home.folder / "bouncer", self.server, pool_mode=mode, **settings
        )
        home.start(self.bouncer)

    @property
    def url(self) -> str:
        return self.bouncer.url() + (
            "?DISABLE_SERVER_SIDE_CURSORS=True" if self.mode == "transaction" else ""
        )

    def restart(self) -> None:
        self.bouncer.kill()
        self.bouncer.start()


@pytest.fixture
def pool(home, migrated, use_database):
    def start(mode: str, **settings) -> Pool:
        pool = Pool(home, migrated, mode, **settings)
        use_database(pool.url)
        return pool

    yield start
    connection.close()


def run_behind(runqueue, url: str, *arguments: str, **options):
    options = json.dumps({**OPTIONS, **options})
    return runqueue(*arguments, **servers.environment(url), DBQUEUE_OPTIONS=options)


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_pool_restart_loses_no_job_of_any_kind(pool, runqueue, tmp_path, mode):
    behind, path = pool(mode, default_pool_size=40), tmp_path / "lines"
    child = run_behind(runqueue, behind.url, "--processes", "2")
    tasks.record.enqueue_many([()] * 200)
    tasks.row_async.enqueue_many([(f"async {number}",) for number in range(50)])
    tasks.atomic_row.enqueue_many([(f"atomic {number}",) for number in range(50)])
    tasks.occupy.enqueue_many([("key", 0.02)] * 20)
    tasks.fail.enqueue_many([()] * 20)
    for version in range(30):
        tasks.leave_version.enqueue(f"name {version % 5}", version)

    until(lambda: not Job.objects.exclude(state__in=["successful", "failed"]).exists())
    assert Counter(Job.objects.values_list("state", flat=True)) == {
        "successful": 200 + 50 + 50 + 20 + 5,
        "failed": 20,
    }
    assert Run.objects.count() == 300
    assert most_at_a_time(list(Interval.objects.all())) <= 2

    client = Client(path)
    client.start()
    until(lambda: sum(runs(path).values()) > 50)
    for _ in range(2):
        behind.restart()
        before = len(client.confirmed)
        until(lambda before=before: len(client.confirmed) > before + 50)
    client.stop()
    connection.close()

    left = Job.objects.filter(task="tests.tasks.leave_line")
    until(lambda: not left.exclude(state="successful").exists())
    assert {str(pk) for pk in left.values_list("pk", flat=True)} >= set(client.confirmed)
    assert runs(path) == Counter(str(pk) for pk in left.values_list("pk", flat=True))
    # Interrupted: the worker could not read the earlier attempts before the task started.
    assert (
        {"successful", "failed"}
        <= set(Execution.objects.values_list("outcome", flat=True))
        <= {"successful", "failed", "interrupted"}
    )
    assert child.poll() is None


def test_workers_behind_transaction_pool_log_that_they_poll(pool, runqueue):
    child = run_behind(runqueue, pool("transaction").url)
    until(lambda: "LISTEN" in log_of(child))
    assert is_found_within(tasks.nothing, 5)
    assert log_of(child).count("LISTEN") == 1


def test_enqueue_through_pool_wakes_directly_connected_workers(pool, runqueue):
    behind = pool("transaction")
    child = run_behind(runqueue, behind.server.url(), poll_interval=30)
    assert is_found_within(tasks.nothing, 10)
    assert "LISTEN" not in log_of(child)


def test_connection_waiting_for_full_pool_times_out(pool):
    """PgBouncer accepts the connection at once, but does not answer Django's first query."""
    pool("session", default_pool_size=1, query_wait_timeout=3600)
    connection.ensure_connection()

    def connect():
        prepare("default", 1.0)
        with deadline(1.0), pytest.raises(Error):
            connections["default"].ensure_connection()

    Elsewhere(connect).result()


def test_undersized_pool_delays_jobs_and_loses_none(pool, runqueue):
    behind = pool("transaction", default_pool_size=2)
    child = run_behind(runqueue, behind.url)
    tasks.hold_transaction.enqueue_many([(1.0,)] * 8)
    tasks.record.enqueue_many([()] * 50)

    until(lambda: not Job.objects.exclude(state="successful").exists())
    assert set(Execution.objects.values_list("outcome", flat=True)) == {"successful"}
    assert child.poll() is None
