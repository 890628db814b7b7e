"""The primary is killed under load and its standby promoted, on PostgreSQL servers of the tests."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from django.db import Error, connection

from django_dbqueue.models import Execution, Job, Process, Queue

from .. import proxy as proxies
from .. import servers, tasks
from ..conftest import log_of, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]
# Only servers die: a worker that is slow on a busy machine must not be declared dead.
OPTIONS = {"beat_interval": 1, "dead_after": 60, "prefetch": 0}


class Pair:
    """A primary and its standby. ``wire``: replication. ``front``: a proxy to the primary."""

    def __init__(self, home, migrated, synchronous: bool) -> None:
        options = {"synchronous_standby_names": "*"} if synchronous else {}
        self.primary = migrated.copy(home.folder / "one", **options)
        self.standby = migrated.copy(home.folder / "two")
        self.wire = proxies.Proxy(("127.0.0.1", self.primary.port))
        self.front = proxies.Proxy(("127.0.0.1", self.primary.port))
        self.standby.standby(self.wire.port)
        home.start(self.primary)
        home.start(self.standby)
        until(lambda: self.primary.ask("SELECT state FROM pg_stat_replication") == "streaming")

    @property
    def url(self) -> str:
        """Both addresses: the client chooses the one that accepts writes."""
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in (self.primary, self.standby))
        return f"postgres://postgres@{hosts}/queue?target_session_attrs=read-write"

    @property
    def front_url(self) -> str:
        return f"postgres://postgres@127.0.0.1:{self.front.port}/queue"

    def until_replayed(self) -> None:
        until(
            lambda: self.primary.ask(
                "SELECT bool_and(replay_lsn >= pg_current_wal_lsn()) FROM pg_stat_replication"
            )
        )

    def fail_over(self) -> None:
        self.primary.kill()
        self.standby.promote()
        self.front.lead_to(self.standby.port)

    def close(self) -> None:
        self.wire.close()
        self.front.close()


@pytest.fixture
def pair(home, migrated, use_database):
    pairs = []

    def start(synchronous: bool) -> Pair:
        pairs.append(Pair(home, migrated, synchronous))
        use_database(pairs[-1].url)
        return pairs[-1]

    yield start
    connection.close()
    for pair in pairs:
        pair.close()


class Client(threading.Thread):
    """Enqueues until it is stopped, and records the jobs whose commit returned."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._stop_asked = str(path), threading.Event()
        self.confirmed: list[str] = []

    def run(self) -> None:
        while not self._stop_asked.wait(0.002):
            try:
                self.confirmed.append(tasks.leave_line.enqueue(self._path, seconds=0.02).id)
            except Error:
                connection.close()
        connection.close()

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()


def runs(path: Path) -> Counter[str]:
    """Return how often each job has started."""
    return (
        Counter(line.split()[0] for line in path.read_text().splitlines())
        if path.exists()
        else Counter()
    )


def ids(**which) -> set[str]:
    """Return ids of jobs, or none while no server answers."""
    try:
        return {str(pk) for pk in Job.objects.filter(**which).values_list("pk", flat=True)}
    except Error:
        connection.close()
        return set()


def all_successful() -> bool:
    return not Job.objects.exclude(state="successful").exists()


@pytest.mark.parametrize("way", ["target_session_attrs", "proxy"])
def test_synchronous_failover_loses_no_job_and_repeats_none(pair, runqueue, tmp_path, way):
    servers_ = pair(synchronous=True)
    path = tmp_path / "lines"
    url = servers_.url if way == "target_session_attrs" else servers_.front_url
    child = runqueue(
        "--processes", "2", **servers.environment(url), DBQUEUE_OPTIONS=json.dumps(OPTIONS)
    )
    client = Client(path)
    client.start()
    until(lambda: len(ids(state="successful")) > 50)
    until(lambda: Process.objects.filter(kind="worker").count() == 2)

    servers_.fail_over()
    failed_over, before = time.monotonic(), len(client.confirmed)
    until(lambda: len(client.confirmed) > before + 30)
    client.stop()

    until(lambda: ids(state="successful").issuperset(client.confirmed))
    print(f"finished {time.monotonic() - failed_over:.1f} s after the promotion")
    until(all_successful)
    assert runs(path) == Counter(ids())
    assert set(Execution.objects.values_list("outcome", flat=True)) == {"successful"}
    assert Process.objects.filter(kind="worker").count() == 2
    assert child.poll() is None


class LostTransactions:
    """Running jobs whose last transactions the promoted standby does not have."""

    NUMBER = 3

    def __init__(self, pair: Pair, tmp_path: Path, runqueue, **options) -> None:
        self.pair, self.path, self._go, self._runqueue = (
            pair,
            tmp_path / "lines",
            tmp_path / "go",
            runqueue,
        )
        self.child = self.start_worker(**options)
        until(lambda: Process.objects.filter(kind="worker").exists())
        Queue.objects.named("default").pause()
        self.ids = [
            each.id
            for each in tasks.leave_line.enqueue_many(
                [(str(self.path), str(self._go))] * self.NUMBER
            )
        ]

    def start_worker(self, **changes):
        options = json.dumps({**OPTIONS, **changes})
        return self._runqueue(**servers.environment(self.pair.url), DBQUEUE_OPTIONS=options)

    def start_jobs(self) -> None:
        Queue.objects.named("default").resume()
        until(lambda: runs(self.path) == Counter(self.ids))

    def fail_over(self) -> None:
        connection.close()
        self.pair.fail_over()
        Queue.objects.named("default").resume()

    def let_jobs_end(self) -> None:
        self._go.touch()

    def logged_double_runs(self) -> set[str]:
        return set(re.findall(r"job (\S+) .* runs twice", log_of(self.child)))


