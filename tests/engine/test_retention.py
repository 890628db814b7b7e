"""Retention: finished jobs are pruned with all their rows, unfinished jobs never."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from django_dbqueue import batch, task, testing
from django_dbqueue.compat import TaskResultDoesNotExist, task_backends
from django_dbqueue.models import Batch, Execution, Failure, Job, StackTrace
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus

from .. import direct, tasks

pytestmark = pytest.mark.django_db

DAY = 86_400


def finished(state: str, days: float, queue: str = "default") -> Job:
    ended = timezone.now() - timedelta(days=days)
    job = Job.objects.create(
        task="t", queue=queue, state=state, started_at=ended, finished_at=ended, attempt=1
    )
    Execution.objects.create(
        job=job, attempt=1, outcome=state, claimed_at=ended, started_at=ended, finished_at=ended
    )
    StackTrace.objects.create(job=job, attempt=1, text="somewhere")
    return job


def prune(backend, **options) -> set[tuple[str, str]]:
    """Prune as a dispatcher does; return states and queues of the remaining jobs."""
    backend = type(backend)(
        "default", {"OPTIONS": {"database": "default", **options}, "QUEUES": []}
    )
    dispatcher = Dispatcher(backend, backend.config, SharedStatus.private())
    while dispatcher._prune():
        pass
    for rows in (Execution.objects, StackTrace.objects):
        assert not rows.exclude(job__in=Job.objects.values("pk")).exists()
    return {(state, queue) for state, queue in Job.objects.values_list("state", "queue")}


def test_default_retention_differs_for_successful_and_failed_jobs(backend):
    for days in (6, 8, 80, 100):
        for state in ("successful", "failed", "discarded"):
            finished(state, days)

    prune(backend)

    kept = sorted((job.state, (timezone.now() - job.finished_at).days) for job in Job.objects.all())
    assert kept == [("discarded", d) for d in (6, 8, 80)] + [("failed", d) for d in (6, 8, 80)] + [
        ("successful", 6)
    ]
    assert Execution.objects.count() == StackTrace.objects.count() == 7


def test_queue_overrides_retention(backend):
    for queue in ("default", "audit", "noise"):
        finished("successful", 8, queue)
        finished("failed", 8, queue)

    own = {"audit": {"keep_successful": None}, "noise": {"keep_failed": DAY}}

    assert prune(backend, per_queue=own) == {
        ("successful", "audit"),
        ("failed", "audit"),
        ("failed", "default"),
    }


def test_unfinished_jobs_are_never_pruned(backend, process):
    for state in ("ready", "scheduled"):
        Job.objects.create(
            task="t", queue="q", state=state, run_after=timezone.now() - timedelta(days=1000)
        )
    Job.objects.create(
        task="t",
        queue="q",
        state="running",
        process=process,
        started_at=timezone.now() - timedelta(days=1000),
    )

    assert len(prune(backend)) == 3


def test_jobs_are_pruned_in_chunks(backend, monkeypatch):
    monkeypatch.setattr(Dispatcher, "BATCH", 2)
    for _ in range(5):
        finished("successful", 8)

    assert prune(backend) == set()


def failed_batches(*queues: str, days: float) -> None:
    """Leave a failure, and for each queue a finished batch with a failed and a successful job."""
    for queue in queues:
        with batch():
            tasks.fail.using(queue_name=queue).enqueue()
            tasks.add.using(queue_name=queue).enqueue(1)
    testing.drain()
    ended = timezone.now() - timedelta(days=days)
    Job.objects.update(finished_at=ended)
    Failure.objects.update(last_seen=ended)
    Batch.objects.update(finished_at=ended)


def test_old_failures_and_batches_are_pruned_with_their_jobs(backend):
    failed_batches("default", days=100)

    prune(backend)

    assert not Job.objects.exists() and not Failure.objects.exists() and not Batch.objects.exists()


def test_failures_and_batches_are_kept_with_the_jobs_of_a_queue(backend):
    failed_batches("default", "audit", days=100)
    Failure.objects.create(fingerprint="of no job", last_seen=timezone.now() - timedelta(days=300))

    assert prune(backend, per_queue={"audit": {"keep_failed": None}}) == {("failed", "audit")}

    assert Execution.objects.get().failure == Failure.objects.get()
    assert Batch.objects.get() == Job.objects.get().batch


def test_queue_without_end_does_not_keep_failures_and_batches_of_others(backend):
    failed_batches("default", days=2)

    prune(backend, keep_failed=None, keep_successful=DAY, per_queue={"noise": {"keep_failed": DAY}})
    assert Failure.objects.count() == Batch.objects.count() == 1
    Job.objects.update(queue="noise")
    prune(backend, keep_failed=None, keep_successful=DAY, per_queue={"noise": {"keep_failed": DAY}})

    assert not Job.objects.exists() and not Failure.objects.exists() and not Batch.objects.exists()


def test_failures_and_batches_are_kept_for_the_longest_time_of_a_queue(backend):
    failed_batches("noise", days=2)

    assert (
        prune(backend, per_queue={"noise": {"keep_failed": DAY, "keep_successful": DAY}}) == set()
    )

    assert Failure.objects.count() == Batch.objects.count() == 1


def test_delete_on_success_deletes_successful_job():
    result = tasks.leave_no_trace.enqueue()
    kept = tasks.add.enqueue(1)
    testing.drain()

    assert list(Job.objects.values_list("pk", flat=True)) == [Job.objects.get(pk=kept.id).pk]
    assert Execution.objects.count() == 1
    with pytest.raises(TaskResultDoesNotExist):
        task_backends["default"].get_result(result.id)


def test_delete_on_success_keeps_failed_job():
    tasks.leave_no_trace.enqueue(fail=True)
    testing.drain()

    assert Job.objects.get().state == "failed"
    assert Execution.objects.get().outcome == "failed"


def test_delete_on_success_ignores_lost_attempt(claim, backend):
    from django_dbqueue.runtime.worker import executor
    from django_dbqueue.runtime.worker.task_call import ThreadCall

    tasks.leave_no_trace.enqueue()
    (late,) = claim()
    direct.release([late])
    claim()

    assert direct.settle([executor.run(ThreadCall(late), backend)]).lost
    assert Job.objects.get().attempt == 2


@pytest.mark.parametrize(
    "option",
    [{"timeout": 0}, {"timeout": "5"}, {"timeout": True}, {"on_lost": "again"}, {"atomic": 1}],
)
def test_invalid_task_option_is_refused_at_declaration(option):
    from django_dbqueue.compat import InvalidTask

    with pytest.raises(InvalidTask, match=next(iter(option))):
        task(**option)(tasks.add.func)
