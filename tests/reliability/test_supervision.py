"""The supervisor survives the project's code, its logging and its database; with real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from urllib.parse import urlsplit, urlunsplit

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Job, Process

from .. import tasks
from ..conftest import LONG, log_of, until
from ..models import Run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

RECEIVER_THAT_HANGS = """
import os, signal, time
from django_dbqueue.compat import signals
from django_dbqueue import task
from tests.models import Run

@task(on_lost="fail")
def die_once():
    os.kill(os.getpid(), signal.SIGKILL)

def hang(task_result, **kwargs):
    Run.objects.create(job=f"announced {task_result.id} {task_result.status.name}")
    time.sleep(3600)

signals.task_finished.connect(hang)
"""


@pytest.fixture
def start(runqueue, tmp_path):
    """Start runqueue with a task module of this text."""

    def start(*arguments, text="", **options):
        (tmp_path / "more_tasks.py").write_text(text)
        options = json.dumps({"task_modules": ["more_tasks"], **options})
        return runqueue(*arguments, PYTHONPATH=str(tmp_path), DBQUEUE_OPTIONS=options)

    return start


@pytest.mark.parametrize("only", [[], ["--only", "workers"]])
def test_supervisor_works_while_task_finished_receiver_hangs(start, only):
    child = start(*only, text=RECEIVER_THAT_HANGS)
    (first,) = until(lambda: list(Process.objects.filter(kind="worker")))
    job = Job.objects.create(task="more_tasks.die_once", queue="default", on_lost="fail")

    until(lambda: Run.objects.filter(job=f"announced {job.pk} FAILED").exists())
    until(lambda: Process.objects.filter(kind="worker").exclude(pk=first.pk).exists())
    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0, log_of(child)
    assert Execution.objects.get().outcome == "lost"


def test_job_is_recovered_at_once_after_supervisor_lost_connection(runqueue, proxy):
    child = runqueue(DATABASE_URL=proxy.url)
    result = tasks.begin_and_sleep.enqueue("x", 60)
    until(lambda: Run.objects.exists())
    worker = Process.objects.get(kind="worker")

    proxy.cut()
    os.kill(worker.pid, signal.SIGKILL)
    proxy.heal()

    lost = Execution.objects.filter(job=result.id, outcome="lost")
    until(lost.exists, 10.0)  # Other processes declare it dead after 25 to 30 s.
    assert "signal 9" in log_of(child)


def test_runqueue_waits_for_database_at_start(runqueue, proxy):
    proxy.cut()
    result = tasks.add.enqueue(1)
    child = runqueue("--drain", DATABASE_URL=proxy.url)
    until(lambda: "runqueue: database unavailable, retrying" in log_of(child))

    proxy.heal()

    assert child.wait(LONG) == 0, log_of(child)
    assert result.wait(1).return_value == 1


@pytest.mark.parametrize("how", ["cut", "silence"])
def test_sigterm_ends_wait_for_database_at_once(runqueue, proxy, how):
    getattr(proxy, how)()
    child = runqueue(DATABASE_URL=proxy.url)
    until(lambda: "runqueue: database unavailable, retrying" in log_of(child))

    began = time.monotonic()
    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert time.monotonic() - began < 10  # Less than the connection timeout.


def test_runqueue_gives_up_on_database_at_start(runqueue, proxy):
    proxy.cut()

    child = runqueue(DATABASE_URL=proxy.url, DBQUEUE_OPTIONS=json.dumps({"give_up_after": 1.5}))

    assert child.wait(LONG) == 1
    assert "Check that its server runs" in log_of(child)
    assert "Traceback" not in log_of(child)


@pytest.mark.skipif(connections["default"].vendor == "sqlite", reason="SQLite has no users.")
@pytest.mark.parametrize(
    "changes", [{"user": "nobody_of_that_name"}, {"path": "/no_such_database"}], ids=str
)
def test_refused_user_or_database_ends_runqueue_at_once(runqueue, changes):
    url = urlsplit(os.environ["DATABASE_URL"])
    user = changes.get("user", url.username)
    password = f":{url.password}" if url.password else ""
    netloc = f"{user}{password}@{url.netloc.rpartition('@')[2]}"
    url = url._replace(netloc=netloc, path=changes.get("path", url.path))

    child = runqueue(DATABASE_URL=urlunsplit(url), DBQUEUE_IN_TEST_DATABASE="0")

    assert child.wait(LONG) == 1
    assert "The server refuses the connection to 'default'" in log_of(child)
    assert "Traceback" not in log_of(
        child
    ) and "runqueue: database unavailable, retrying" not in log_of(child)


LOG_THAT_HANGS = """
import logging, multiprocessing, time
from tests.settings import *

class Hanging(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        if "was killed by signal" in record.getMessage() and not multiprocessing.parent_process():
            time.sleep(3600)

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"hanging": {"()": Hanging}},
    "loggers": {"django_dbqueue": {"handlers": ["hanging"], "level": "INFO"}},
}
"""


def test_hanging_supervisor_logs_stack_trace_and_exits(runqueue, tmp_path):
    (tmp_path / "hanging_log.py").write_text(LOG_THAT_HANGS)
    options = json.dumps({"beat_interval": 1, "dead_after": 3, "shutdown_timeout": 1})
    child = runqueue(
        PYTHONPATH=str(tmp_path), DJANGO_SETTINGS_MODULE="hanging_log", DBQUEUE_OPTIONS=options
    )
    worker = until(lambda: Process.objects.filter(kind="worker").first())

    os.kill(worker.pid, signal.SIGKILL)

    assert child.wait(LONG) == 75, log_of(child)
    assert "supervisor: no progress; this process ends" in log_of(child)
    assert "in emit" in log_of(child)


RECEIVER_HOLDS_GIL = """
import ctypes

def on_exit(**kwargs):
    ctypes.PyDLL(None).sleep(3600)  # It does not release the GIL.
"""


def test_supervisor_whose_receiver_holds_gil_logs_stack_trace_and_exits(runqueue, tmp_path):
    (tmp_path / "holds_gil.py").write_text(RECEIVER_HOLDS_GIL)
    options = {
        "beat_interval": 1,
        "dead_after": 3,
        "shutdown_timeout": 1,
        "receivers": {"worker_exited": "holds_gil.on_exit"},
    }
    child = runqueue(PYTHONPATH=str(tmp_path), DBQUEUE_OPTIONS=json.dumps(options))
    worker = until(lambda: Process.objects.filter(kind="worker").first())

    os.kill(worker.pid, signal.SIGKILL)

    assert child.wait(LONG) == 1, log_of(child)
    assert "Timeout (0:00:13)!" in log_of(child)
    assert "in on_exit" in log_of(child)


def test_crash_loop_is_logged_with_its_cause(start):
    child = start(text="import os\nos._exit(3)\n")

    until(lambda: "crash loop: the last 5 processes died" in log_of(child))

    assert "ended with exit code 3" in log_of(child)


def test_multiprocessing_starts_processes_in_a_worker_as_elsewhere(runqueue):
    result = tasks.start_method.enqueue()

    assert runqueue("--drain").wait(LONG) == 0

    assert result.wait(1).return_value == multiprocessing.get_start_method()
