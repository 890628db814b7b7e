"""A worker on a thread of the test, whose database fails at the worst moment."""

from __future__ import annotations

import logging
import threading

import pytest
from django.db import DataError, OperationalError, connections

from django_dbqueue.models import Execution, Job
from django_dbqueue.models.execution import ExecutionQuerySet
from django_dbqueue.models.job import JobQuerySet
from django_dbqueue.runtime.stop import Stop
from django_dbqueue.runtime.worker import Worker

from . import tasks
from .conftest import until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def worker(backend):
    """Start a worker; it has ended with the test."""
    stop = Stop()
    started = []

    def start(**options):
        worker = Worker(backend, backend.config.changed(threads=2, poll_interval=0.05, **options))
        started.append(threading.Thread(target=worker.run, args=(stop,)))
        started[-1].start()

    yield start
    stop.ask()
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()
    connections.close_all()


def break_once(monkeypatch, queryset, verb, error, *, call=1, done=True):
    """Let one call of a verb raise: after it has done its work, as a connection does that is lost at COMMIT, or before."""
    original = getattr(queryset, verb)
    calls = []

    def breaking(self, *args):
        calls.append(args)
        if len(calls) != call:
            return original(self, *args)
        if done:
            original(self, *args)
        raise error

    monkeypatch.setattr(queryset, verb, breaking)


def finished():
    return Job.objects.filter(state__in=["successful", "failed"]).count()


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("done", [True, False])
def test_a_claim_that_breaks_leaves_no_job_behind(worker, monkeypatch, call, done):
    for priority in (1, 2, 3):
        tasks.record.using(priority=priority).enqueue()
    break_once(monkeypatch, JobQuerySet, "claim", OperationalError("server closed the connection"), call=call, done=done)

    worker()

    until(lambda: finished() == 3)
    assert Execution.objects.filter(outcome="successful").count() == Execution.objects.count() == 3


@pytest.mark.parametrize("done", [True, False])
def test_an_outcome_is_written_after_an_outage(worker, monkeypatch, done):
    tasks.record.enqueue()
    break_once(monkeypatch, ExecutionQuerySet, "settle", OperationalError("server closed the connection"), done=done)

    worker()

    until(lambda: finished() == 1)
    assert Execution.objects.get().outcome == Job.objects.get().state == "successful"


def test_an_outcome_that_the_database_refuses_fails_its_job_alone(worker, monkeypatch):
    refused = tasks.add.enqueue_many([(n,) for n in range(5)])[0]
    settle = ExecutionQuerySet.settle

    def refuse(self, outcomes):
        if any(str(outcome.execution.job_id) == refused.id and outcome.result == 0 for outcome in outcomes):
            raise DataError("invalid value")
        return settle(self, outcomes)

    monkeypatch.setattr(ExecutionQuerySet, "settle", refuse)

    worker()

    until(lambda: finished() == 5)
    assert str(Job.objects.failed().get().pk) == refused.id
    assert Execution.objects.get(outcome="failed").message == "invalid value"


def test_lines_of_the_log_have_fields_for_machines(worker, caplog):
    caplog.set_level(logging.INFO, "django_dbqueue")
    result = tasks.fail.using(queue_name="low").enqueue()

    worker()

    until(lambda: finished() == 1)
    line = next(record for record in caplog.records if getattr(record, "job_id", None) == result.id)
    assert (line.task, line.queue, line.attempt) == ("tests.tasks.fail", "low", 1)
    assert line.process_name.startswith("worker@")
    assert any("serves" in record.message and record.process_name == line.process_name for record in caplog.records)
