"""Outages of the database: cut, silent, refusing, or permanent."""

from __future__ import annotations

import json
import re
import threading
from contextlib import closing, suppress
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, connections, transaction

from django_dbqueue.models import Execution, Failure, Job, Process
from django_dbqueue.runtime.connections import discard, keep_connections, prepare

from .. import tasks
from ..conftest import LONG, is_mysql_itself, log_of, until, until_a_lock_is_awaited
from .test_failover import runs

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]
QUICK = json.dumps({"beat_interval": 1, "dead_after": 6})


@pytest.mark.parametrize("how", ["cut", "silence"])
@pytest.mark.parametrize("embedded", [True, False])
def test_results_of_an_outage_are_settled_after_it(runqueue, proxy, tmp_path, how, embedded):
    begun, ended, go = (tmp_path / name for name in ("begun", "ended", "go"))
    results = tasks.leave_line.enqueue_many([(str(begun), str(go), 0.0, str(ended))] * 6)
    child = runqueue(
        *(["--embedded"] if embedded else []), DATABASE_URL=proxy.url, DBQUEUE_OPTIONS=QUICK
    )
    until(lambda: runs(begun).total() == 6)

    getattr(proxy, how)()
    until(lambda: "could not beat" in log_of(child))
    go.touch()
    until(lambda: runs(ended).total() == 6)
    until(lambda: not Process.objects.alive().exists())  # Their heartbeats have expired.
    assert Job.objects.running().count() == 6
    proxy.heal()

    until(lambda: Job.objects.filter(state="successful").count() == 6)
    assert set(Execution.objects.values_list("outcome", "attempt")) == {("successful", 1)}
    assert len(results) == Execution.objects.count()
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1
    assert child.poll() is None
    until(lambda: "beats again" in log_of(child))
    for what in ("could not beat", "beats again"):
        said = re.findall(rf"(\S+) {what}", log_of(child))
        assert len(said) == len(set(said)), "it is logged at each heartbeat"


def test_drain_continues_after_outage(runqueue, proxy):
    tasks.sleep.enqueue_many([(0.05,)] * 400)
    child = runqueue("--drain", "--processes", "2", DATABASE_URL=proxy.url)
    until(lambda: Job.objects.filter(state="successful").count() > 40)

    proxy.cut()
    until(lambda: "could not be claimed" in log_of(child))
    proxy.heal()

    assert child.wait(LONG) == 0, log_of(child)
    assert set(Job.objects.values_list("state", flat=True)) == {"successful"}
    assert Execution.objects.filter(outcome="successful").count() == 400


def test_refused_connections_fail_only_tasks_that_need_one(runqueue, proxy):
    runqueue(DATABASE_URL=proxy.url)
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1

    proxy.refuse()
    plain, needs_one = tasks.sleep.enqueue_many([(0.1,)] * 20), tasks.count_rows.enqueue()

    until(lambda: Job.objects.filter(task="tests.tasks.sleep", state="successful").count() == 20)
    assert len(plain) == 20
    needs_one.wait(LONG)
    assert needs_one.errors[0].exception_class is OperationalError
    proxy.heal()
    assert tasks.count_rows.enqueue().wait(LONG).return_value == 0


def test_deadlock_loses_no_result(runqueue):
    if connection.vendor == "sqlite":
        pytest.skip("SQLite locks as a whole.")
    tasks.fail.enqueue()
    child = runqueue()
    until(lambda: Job.objects.filter(state="failed").exists())
    result = tasks.fail.using(run_after=timedelta(seconds=2)).enqueue()

    with suppress(OperationalError), transaction.atomic():
        Failure.objects.select_for_update().get()
        until_a_lock_is_awaited()  # The settler, which has locked the job, waits.
        Job.objects.filter(pk=result.id).update(priority=1)

    until(lambda: Job.objects.filter(state="failed").count() == 2)
    assert Execution.objects.get(job=result.id).outcome == "failed"
    assert Failure.objects.get().count == 2
    assert child.poll() is None


