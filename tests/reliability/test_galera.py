"""Workers on several Galera nodes: a lock is local to its node, and a COMMIT may be refused."""

from __future__ import annotations

import json
import os
import random
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connections, transaction

from django_dbqueue import batch
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.engine.claim_size import Budget
from django_dbqueue.models import Batch, ClaimedJob, Execution, Job, Process, Queue, Semaphore
from django_dbqueue.models.enums import UNFINISHED, Lane
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.connections import discard, look_after_connections, prepare

from .. import direct, tasks
from ..chaos.load import Load
from ..chaos.operators import Operators
from ..chaos.report import report
from ..chaos.watch import Watch
from ..conftest import LONG, a_process, log_of, most_at_a_time, until
from ..galera import Balancer, Cluster, what_is_missing
from ..models import Interval
from ..tasks import add, occupy
from .conftest import Elsewhere

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]
OPTIONS = json.dumps(
    {"beat_interval": 1, "dead_after": 9, "timeout_grace": 1, "task_modules": ["tests.chaos.tasks"]}
)
LANE = Lane("default", 0)


@pytest.fixture(scope="module")
def servers():
    if not os.environ.get("DATABASE_URL", "").startswith("mysql"):
        pytest.skip("Galera is MariaDB's.")
    if missing := what_is_missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(
            f"There is no {missing}. Debian: galera-4, mariadb-server."
        )
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def nodes(servers, transactional_db):
    """Three nodes; this thread, and each new one, uses the first."""
    own, first = connections["default"], servers.nodes[0]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "HOST": "127.0.0.1",
            "USER": "root",
            "PASSWORD": "",
            "PORT": first.port,
        }.items():
            patch.setitem(connections.settings["default"], name, value)
        del connections["default"]
        if servers.create(own.settings_dict["NAME"]):
            call_command("migrate", run_syncdb=True, verbosity=0)
        for model in [
            *apps.get_app_config("dbqueue").get_models(),
            *apps.get_app_config("tests").get_models(),
        ]:
            model._base_manager.all()._raw_delete("default")
        yield servers.nodes
        connections["default"].close()
    connections["default"] = own


@contextmanager
def at(port):
    """Direct this thread's statements to a port."""
    before = connections["default"]
    connections["default"] = before.__class__({**before.settings_dict, "PORT": port}, "default")
    try:
        yield
    finally:
        connections["default"].close()
        connections["default"] = before


def url(port):
    return urlsplit(os.environ["DATABASE_URL"])._replace(netloc=f"root@127.0.0.1:{port}").geturl()


@pytest.fixture
def processes(nodes):
    return [a_process(f"worker@{name}:1:abc") for name in "ab"]


class TestTwoNodes:
    """Two concurrent transactions on two nodes, which do not see each other."""

    @pytest.fixture(autouse=True)
    def second(self, nodes):
        """Run the test's transaction, which starts first and commits last, on the second node."""
        with at(nodes[1].port):
            yield

    @pytest.fixture
    def first(self, nodes):
        """Run an action on the first node, once."""
        done = []

        def do(action):
            if not done:
                with at(nodes[0].port):
                    done.append(action())

        return do

    def apply_all(self):
        """Let reads wait until this node has applied what other nodes have committed."""
        with connections["default"].cursor() as cursor:
            cursor.execute("SET SESSION wsrep_sync_wait = 1")

    def test_job_claimed_by_both_nodes_is_claimed_once(self, processes, first):
        add.enqueue_many([(1,), (2,)])

        class Staged(Budget):
            def take(self, *args):
                found = super().take(*args)
                first(lambda: direct.claim(LANE, processes[0], 1))
                return found

        (job,) = direct.claim(LANE, processes[1], 1, budget=Staged(10**6))

        self.apply_all()
        assert job.args == [2]
        assert list(Job.objects.order_by("pk").values_list("process", "attempt")) == [
            (processes[0].pk, 1),
            (processes[1].pk, 1),
        ]

    def test_last_slot_of_a_limit_is_taken_once(self, processes, first):
        one, other = (occupy.enqueue("a", 0) for _ in range(2))
        Job.objects.update(limits=[limit := {**Job.objects.first().limits[0], "max_running": 1}])
        Semaphore.objects.create(pk=limit["key"], max_running=1)

        def claim_elsewhere(job, line):
            first(
                lambda: direct.claim(
                    LANE, processes[0], 1, jobs=ClaimedJob.objects.filter(pk=one.id)
                )
            )
            return 1

        assert (
            direct.claim(
                LANE,
                processes[1],
                1,
                group_size=claim_elsewhere,
                jobs=ClaimedJob.objects.filter(pk=other.id),
            )
            == []
        )
        self.apply_all()
        assert list(Job.objects.order_by("pk").values_list("state", flat=True)) == [
            "running",
            "blocked",
        ]

    def test_last_place_of_a_queue_is_taken_once(self, processes, first):
        one, other = (add.enqueue(n) for n in range(2))
        Queue.objects.create(name="default")

        def room():
            found = direct.queue_room("default", 1)
            first(
                lambda: direct.claim(
                    LANE,
                    processes[0],
                    1,
                    room=lambda: direct.queue_room("default", 1),
                    jobs=ClaimedJob.objects.filter(pk=one.id),
                )
            )
            return found

        assert (
            direct.claim(
                LANE, processes[1], 1, room=room, jobs=ClaimedJob.objects.filter(pk=other.id)
            )
            == []
        )
        self.apply_all()
        assert Job.objects.running().count() == 1
        assert Queue.objects.get().limit is None

    def test_batch_is_not_finished_while_other_node_adds_a_job(self, first, monkeypatch):
        with batch() as opened:
            pass
        Batch.objects.update(finished_at=None)

        def add_elsewhere():
            with batch.of(opened.id):
                add.enqueue(1)

        monkeypatch.setattr(Batch, "callbacks", lambda *args, **kwargs: first(add_elsewhere) or [])
        with pytest.raises(OperationalError, match="Deadlock"):
            direct.finish_batches([opened.id])

        self.apply_all()
        assert Job.objects.get().batch == Batch.objects.get(finished_at=None)

    def test_heartbeat_at_one_node_prevents_declared_death_at_other(self, processes, first):
        Process.objects.update(expires_at="2020-01-01T00:00Z")
        dead = Process.objects.filter(pk=processes[0].pk).silent()

        with pytest.raises(OperationalError, match="Deadlock"), transaction.atomic():
            assert recovery._deregister_dead(dead, recovery.ExitReason(how="was silent")) != {}
            first(lambda: Process.objects.filter(pk=processes[0].pk).beat(60))

        self.apply_all()
        assert Process.objects.alive().get() == processes[0]

    def test_result_is_settled_where_claim_is_not_applied_yet(self, nodes, processes):
        add.enqueue(1)
        applied = connections["default"]
        applied.cursor().execute(
            "FLUSH TABLES WITH READ LOCK"
        )  # This node stops applying write sets of others.
        with at(nodes[0].port):
            (job,) = direct.claim(LANE, processes[0], 1)

        def settle():
            prepare("default", 30)
            with at(nodes[1].port):
                return direct.settle(
                    [AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)]
                )

        other = Elsewhere(settle)
        busy = "SELECT 1 FROM information_schema.processlist WHERE info LIKE '%dbqueue_%' AND info NOT LIKE '%processlist%'"
        until(lambda: nodes[1].ask(busy))
        applied.cursor().execute("UNLOCK TABLES")

        assert [outcome.job for outcome in other.result().written] == [job]
        assert Job.objects.get().state == "successful"

    def test_database_error_moves_task_to_another_node(self, nodes):
        def ask(sql="@@port"):
            with connections["default"].cursor() as cursor:
                cursor.execute(f"SELECT {sql}")
                return cursor.fetchone()

        with closing(Balancer(nodes[:2])) as balancer, pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "PORT": balancer.port,
                "CONN_MAX_AGE": None,
            }.items():  # As on a worker, which keeps its connections.
                patch.setitem(connections.settings["default"], name, value)
            discard("default")
            met = ask()
            with pytest.raises(DatabaseError):
                ask("nothing")
            look_after_connections()

            assert ask() != met


