"""Lifecycle signals and internal_error, with real processes and with receivers that misbehave."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time

import pytest
from django.core.checks import run_checks
from django.db import DatabaseError, OperationalError
from django.test import override_settings

from django_dbqueue import signals
from django_dbqueue.core import internal_errors
from django_dbqueue.management.commands import runqueue as runqueue_command
from django_dbqueue.models import Job, Process
from django_dbqueue.runtime import lifecycle
from django_dbqueue.runtime.logging_setup import RepeatedProblem
from django_dbqueue.runtime.shutdown import Shutdown
from django_dbqueue.runtime.supervisor.supervisor import Supervisor

from .. import tasks
from ..conftest import LONG, log_of, until
from ..management.test_runqueue import MANY

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]

LIFECYCLE = [
    f"{kind}_{event}"
    for kind in ("supervisor", "worker", "dispatcher", "scheduler")
    for event in ("started", "stopping", "stopped")
]

RECEIVERS = r"""
import os
import sys
import time

def note(signal, process, **kwargs):
    rest = {key: kwargs[key] for key in ("exitcode", "reason") if key in kwargs}
    line = f"{NAMES[id(signal)]} in {os.getpid()} of {process.kind} {process.pid} {rest}"
    with open(os.environ["NOTES"], "a") as file:
        file.write(line + "\n")

def fail(**kwargs):
    raise ValueError("the receiver is broken")

def leave(**kwargs):
    sys.exit("bye")

def hang(**kwargs):
    time.sleep(3600)

