"""Defects of other queues that no other test here covers."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import django
import pytest
from django.core.exceptions import SuspiciousOperation
from django.db import connections, migrations
from django.utils import timezone

import django_dbqueue
from django_dbqueue import testing
from django_dbqueue.backend import DatabaseBackend
from django_dbqueue.compat import TaskResultDoesNotExist, task_backends
from django_dbqueue.models import Execution, Job, Process
from django_dbqueue.registry import discover

from .. import tasks
from ..conftest import LONG, log_of, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]
ONE = ["--embedded"] if connections["default"].vendor == "sqlite" else []


def test_busy_interpreter_is_not_declared_dead(runqueue):
    """Computing threads compete for the GIL with the heartbeat thread."""
    tasks.compute.enqueue_many([(6,)] * 8)
    runqueue(
        "--threads", "8", *ONE, DBQUEUE_OPTIONS=json.dumps({"beat_interval": 0.5, "dead_after": 3})
    )

    until(lambda: Job.objects.filter(state="successful").count() == 8)

    assert set(Execution.objects.values_list("outcome", "attempt")) == {("successful", 1)}


@pytest.mark.skipif(bool(ONE), reason="On SQLite it runs as one process.")
@pytest.mark.parametrize(
    "phase",
    ["before it has begun", "while jobs are claimed", "while they run", "while they are settled"],
)
def test_sigterm_in_each_phase_fails_no_job(runqueue, phase):
    tasks.sleep.enqueue_many([(0.02,)] * 400)
    child = runqueue("--shutdown-timeout", "1")
    match phase:
        case "while jobs are claimed":
            until(lambda: Job.objects.running().exists())
        case "while they run":
            until(lambda: Job.objects.filter(state="successful").count() > 20)
        case "while they are settled":
            until(lambda: Execution.objects.count() > 200)

    child.send_signal(signal.SIGTERM)

    child.wait(LONG)
    assert not Job.objects.running().exists(), log_of(child)
    assert set(Job.objects.values_list("state", "failures")) <= {("ready", 0), ("successful", 0)}
    assert not Process.objects.exists()


@pytest.mark.parametrize("hours", [-3, 3])
def test_wrong_worker_clock_has_no_effect(runqueue, hours):
    """All times are the database's."""
    later = tasks.add.using(run_after=timedelta(hours=1)).enqueue(1)
    soon = tasks.wrong_clock.enqueue(hours * 3600)
    child = runqueue(*ONE, DBQUEUE_OPTIONS=json.dumps({"beat_interval": 0.5, "dead_after": 3}))
    until(lambda: soon.refresh() or soon.is_finished)
    again = tasks.add.enqueue(2)

    assert again.wait(LONG).return_value == 2
    time.sleep(4)  # Longer than ``dead_after``.
    assert Process.objects.alive().count() == 3
    assert Job.objects.get(pk=later.id).state == "scheduled"
    execution = Execution.objects.get(job=again.id)
    assert abs((execution.finished_at - timezone.now()).total_seconds()) < 60
    assert "declared dead" not in log_of(child)


def test_broken_task_module_does_not_stop_discovery(monkeypatch, caplog, tmp_path):
    (tmp_path / "broken_tasks.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)

    discover(["broken_tasks", "tests.nowhere"])

    assert "broken_tasks cannot be imported" in caplog.text
    assert "tests.nowhere cannot be imported" in caplog.text
    assert "tests.tasks" in sys.modules


def test_row_causes_no_import():
    sys.modules.pop("this", None)
    Job.objects.create(task="this.s", queue="default")
    testing.drain()

    assert "this" not in sys.modules
    assert Execution.objects.get().message.startswith("'this.s' is not known here")


def test_result_of_ten_megabytes_is_stored_or_fails_the_job():
    result = tasks.say.enqueue(10_000_000)
    testing.drain()
    result.refresh()

    assert result.is_finished
    if result.status == "SUCCESSFUL":
        assert len(result.return_value) == 10_000_000


def test_unpicklable_exception_is_recorded():
    result = tasks.fail_unpicklably.enqueue()
    testing.drain()
    result.refresh()

    assert result.errors[0].exception_class is SuspiciousOperation
    assert "it holds a lock" in result.errors[0].traceback


def test_backend_can_be_subclassed(settings):
    settings.TASKS = {
        "default": {
            "BACKEND": f"{__name__}.Louder",
            "QUEUES": [],
            "OPTIONS": {"database": "default"},
        }
    }
    result = tasks.add.enqueue(1)
    testing.drain()

    assert task_backends["default"].get_result(result.id).return_value == 1


class Louder(DatabaseBackend):
    """A project's own backend."""


@pytest.mark.parametrize(
    "bad", ["", "1", "x" * 1000, None, 17, "'; DROP TABLE", "00000000-0000-0000-0000-000000000000"]
)
def test_invalid_result_id_raises_does_not_exist(bad, backend):
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(bad)


@pytest.mark.skipif(bool(ONE), reason="On SQLite it runs as one process.")
def test_old_and_new_workers_run_side_by_side(runqueue):
    """The old worker does not know the new task; the new worker runs it."""
    runqueue("--threads", "2")
    until(lambda: Process.objects.filter(kind="worker").exists())
    (old,) = Process.objects.filter(kind="worker").values_list("name", flat=True)
    job = Job.objects.create(task="tests.new_tasks.greet", queue="default", args=["you"])
    until(lambda: Execution.objects.filter(outcome="interrupted", process=old).exists())

    runqueue("--threads", "2", DBQUEUE_OPTIONS=json.dumps({"task_modules": ["tests.new_tasks"]}))

    until(lambda: Job.objects.get().state == "successful")
    assert Job.objects.get(pk=job.pk).result == "hello, you"
    assert Job.objects.get().failures == 0


def test_migrations_only_add():
    """Additive migrations let workers of the previous release continue."""
    folder = Path(django_dbqueue.__file__).parent / "migrations"
    for path in sorted(folder.glob("0*.py"))[1:]:
        for operation in import_module(
            f"django_dbqueue.migrations.{path.stem}"
        ).Migration.operations:
            assert isinstance(
                operation,
                (
                    migrations.CreateModel,
                    migrations.AddField,
                    migrations.AddIndex,
                    migrations.AddConstraint,
                    migrations.AlterModelOptions,
                ),
            )
            if isinstance(operation, migrations.AddField):
                assert operation.field.null or operation.field.has_db_default()


@pytest.mark.skipif(bool(ONE), reason="On SQLite it runs as one process.")
def test_process_row_has_versions(runqueue):
    runqueue()
    worker = until(lambda: Process.objects.filter(kind="worker").first())

    assert worker.details["version"] == django_dbqueue.__version__
    assert worker.details["django"] == django.get_version()
    assert os.path.basename(worker.details["space"]).startswith("pid:")
