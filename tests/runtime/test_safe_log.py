"""A logging handler that raises, as while its log server is down, changes no outcome of a job."""

from __future__ import annotations

import logging

import pytest
from django.db import OperationalError, connections

from django_dbqueue import signals, testing
from django_dbqueue.core import internal_errors
from django_dbqueue.core.safe_log import SafeLogger
from django_dbqueue.models import Execution, Job
from django_dbqueue.models.enums import FINISHED
from django_dbqueue.runtime.logging_setup import RepeatedProblem
from django_dbqueue.runtime.worker.attempt import Attempt
from django_dbqueue.runtime.worker.claimer import Claimer

from .. import tasks, timely
from ..conftest import LONG, until
from .worker.test_worker import break_once


class Down(logging.Handler):
    """Its log server refuses connections."""

    def emit(self, record):
        raise ConnectionRefusedError("no log server")


@pytest.fixture
def down():
    """Log servers that are down: those of the queue, of Django and of a project."""
    handler, changed = Down(), []
    for name in ("django_dbqueue", "django", "shop.orders"):
        logger = logging.getLogger(name)
        changed.append((logger, logger.level))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if name == "django_dbqueue" else logging.INFO)
    yield
    for logger, level in changed:
        logger.removeHandler(handler)
        logger.setLevel(level)


def drained(task, *args, times, **kwargs):
    task.enqueue(*args, **kwargs)
    assert testing.drain() == times
    job = Job.objects.get()
    return job.state, job.result


# The logger


@pytest.mark.parametrize("name", ["debug", "info", "warning", "error", "critical", "exception"])
def test_record_names_its_caller_and_level(caplog, name):
    caplog.set_level(logging.DEBUG, "safe")
    try:
        raise OperationalError("no server")
    except OperationalError:
        getattr(SafeLogger("safe"), name)("part: %s", 1, extra={"job_id": "x"})

    (record,) = caplog.records
    assert (record.funcName, record.filename, record.job_id, record.getMessage()) == (
        "test_record_names_its_caller_and_level",
        "test_safe_log.py",
        "x",
        "part: 1",
    )
    assert record.levelname == {"exception": "ERROR"}.get(name, name.upper())
    assert bool(record.exc_info) == (name == "exception")


def test_stacklevel_is_kept(caplog):
    def log():
        SafeLogger("safe").log(logging.ERROR, "part", stacklevel=2)

    log()

    assert caplog.records[0].funcName == "test_stacklevel_is_kept"


@pytest.mark.usefixtures("down")
def test_line_of_handler_that_raises_goes_to_stderr(capsys):
    SafeLogger("django_dbqueue").error("part: %d jobs", 3)

    said = capsys.readouterr().err
    assert "part: 3 jobs\n" in said
    assert "a handler in LOGGING raised ConnectionRefusedError: no log server" in said


@pytest.mark.usefixtures("down")
def test_internal_error_is_sent_though_its_line_is_not_logged():
    found = []

    def receive(exception, **kwargs):
        found.append(str(exception))

    signals.internal_error.connect(receive)
    try:
        problem = RepeatedProblem("part: unavailable")
        problem.report(OperationalError("no server"))
        problem.over()
        internal_errors.wait_for_receivers(LONG)
    finally:
        signals.internal_error.disconnect(receive)

    assert found == ["no server"]


# Jobs


@pytest.mark.django_db
@pytest.mark.usefixtures("down")
class TestWithoutLogServer:
    def test_success_keeps_its_return_value(self):
        assert drained(tasks.add, 1, b=2, times=1) == ("successful", 3)
        assert Execution.objects.get().outcome == "successful"

    def test_failed_job_is_retried(self):
        assert drained(tasks.succeed_at_third, times=3) == ("successful", 3)

    def test_backoff_that_fails_is_replaced(self):
        assert drained(tasks.fail_with_broken_backoff, times=1)[0] == "scheduled"

    def test_snoozed_job_is_scheduled(self):
        assert drained(timely.snooze, times=1)[0] == "scheduled"
        assert Execution.objects.get().outcome == "snoozed"

    def test_last_failure_has_its_own_error(self):
        assert drained(tasks.fail_thrice, times=3)[0] == "failed"
        assert set(Execution.objects.values_list("error_type", flat=True)) == {
            "builtins.ValueError"
        }

    def test_line_of_the_task_itself_raises_in_the_task(self):
        assert drained(timely.talk, "ada", 2, times=1)[0] == "failed"
        assert Execution.objects.get().error_type == "builtins.ConnectionRefusedError"


@pytest.mark.django_db
def test_job_is_retried_if_the_decision_itself_fails(monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(Attempt, "warn", fail)

    assert drained(tasks.succeed_at_third, times=3) == ("successful", 3)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("down")
def test_worker_survives_an_outage_without_log_server(worker, monkeypatch):
    lost = OperationalError("server closed the connection")
    calls = break_once(monkeypatch, Claimer, "claim", lost, call=2)
    worker()
    results = [tasks.add.enqueue(1), tasks.succeed_at_third.enqueue(), tasks.fail.enqueue()]

    until(lambda: len(calls) > 2 and Job.objects.filter(state__in=FINISHED).count() == len(results))

    assert sorted(Job.objects.values_list("state", flat=True)) == [
        "failed",
        "successful",
        "successful",
    ]
    connections.close_all()
