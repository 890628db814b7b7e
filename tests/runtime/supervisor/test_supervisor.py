"""The supervisor and the heartbeat, in the test's own process."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest
from django.db import OperationalError, connection, connections

from django_dbqueue import batch
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Job, Process
from django_dbqueue.models.job import JobQuerySet
from django_dbqueue.models.process import ProcessQuerySet
from django_dbqueue.runtime.connections import keep_connections
from django_dbqueue.runtime.heartbeat import Heartbeat
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.shutdown import Shutdown
from django_dbqueue.runtime.supervisor import children
from django_dbqueue.runtime.supervisor import supervisor as module
from django_dbqueue.runtime.supervisor.drain import Drain
from django_dbqueue.runtime.supervisor.supervisor import Supervisor

from ... import direct, tasks
from ...conftest import LONG, a_process, address_of_the_test_database, until

pytestmark = pytest.mark.django_db(transaction=True)


def elsewhere(action):
    """Run an action on another thread, hence on another connection, and wait for it."""

    def act():
        action()
        connections.close_all()

    thread = threading.Thread(target=act)
    thread.start()
    thread.join(LONG)


def test_child_whose_end_was_waited_for_elsewhere_is_stopped():
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    process.start()
    os.waitpid(process.pid, 0)
    child = object.__new__(children.ChildProcess)
    child._process = process

    child.stop()
    child.stop(now=True)


def test_child_that_cannot_be_spawned_leaves_no_file(backend, monkeypatch):
    def spawn(process):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", spawn)
    supervisor = Supervisor(backend, ["worker"], {})
    (spec,) = supervisor._specs
    created, create = [], SharedStatus.create

    def noted(jobs):
        created.append(create(jobs))
        return created[-1]

    monkeypatch.setattr(SharedStatus, "create", noted)

    with pytest.raises(OSError, match="Cannot allocate"):
        children.ChildProcess(spec, "default", 1, None, lambda: None)

    with pytest.raises(OSError):
        SharedStatus.open(created[0].name)


def test_child_that_fails_to_start_is_retried(backend, monkeypatch):
    result = tasks.add.enqueue(1)
    original, failures = module.ChildThread, [OSError("Resource temporarily unavailable")] * 2

    def start(*args):
        if failures:
            raise failures.pop()
        return original(*args)

    monkeypatch.setattr(module, "ChildThread", start)
    supervisor = Supervisor(backend, ["worker", "dispatcher"], {"embedded": True}, drain=True)

    elsewhere(lambda: supervisor.run(Shutdown()))

    assert result.wait(timeout=1).return_value == 1


def test_crash_of_a_replacement_loses_no_jobs_of_the_thread_that_it_replaces(
    backend, monkeypatch, tmp_path
):
    """Both have the process id of their supervisor."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    tasks.leave_line.enqueue(str(begun), str(go))
    supervisor, stop = Supervisor(backend, ["worker"], {"embedded": True}), Shutdown()
    thread = threading.Thread(target=lambda: elsewhere(lambda: supervisor.run(stop)))
    thread.start()
    try:
        until(begun.exists)
        (first,) = supervisor._children
        register, crashes = ProcessQuerySet.register, []

        def crash_once(rows, process):
            if not crashes:
                crashes.append(process)
                raise OperationalError("The database is away.")
            register(rows, process)

        monkeypatch.setattr(ProcessQuerySet, "register", crash_once)
        supervisor._replace(first, float("inf"))
        until(lambda: Process.objects.filter(kind="worker").count() == 2, LONG)
        go.touch()
        until(Execution.objects.exists)
    finally:
        go.touch()
        stop.request()
        thread.join(LONG)

    assert crashes
    assert list(Execution.objects.values_list("outcome", "attempt")) == [("successful", 1)]


def test_embedded_child_that_crashes_leaves_no_connection(backend, monkeypatch):
    used = []

    def crash(*args):
        used.append(connections["default"])
        Job.objects.exists()
        raise RuntimeError

    monkeypatch.setattr(children, "run_role", crash)
    supervisor, stop = Supervisor(backend, ["worker"], {"embedded": True}), Shutdown()
    thread = threading.Thread(target=lambda: elsewhere(lambda: supervisor.run(stop)))
    thread.start()
    try:
        until(lambda: any(child.exitcode for child in [*supervisor._children]) or len(used) > 1)
    finally:
        stop.request()
        thread.join(LONG)

    assert used[0].connection is None