def test_workers_at_two_nodes_exceed_no_limit_and_repeat_no_job(nodes, runqueue):
    with (
        transaction.atomic()
    ):  # No call sees waiters: all jobs are ready, and all workers claim them at once.
        for number in range(150):
            occupy.enqueue(str(number % 3), random.uniform(0.005, 0.05))
    add.enqueue_many([(number,) for number in range(1000)])
    for _ in range(20):
        tasks.fail.enqueue()
    hosts = [
        runqueue(
            "--processes",
            "1",
            "--threads",
            "6",
            DATABASE_URL=url(node.port),
            DBQUEUE_OPTIONS=OPTIONS,
        )
        for node in nodes[:2]
    ]

    until(lambda: not Job.objects.filter(state__in=UNFINISHED).exists(), 120)

    assert max(most_at_a_time(Interval.objects.filter(key=key)) for key in "012") <= 2
    assert Interval.objects.count() == 150
    assert set(
        Execution.objects.exclude(job__task=tasks.fail.module_path).values_list(
            "outcome", "message"
        )
    ) == {("successful", "")}
    assert Execution.objects.count() == Job.objects.count() == 1170
    assert len(set(Execution.objects.values_list("process", flat=True))) == 2
    for host in hosts:
        assert host.poll() is None
        assert "Deadlock" not in log_of(host)


def test_isolated_and_killed_nodes_lose_no_job(nodes, servers, runqueue):
    """The host and the caller at the killed node are balanced to another node."""
    with closing(Balancer([nodes[2], nodes[0]])) as balancer:
        hosts = [
            runqueue(
                "--processes",
                "1",
                "--threads",
                "4",
                DATABASE_URL=url(port),
                DBQUEUE_OPTIONS=OPTIONS,
            )
            for port in (nodes[0].port, nodes[1].port, balancer.port)
        ]
        until(lambda: Process.objects.filter(kind="worker").count() == 3)
        load = LoadAt(balancer.port)
        load.start()

        nodes[1].isolate(yes=True)
        until(lambda: "could not beat" in log_of(hosts[1]))
        hosts.append(
            runqueue("--only", "workers", DATABASE_URL=url(nodes[1].port), DBQUEUE_OPTIONS=OPTIONS)
        )
        until(lambda: "runqueue: database unavailable, retrying" in log_of(hosts[-1]))
        load.wait_for_progress()
        nodes[1].isolate(yes=False)
        servers.wait_for(nodes, 60)
        load.wait_for_progress()
        nodes[2].kill()
        load.wait_for_progress()
        load.stop()

        assert load.wait(LONG)
        found = report(load, Operators(), Watch(0), {}, [])
        print("\n".join(found.lines()))
        assert found.is_clean
        assert all(host.poll() is None for host in hosts)


class LoadAt(Load):
    """Enqueues at one port."""

    def __init__(self, port):
        super().__init__(rate=40)
        # Write sets of megabytes stall all nodes.
        self._actions = [action for action in self._actions if action != self._large]
        self._port = port

    def wait_for_progress(self):
        number = len(self.confirmed)
        until(lambda: len(self.confirmed) > number + 50)

    def _run(self):
        with at(self._port):
            super()._run()
