"""The reason on a job's page for which the job does not run yet."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.models import Job, Process, Queue, Semaphore, TaskState
from django_dbqueue.testing import drain
from tests.conftest import a_process

from .conftest import a_job


def page(job: Job) -> str:
    return reverse("admin:dbqueue_job_change", args=[job.pk])


def waiting_reason(client: Client, job: Job) -> str:
    found = re.search(r'class="dbq-why">(.*?)</p>', client.get(page(job)).text, re.S)
    return re.sub(r"<[^>]+>", "", found[1]) if found else ""


def test_ended_job_shows_no_reason(viewer: Client, failed: Callable[..., Job]) -> None:
    assert waiting_reason(viewer, failed()) == ""


def test_scheduled_job_shows_its_due_time(viewer: Client, db: Any) -> None:
    job = a_job(
        state=Job.State.SCHEDULED, run_after=timezone.now() + timedelta(minutes=10, seconds=30)
    )

    assert "It is scheduled in 10 min" in waiting_reason(viewer, job)


def test_job_waiting_for_retry_shows_its_time(viewer: Client, db: Any) -> None:
    job = a_job(
        state=Job.State.SCHEDULED,
        run_after=timezone.now() + timedelta(minutes=10, seconds=30),
        attempt=1,
        failures=1,
    )

    assert "It failed, and is retried in 10 min" in waiting_reason(viewer, job)


def test_job_of_unknown_task_shows_that_no_worker_knows_it(viewer: Client, db: Any) -> None:
    unknown = a_job(task="tests.tasks.renamed")
    other = a_job(task="tests.tasks.succeed_at_third", max_attempts=3)
    drain()
    # Its time is not to come while the page is read.
    Job.objects.filter(pk=unknown.pk).update(run_after=timezone.now() + timedelta(seconds=50))

    assert re.search(
        r"No live worker knows its task\. It is tried again in [\d.]+ s, at [\d:\- ]+\. Deploy",
        waiting_reason(viewer, unknown),
    )
    assert "knows its task" not in waiting_reason(viewer, other)
    # A new run of its key.
    Job.objects.filter(pk=unknown.pk).update(attempts_before=F("attempt"))
    assert "knows its task" not in waiting_reason(viewer, unknown)
    Job.objects.filter(pk=unknown.pk).update(state=Job.State.READY, attempts_before=0)
    assert "knows its task" not in waiting_reason(viewer, unknown)


def test_due_job_shows_whether_a_dispatcher_is_alive(viewer: Client, db: Any) -> None:
    job = a_job(state=Job.State.SCHEDULED, run_after=timezone.now() - timedelta(minutes=10))

    assert "no dispatcher is alive" in waiting_reason(viewer, job)
    a_process("dispatcher@here:1:abc", kind="dispatcher")

    assert "A dispatcher makes it ready within seconds" in waiting_reason(viewer, job)


def test_job_of_paused_queue_shows_the_pause(viewer: Client, db: Any) -> None:
    job = a_job()
    Queue.objects.create(name="default")
    Queue.objects.pause()

    assert "Its queue “default” is paused" in waiting_reason(viewer, job)


def test_timed_pause_of_queue_is_shown_until_it_ends(viewer: Client, db: Any) -> None:
    Queue.objects.named("default").pause(until=timedelta(hours=1))
    job = a_job()

    assert re.search(
        r"Its queue “default” is paused, since [\d:\- ]+, until [\d:\- ]+\.",
        waiting_reason(viewer, job),
    )
    Queue.objects.update(resume_at=timezone.now() - timedelta(minutes=1))

    assert "paused" not in waiting_reason(viewer, job)


def test_job_of_paused_task_shows_the_pause(viewer: Client, db: Any) -> None:
    TaskState.objects.named("shop.tasks.send_invoice").pause()
    job = a_job()

    assert "Its task “shop.tasks.send_invoice” is paused, since" in waiting_reason(viewer, job)


@pytest.mark.parametrize("queues", [None, "mail", "*, -default"])
def test_job_of_unserved_queue_shows_that_no_worker_serves_it(
    viewer: Client, db: Any, queues: str | None
) -> None:
    if queues:
        a_process("worker@here:1:abc", details={"queues": queues})

    assert "no live worker serves the queue “default”" in waiting_reason(viewer, a_job())


def test_job_of_full_queue_shows_the_queue_limit(viewer: Client, db: Any) -> None:
    a_process("worker@here:1:abc", details={"queues": "*"})
    Queue.objects.named("default").restrict(2)
    a_job(state=Job.State.RUNNING, process_id=1)
    job = a_job()
    assert "limit" not in waiting_reason(viewer, job)

    a_job(state=Job.State.RUNNING, process_id=1)

    assert (
        "It is ready, but its queue “default” has reached its limit: 2 of 2 jobs are running."
        in waiting_reason(viewer, job)
    )


def test_ready_job_shows_number_of_jobs_ahead(viewer: Client, db: Any) -> None:
    a_process("worker@here:1:abc", details={"queues": "*"})
    before = timezone.now() - timedelta(minutes=1)
    a_job(priority=5), a_job(run_after=before), a_job(queue="mail"), a_job(priority=-1)
    job = a_job()

    assert "2 jobs are ahead of it, and 1 worker serves its queue" in waiting_reason(viewer, job)


def test_blocked_job_shows_taken_slots_of_its_limit(viewer: Client, db: Any) -> None:
    Semaphore.objects.create(key="charge 7", max_running=2)
    blocked = {"state": Job.State.BLOCKED, "blocked_by": "charge 7"}
    a_job(**blocked)

    reason = waiting_reason(viewer, a_job(**blocked))

    assert "waiting on the limit “charge 7”: 0 of 2 slots are taken. Jobs ahead of it: 1." in reason


def test_blocked_job_shows_interval_of_its_rate_limit(viewer: Client, db: Any) -> None:
    Semaphore.objects.create(key="rate send", interval=timedelta(seconds=0.6))

    reason = waiting_reason(viewer, a_job(state=Job.State.BLOCKED, blocked_by="rate send"))

    assert "waiting on the limit “send”: one start every 600 ms. Jobs ahead of it: 0." in reason


def test_job_whose_workers_are_all_quiet_says_so(viewer: Client, process: Process) -> None:
    job = a_job()
    Process.objects.quiet()

    text = waiting_reason(viewer, job)

    assert "all workers of the queue “default” are quiet" in text