@pytest.mark.parametrize("embedded", [True, False])
def test_ended_child_is_replaced_without_delay(backend, monkeypatch, embedded):
    for name, value in address_of_the_test_database().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Supervisor, "REST", 3600.0)
    supervisor, stop = Supervisor(backend, ["dispatcher"], {"embedded": embedded}), Shutdown()
    thread = threading.Thread(target=lambda: elsewhere(lambda: supervisor.run(stop)))
    thread.start()
    try:
        (first,) = until(lambda: list(supervisor._children))
        until(lambda: Process.objects.filter(kind="dispatcher").exists())
        first.stop()
        until(lambda: supervisor._children and supervisor._children != [first])
    finally:
        stop.request()
        thread.join(LONG)


def test_drain_sees_job_released_during_its_check(backend, claim, monkeypatch):
    if connection.vendor == "sqlite":
        pytest.skip("SQLite locks the whole database.")
    supervisor = a_process("supervisor", kind="supervisor")
    drain = Drain("default", [QueueSelector(("*",))], backend.config, supervisor)
    tasks.add.enqueue(1)
    (job,) = claim(a_process("worker", supervisor=supervisor))
    lanes = JobQuerySet.lanes

    def slowly(self, queues=None):
        found = lanes(self, queues)
        elsewhere(lambda: direct.release([job]))
        return found

    monkeypatch.setattr(JobQuerySet, "lanes", slowly)

    assert not drain.is_over()
    assert Job.objects.get().state == "ready"


def test_drain_waits_for_batch_to_finish(backend, claim):
    drain = Drain(
        "default",
        [QueueSelector(("*",))],
        backend.config,
        a_process("supervisor", kind="supervisor"),
    )
    with batch(on_finish=tasks.sum_up):
        tasks.add.enqueue(1)
    (job,) = claim()
    direct.settle([AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL)])

    assert not drain.is_over()
    direct.finish_batches()
    assert not drain.is_over()
    claim()[0].delete()
    assert drain.is_over()


def test_supervisor_declared_dead_registers_again(backend):
    heartbeat = Heartbeat(
        Process.Kind.SUPERVISOR,
        "default",
        backend.config.changed(beat_interval=0.05),
        SharedStatus.private(),
        {},
    )
    heartbeat.start()
    Process.objects.update(expires_at="2020-01-01T00:00:00Z")
    Process.objects.silent().delete()

    until(lambda: Process.objects.exists())

    assert not Process.objects.silent().exists()
    heartbeat.stop()
    assert not Process.objects.exists()


def test_supervisor_deregisters_after_lost_connection(backend):
    heartbeat = Heartbeat(
        Process.Kind.SUPERVISOR, "default", backend.config, SharedStatus.private(), {}
    )
    heartbeat.start()
    connection.connection.close()

    heartbeat.stop()

    assert not Process.objects.exists()


def test_kept_connections_are_not_pooled(monkeypatch):
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", {"pool": True, "timeout": 5})
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)

    keep_connections()

    assert connections.settings["default"]["OPTIONS"].items() >= {"timeout": 5}.items()
    assert "pool" not in connections.settings["default"]["OPTIONS"]
    assert connections.settings["default"]["CONN_MAX_AGE"] is None


def test_child_that_never_starts_is_replaced(backend, monkeypatch):
    monkeypatch.setattr(children, "START", 0.1)
    started = []

    def hang(role, *args):
        started.append(role)
        while len(started) < 3:
            time.sleep(0.01)
        return 0

    monkeypatch.setattr(children, "run_role", hang)
    options = {"embedded": True, "beat_interval": 0.1, "dead_after": 0.6, "shutdown_timeout": 5.0}
    supervisor, stop = Supervisor(backend, ["worker"], options), Shutdown()

    runner = threading.Thread(target=lambda: (supervisor.run(stop), connections.close_all()))
    runner.start()
    until(lambda: len(started) >= 3)
    stop.request()
    runner.join(LONG)

    assert not runner.is_alive()


def test_group_in_a_crash_loop_delays_neither_other_groups_nor_the_dispatcher(backend, monkeypatch):
    monkeypatch.setattr(module.RestartBackoff, "FIRST", 30.0)
    starts = []

    def run(role, alias, changes, status, *args):
        name = next((each for each in ("mail", "reports") if each in str(changes)), role)
        starts.append(name)
        status.mark_ready()
        if name == "mail":
            return 1
        until(lambda: "mail" in starts)
        time.sleep(0.2)
        return 0

    monkeypatch.setattr(children, "run_role", run)
    groups = [{"queues": "mail"}, {"queues": "reports"}]
    config = Options.from_settings({"embedded": True, "workers": groups})
    monkeypatch.setattr(backend, "config", config)
    supervisor, stop = Supervisor(backend, ["worker", "dispatcher"], {}), Shutdown()
    runner = threading.Thread(target=lambda: (supervisor.run(stop), connections.close_all()))
    runner.start()
    try:
        until(lambda: min(map(starts.count, ("reports", "dispatcher"))) > 1)
        assert starts.count("mail") == 1
    finally:
        stop.request()
        runner.join(LONG)
