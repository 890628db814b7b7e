"""Operations on very many jobs: run by a job of the queue, which may be stopped, cut off or late."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import OperationalError
from django.utils import timezone

from django_dbqueue.contrib import operations
from django_dbqueue.contrib.operations import go_on, run_operation, start, undo
from django_dbqueue.engine.dispatch import dispatch
from django_dbqueue.models import Execution, Job, Operation, Queue
from django_dbqueue.models.expressions import Now
from django_dbqueue.testing import drain

from . import tasks
from .conftest import a_process, until

pytestmark = pytest.mark.django_db
RUN = "django_dbqueue.contrib.operations.run_operation"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(operations, "AT_ONCE", 5)
    monkeypatch.setattr("django_dbqueue.engine.operations.PART", 3)
    monkeypatch.setattr(operations, "FIRST_PAUSE", 0.01)


def some(number=10, queue="slow"):
    """Schedule jobs for tomorrow, and return them."""
    tomorrow = timedelta(days=1)
    tasks.nothing.using(queue_name=queue, run_after=tomorrow).enqueue_many([()] * number)
    return Job.objects.filter(task="tests.tasks.nothing")


def ended():
    """Make jobs ready that are due, as a dispatcher does; return an operation if all have ended."""
    dispatch("default", 100)
    if Operation.objects.filter(finished_at=None).exists():
        return None
    return Operation.objects.first()


def later():
    return timezone.now() + timedelta(days=1)


def test_few_jobs_are_changed_at_once(backend):
    operation = start(some(5), "discard", "", backend, actor="root")

    assert operation.finished_at and operation.changed == 5
    assert operation.job is None
    assert not Job.objects.filter(task=RUN).exists()


def test_many_jobs_are_changed_by_a_job(backend):
    jobs = some()
    operation = start(jobs, "discard", "", backend)
    assert set(jobs.values_list("state", flat=True)) == {"scheduled"}

    drain()

    operation = Operation.objects.get(pk=operation.pk)
    assert operation.finished_at and (operation.done, operation.changed) == (10, 10)
    job = Job.objects.get(pk=operation.job)
    assert (job.task, job.state, job.result) == (RUN, "successful", "Discard: 10 of 10 jobs.")
    assert set(jobs.values_list("state", flat=True)) == {"discarded"}


def test_undo_of_many_jobs_runs_by_a_job_too(backend):
    jobs = some()
    operation = start(jobs, "discard", "", backend)
    drain()

    undone = undo(Operation.objects.get(pk=operation.pk), backend)
    assert undone.finished_at is None
    drain()

    assert Operation.objects.get(pk=undone.pk).changed == 10
    assert set(jobs.values_list("state", flat=True)) == {"scheduled"}


def test_operation_and_its_job_are_written_together(backend, monkeypatch):
    jobs = some()
    monkeypatch.setattr(operations, "_queue_of", lambda backend: "no,such*queue")

    with pytest.raises(Exception, match="no,such"):
        start(jobs, "discard", "", backend)

    assert not Operation.objects.exists()


def test_interrupted_operation_goes_on_where_it_was(backend, monkeypatch):
    jobs = some()
    operation = start(jobs, "discard", "", backend)
    run_part, parts = operations.operations.run_part, []

    def fail_once(*args):
        parts.append(args)
        if len(parts) == 2:
            raise ConnectionError("The database went away.")
        return run_part(*args)

    monkeypatch.setattr(operations.operations, "run_part", fail_once)
    drain()
    assert Operation.objects.get(pk=operation.pk).done == 3
    Job.objects.filter(task=RUN).run_now()
    drain()

    assert Operation.objects.get(pk=operation.pk).changed == 10
    assert Execution.objects.filter(outcome="failed", job__task=RUN).count() == 1


def test_operation_whose_job_has_failed_is_stalled_and_can_be_continued(backend):
    jobs = some()
    start(jobs, "discard", "", backend)
    assert not Operation.objects.stalled().exists()
    Job.objects.filter(task=RUN).discard()

    (operation,) = Operation.objects.stalled()
    go_on(operation, backend)
    assert not Operation.objects.stalled().exists()
    drain()

    assert Operation.objects.get().changed == 10


def test_two_jobs_of_one_operation_change_each_job_once(backend):
    jobs = some()
    operation = start(jobs, "discard", "", backend)
    go_on(operation, backend)

    drain()

    operation = Operation.objects.get()
    assert (operation.done, operation.changed) == (10, 10)
    assert set(Job.objects.filter(task=RUN).values_list("state", flat=True)) == {"successful"}


def test_stopped_operation_ends_its_job(backend):
    jobs = some()
    start(jobs, "discard", "", backend)
    Operation.objects.all().stop()

    drain()

    operation = Operation.objects.get()
    assert operation.finished_at and operation.changed == 0
    assert Job.objects.get(task=RUN).result == "Discard: 0 of 10 jobs."


def test_rate_spreads_the_changes_over_time_without_a_thread(backend):
    jobs = some()
    start(jobs, "discard", "", backend, rate=2)

    for done in (2, 4, 6, 8, 10):
        drain()
        assert Operation.objects.get().changed == done
        job = Job.objects.get(task=RUN)
        assert job.state == "scheduled"
        assert 0.5 < (job.run_after - timezone.now()).total_seconds() <= 1.0
        Job.objects.filter(task=RUN).run_now()
    drain()

    assert Operation.objects.get().changed == 10
    assert Job.objects.get(task=RUN).state == "successful"


@pytest.mark.parametrize("served", ["slow", "*", "other"])
def test_job_of_an_operation_goes_to_a_queue_that_is_served_and_not_paused(backend, served):
    jobs = some()
    Queue.objects.named("default").pause()
    Queue.objects.named("slow")
    a_process("worker@here:1:abc", details={"queues": served})

    start(jobs, "discard", "", backend)

    queue = Job.objects.get(task=RUN).queue
    assert queue == {"slow": "slow", "*": "slow", "other": "other"}[served]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("task", ["nothing", "fail"])
def test_trial_run_goes_on_only_if_its_jobs_succeed(worker, backend, task):
    path = f"tests.tasks.{task}"
    given = {"task": path, "queue": "slow", "state": "failed", "attempt": 1, "failures": 1}
    Job.objects.bulk_create([Job(**given, started_at=Now(), finished_at=Now()) for _ in range(400)])
    start(Job.objects.filter(task=path), "retry", "", backend, stop_above=10)
    worker()

    operation = until(ended)

    expected = {
        "nothing": (400, ""),
        "fail": (3, "3 of 3 jobs failed again, more than 10 %."),
    }
    assert (operation.changed, operation.problem) == expected[task]


@pytest.mark.django_db(transaction=True)
def test_trial_runs_leave_the_only_thread_to_their_jobs(worker, backend):
    for queue in ("slow", "mail"):
        given = {"task": "tests.tasks.nothing", "queue": queue, "state": "failed", "attempt": 1}
        Job.objects.bulk_create([Job(**given, failures=1, finished_at=Now()) for _ in range(20)])
        start(Job.objects.filter(queue=queue), "retry", "", backend, stop_above=10)
    worker(threads=1)

    until(ended)
    assert [each.changed for each in Operation.objects.all()] == [20, 20]


@pytest.mark.django_db(transaction=True)
def test_stop_ends_a_trial_run_that_waits_for_results(worker, backend):
    given = {"task": "tests.tasks.nothing", "queue": "slow", "state": "failed", "attempt": 1}
    Job.objects.bulk_create([Job(**given, finished_at=Now(), run_after=later()) for _ in range(9)])
    start(Job.objects.all(), "retry", "", backend, stop_above=10)
    worker()
    until(lambda: Operation.objects.get().done == 3)

    Operation.objects.all().stop()

    operation = until(ended)
    assert (operation.done, operation.problem) == (3, "")


@pytest.mark.django_db(transaction=True)
def test_part_that_conflicts_with_another_transaction_is_repeated(backend, monkeypatch):
    jobs = some()
    start(jobs, "discard", "", backend)
    run_part, conflicts = operations.operations.run_part, iter([1213, 1020])

    def conflict_twice(*args):
        if number := next(conflicts, None):
            raise OperationalError(number) from Exception(number)
        return run_part(*args)

    monkeypatch.setattr(operations.operations, "run_part", conflict_twice)
    drain()

    assert Operation.objects.get().changed == 10
    assert not Execution.objects.filter(outcome="failed").exists()


def test_arguments_of_the_task_are_an_operation_that_exists(backend):
    result = run_operation.enqueue(404)
    drain()
    result.refresh()

    assert "DoesNotExist" in result.errors[0].exception_class_path