from django_dbqueue import signals
NAMES = {id(getattr(signals, name)): name for name in signals.__all__}
"""


@pytest.fixture
def start(runqueue, tmp_path):
    """Start runqueue with these receivers of ``RECEIVERS``."""
    (tmp_path / "receivers.py").write_text(RECEIVERS)

    def start(*arguments, receivers, **env):
        env["DBQUEUE_OPTIONS"] = json.dumps({"receivers": receivers, **env.pop("options", {})})
        return runqueue(*arguments, PYTHONPATH=str(tmp_path), NOTES=str(tmp_path / "notes"), **env)

    return start


@pytest.fixture
def notes(tmp_path):
    """Return the calls of ``note`` so far."""
    path = tmp_path / "notes"
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("embedded", [True, False])
def test_each_role_sends_its_signals_in_its_own_process(start, notes, embedded):
    receivers = dict.fromkeys([*LIFECYCLE, "worker_exited", "dispatcher_exited"], "receivers.note")
    child = start(*["--embedded"] * embedded, receivers=receivers)
    until(lambda: sum("_started" in note for note in notes()) == 4)
    pids = dict(Process.objects.values_list("kind", "pid"))

    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0, log_of(child)
    for name in LIFECYCLE:
        kind = {"scheduler": "dispatcher"}.get(name.partition("_")[0], name.partition("_")[0])
        (note,) = (note for note in notes() if note.startswith(f"{name} "))
        assert note == f"{name} in {pids[kind]} of {kind} {pids[kind]} {{}}"
    for kind in ("worker", "dispatcher"):
        (note,) = (note for note in notes() if note.startswith(f"{kind}_exited"))
        assert note.startswith(f"{kind}_exited in {child.pid} of supervisor {child.pid} ")
        assert "'exitcode': 0, 'reason': 'ended with exit code 0'" in note
    first = [note.partition(" ")[0] for note in notes()]
    for kind in ("supervisor", "worker", "dispatcher", "scheduler"):
        places = [first.index(f"{kind}_{event}") for event in ("started", "stopping", "stopped")]
        assert places == sorted(places)


@pytest.mark.skipif(bool(MANY), reason="A single process has no supervisor.")
def test_worker_exited_has_the_reason_of_a_kill(start, notes):
    start(receivers={"worker_exited": "receivers.note"})
    worker = until(lambda: Process.objects.filter(kind="worker").first())

    os.kill(worker.pid, signal.SIGKILL)

    (note,) = until(notes)
    assert "'exitcode': -9, 'reason': 'was killed by signal 9'" in note


@pytest.mark.parametrize("how", ["fail", "leave"])
def test_receiver_that_raises_is_logged_and_harms_nothing(start, how):
    receivers = dict.fromkeys(signals.__all__, f"receivers.{how}")
    result = tasks.add.enqueue(1)

    child = start("--drain", *MANY, receivers=receivers)

    assert child.wait(LONG) == 0, log_of(child)
    assert result.wait(1).return_value == 1
    assert ("ValueError: the receiver is broken" if how == "fail" else "bye") in log_of(child)
    assert "Traceback" in log_of(child)


def test_receiver_that_hangs_is_logged_and_delays_neither_jobs_nor_heartbeats_for_long(start):
    options = {"beat_interval": 1, "dead_after": 6}
    receivers = dict.fromkeys(signals.__all__, "receivers.hang")
    result = tasks.add.enqueue(1)

    child = start(*MANY, receivers=receivers, options=options)

    result.wait(LONG)
    names = set(Process.objects.values_list("name", flat=True))
    time.sleep(8)
    assert set(Process.objects.alive().values_list("name", flat=True)) == names
    began = time.monotonic()
    child.send_signal(signal.SIGTERM)
    assert child.wait(LONG) == 0, log_of(child)
    assert time.monotonic() - began < 25
    assert "receivers of worker_started still run after 10 s" in log_of(child)
    assert "in hang" in log_of(child)
    assert "declared dead" not in log_of(child)


def test_receiver_connected_by_code_and_by_options_is_called_once(monkeypatch):
    calls = []
    monkeypatch.setattr(lifecycle, "import_string", lambda path: receiver)

    def receiver(**kwargs):
        calls.append(kwargs)

    signals.worker_started.connect(receiver)
    lifecycle.connect_receivers({"worker_started": ["any.path"]})
    lifecycle.connect_receivers({"worker_started": ["any.path"]})
    try:
        lifecycle.send("started", Process(kind="worker", name="w"), "worker")
    finally:
        assert signals.worker_started.disconnect(receiver)

    (call,) = calls
    assert call["sender"] is Process and call["process"].name == "w"
    assert not signals.worker_started.disconnect(receiver)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("tests.nowhere.function", "cannot be imported: ModuleNotFoundError"),
        ("tests.tasks.nothing_of_that_name", "cannot be imported: ImportError"),
        ("tests.settings.USE_TZ", "is not a function that accepts **kwargs"),
        ("tests.conftest.log_of", "is not a function that accepts **kwargs"),
    ],
)
def test_check_names_receiver_that_cannot_be_called(path, said):
    backend = "django_dbqueue.backend.DatabaseBackend"
    options = {"receivers": {"worker_started": [path]}}
    with override_settings(TASKS={"default": {"BACKEND": backend, "OPTIONS": options}}):
        (error,) = (each for each in run_checks(tags=["dbqueue"]) if each.id == "dbqueue.E009")

    assert f"['receivers']['worker_started']: {path!r}" in error.msg and said in error.msg


def test_runqueue_does_not_start_with_a_receiver_that_cannot_be_imported(start):
    child = start(receivers={"worker_started": "receivers.nothing"})

    assert child.wait(LONG) == 1
    assert "'receivers.nothing' cannot be imported" in log_of(child)
    assert not Process.objects.exists()


# Errors inside the queue


@pytest.fixture
def received():
    """The errors that internal_error is sent for, with their processes."""
    found = []

    def receive(sender, exception, process, **kwargs):
        found.append((sender, exception, process))

    signals.internal_error.connect(receive)
    yield found
    signals.internal_error.disconnect(receive)


def test_report_logs_the_traceback_and_sends_the_signal(received, caplog):
    try:
        raise OperationalError("no server")
    except OperationalError as error:
        internal_errors.report(error, "part: %s", error, level=logging.WARNING)
        internal_errors.wait_for_receivers(LONG)
        assert received == [(OperationalError, error, None)]

    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "part: no server")
    assert record.exc_info[0] is OperationalError and record.exc_info[2]
    assert record.funcName == "test_report_logs_the_traceback_and_sends_the_signal"


def test_repeated_problem_is_sent_as_often_as_it_is_logged(received, caplog):
    problem = RepeatedProblem("part: unavailable")
    for _ in range(50):
        problem.report(OperationalError("no server"))
    internal_errors.wait_for_receivers(LONG)

    assert len(received) == len(caplog.records) == 1


def test_error_of_a_worker_is_sent_with_its_process(worker, received, monkeypatch):
    from django_dbqueue.runtime.worker.claimer import Claimer

    def refuse(*args):
        raise DatabaseError("the disk is full")

    monkeypatch.setattr(Claimer, "claim", refuse)
    worker()
    ((sender, exception, process), *_rest) = until(lambda: received)

    assert (sender, str(exception)) == (DatabaseError, "the disk is full")
    assert process.pk == Process.objects.get().pk


def test_crash_of_the_supervisor_is_sent_and_is_exit_code_1(backend, received, caplog, monkeypatch):
    def crash(self, stop):
        raise DatabaseError("the table is gone")

    monkeypatch.setattr(Supervisor, "run", crash)
    for name in ("keep_connections", "silence_polling", "_wait_for_database"):
        monkeypatch.setattr(runqueue_command, name, lambda *arguments: None)

    code = runqueue_command._run(Supervisor(backend, ["worker"], {}), Shutdown())

    assert code == 1
    ((sender, exception, process),) = received
    assert (sender, str(exception), process) == (DatabaseError, "the table is gone", None)
    assert "supervisor: crashed: the table is gone" in caplog.text


def test_receivers_that_hang_use_a_bounded_number_of_threads(caplog):
    free = threading.Event()

    def hang(**kwargs):
        free.wait(LONG)

    signals.internal_error.connect(hang)
    try:
        before = threading.active_count()
        for _ in range(3 * internal_errors.MOST_THREADS):
            internal_errors.report(ValueError("again"), "part: again")
        assert threading.active_count() <= before + internal_errors.MOST_THREADS
        assert "not sent: receivers of 20 earlier ones still run" in caplog.text
    finally:
        free.set()
        signals.internal_error.disconnect(hang)
        internal_errors.wait_for_receivers(LONG)
    assert not internal_errors._threads


def test_error_of_a_task_is_no_internal_error(worker, received):
    result = tasks.fail.enqueue()
    worker()
    result.wait(LONG)

    assert Job.objects.get().state == "failed"
    assert received == []


@pytest.mark.parametrize(
    ("level", "is_shown"), [(logging.WARNING, False), (logging.ERROR, True)], ids=str
)
def test_console_shows_tracebacks_of_errors_only(level, is_shown):
    from django_dbqueue.runtime.logging_setup import _ConsoleFormatter

    try:
        raise ValueError("bad")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("any", level, __file__, 1, "part: %s", ("bad",), info)

    assert ("Traceback" in _ConsoleFormatter("%(message)s").format(record)) == is_shown
    assert record.exc_info  # Other handlers have it.