@pytest.mark.parametrize("embedded", [True, False])
def test_runqueue_gives_up_on_permanent_outage(runqueue, proxy, embedded):
    child = runqueue(
        *(["--embedded"] if embedded else []),
        DATABASE_URL=proxy.url,
        DBQUEUE_OPTIONS=json.dumps(
            {**json.loads(QUICK), "give_up_after": 3, "shutdown_timeout": 1}
        ),
    )
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1

    proxy.cut()

    assert child.wait(LONG) == 1
    assert "supervisor: database unavailable for" in log_of(child)


def test_table_lock_delays_jobs_only_while_held(runqueue):
    if connection.vendor != "postgresql":
        pytest.skip("LOCK TABLE is the same thing elsewhere, but ends the transaction.")
    child = runqueue(DBQUEUE_OPTIONS=QUICK)
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1

    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE dbqueue_job, dbqueue_process IN ACCESS EXCLUSIVE MODE")
        until(lambda: "could not beat: canceling statement due to" in log_of(child))
        with closing(connections["default"].copy()) as another:  # Outside of the transaction.
            another.cursor().execute("SELECT pg_notify('dbqueue', 'default,0')")
        until(lambda: "jobs could not be claimed: canceling statement due to" in log_of(child))

    assert tasks.add.enqueue(2).wait(LONG).return_value == 2


class TestConnections:
    """Settings of the runtime's own connections."""

    @pytest.fixture
    def asked(self, monkeypatch):
        """Query the database on a prepared thread."""
        if connection.vendor == "sqlite":
            pytest.skip("SQLite has none of this.")

        def asked(sql):
            found = []

            def ask():
                keep_connections()
                prepare("default", 10)
                with connections["default"].cursor() as cursor:
                    cursor.execute(sql)
                    found.extend(cursor.fetchone())
                connections.close_all()

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return found[0]

        for key in ("OPTIONS", "CONN_MAX_AGE"):
            monkeypatch.setitem(
                connections.settings["default"], key, connections.settings["default"].get(key)
            )
        return asked

    def test_each_statement_has_a_timeout(self, asked):
        if connection.vendor == "postgresql":
            assert asked("SHOW statement_timeout") == asked("SHOW lock_timeout") == "10s"
            assert asked("SHOW idle_in_transaction_session_timeout") == "10s"
        else:
            if is_mysql_itself():
                assert asked("SELECT @@max_execution_time") == 10_000
            else:
                assert asked("SELECT @@max_statement_time") == 11.0
            assert asked("SELECT @@innodb_lock_wait_timeout") == 11

    def test_isolation_level_is_read_committed(self, asked, monkeypatch):
        level = 4 if connection.vendor == "postgresql" else "serializable"
        options = {**connections.settings["default"]["OPTIONS"], "isolation_level": level}
        monkeypatch.setitem(connections.settings["default"], "OPTIONS", options)
        if connection.vendor == "postgresql":
            assert asked("SHOW transaction_isolation") == "read committed"
        else:
            name = "transaction_isolation" if is_mysql_itself() else "tx_isolation"
            assert asked(f"SELECT @@{name}") == "READ-COMMITTED"

    def test_transaction_pool_gets_no_session_settings(self, asked, monkeypatch):
        if connection.vendor != "postgresql":
            pytest.skip("Only PostgreSQL is pooled by transactions.")
        monkeypatch.setitem(connections.settings["default"], "DISABLE_SERVER_SIDE_CURSORS", True)
        assert asked("SHOW statement_timeout") == "0"

    def test_new_connection_keeps_options(self):
        found = []

        def replace():
            prepare("default", 10)
            discard("default")
            found.append(connections["default"].settings_dict["OPTIONS"])

        thread = threading.Thread(target=replace)
        thread.start()
        thread.join()
        match connection.vendor:
            case "mysql":
                assert found[0]["read_timeout"] == 11