@pytest.fixture
def lost(pair, runqueue, tmp_path, request):
    return LostTransactions(
        pair(synchronous=False), tmp_path, runqueue, **getattr(request, "param", {})
    )


# All threads are busy, so it cannot claim its own jobs again.
@pytest.mark.parametrize("lost", [{"threads": LostTransactions.NUMBER}], indirect=True)
def test_lost_claim_repeated_by_another_worker_is_logged(lost):
    lost.pair.until_replayed()
    lost.pair.wire.cut()
    lost.start_jobs()

    lost.fail_over()
    until(lambda: "listener: connection unavailable" in log_of(lost.child))
    lost.start_worker()
    until(lambda: runs(lost.path) == Counter(lost.ids * 2))
    lost.let_jobs_end()

    until(all_successful)
    until(lambda: lost.logged_double_runs() == set(lost.ids))
    assert Execution.objects.filter(outcome="successful").count() == lost.NUMBER


def test_lost_claim_repeated_by_its_own_worker_starts_nothing(lost):
    """The worker already runs the jobs that it claims."""
    lost.pair.until_replayed()
    lost.pair.wire.cut()
    lost.start_jobs()

    lost.fail_over()
    until(lambda: Job.objects.running().count() == lost.NUMBER)
    lost.let_jobs_end()

    until(all_successful)
    assert runs(lost.path) == Counter(lost.ids)
    assert Execution.objects.filter(outcome="successful").count() == lost.NUMBER


def test_lost_end_is_followed_by_logged_rerun(lost):
    lost.start_jobs()
    lost.pair.until_replayed()
    lost.pair.wire.cut()
    lost.let_jobs_end()
    until(all_successful)

    lost.fail_over()

    until(all_successful)
    assert runs(lost.path) == Counter(lost.ids * 2)
    assert lost.logged_double_runs() == set(lost.ids)


class Standby:
    """A worker whose address of the primary leads to a standby, and back again."""

    def __init__(self, pair: Pair, runqueue, **changes) -> None:
        self.pair = pair
        options = json.dumps({**OPTIONS, **changes})
        self.child = runqueue(**servers.environment(pair.front_url), DBQUEUE_OPTIONS=options)
        until(
            lambda: (
                {"serves", "polls for"} <= set(re.findall("serves|polls for", log_of(self.child)))
            )
        )

    def switch_to_standby(self, connections: int) -> None:
        """Switch, and wait for at least this many connections."""
        self.pair.front.lead_to(self.pair.standby.port)
        self.pair.front.cut()
        self.pair.front.heal()
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'queue'"
        until(
            lambda: (
                "read-only transaction" in log_of(self.child)
                and self.pair.standby.ask(sessions) >= connections
            )
        )

    def switch_back(self) -> None:
        self.pair.front.lead_to(self.pair.primary.port)

    def cpu_seconds(self) -> float:
        """Return the processor time of all its processes."""
        clocks = [
            stat.read_text().rpartition(")")[2].split()
            for stat in Path("/proc").glob("[0-9]*/stat")
            if stat.exists()
        ]
        return sum(
            int(each[11]) + int(each[12]) for each in clocks if int(each[3]) == self.child.pid
        ) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def standby(pair, runqueue, request):
    return Standby(pair(synchronous=False), runqueue, **getattr(request, "param", {}))


def test_standby_at_primary_address_fails_no_job_and_is_polled_rarely(standby, tmp_path):
    standby.switch_to_standby(connections=2)
    results = tasks.record.enqueue_many([()] * 20)
    standby.pair.until_replayed()
    before = standby.cpu_seconds()
    time.sleep(4)  # Measure the load over some time.
    load = (standby.cpu_seconds() - before) / 4

    standby.switch_back()

    until(all_successful)
    print(f"load {load:.2f}")
    assert load < 0.5
    assert (
        len(results)
        == Execution.objects.filter(outcome="successful").count()
        == Execution.objects.count()
    )
    assert standby.child.poll() is None


SELDOM = {"beat_interval": 4}


@pytest.mark.parametrize(
    ("standby", "cut"),
    [({}, False), (SELDOM, True)],
    indirect=["standby"],
    ids=["all stay open", "the threads' stay open"],
)
def test_open_connection_to_standby_is_closed_after_switch_back(standby, tmp_path, cut):
    """The standby receives no changes: its rows show no work."""
    path, go = tmp_path / "lines", tmp_path / "go"
    count = [tasks.count_until.enqueue(str(path), str(go)).id for _ in range(8)]
    until(lambda: runs(path) == Counter(count))
    standby.pair.until_replayed()
    standby.pair.wire.cut()
    standby.switch_to_standby(connections=10)  # Eight threads, the worker and the dispatcher.

    standby.switch_back()
    go.touch()
    tasks.record.enqueue_many([()] * 40)
    if cut:
        standby.pair.standby.ask(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = 'queue' AND query LIKE '%dbqueue_job%'"
        )

    until(all_successful)
    assert set(Execution.objects.values_list("outcome", flat=True)) == {"successful"}
