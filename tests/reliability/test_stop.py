"""An operator stops a running job."""

from __future__ import annotations

import json
import os
import signal

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Failure, Job, Process

from .. import tasks
from ..conftest import LONG, log_of, until
from ..models import Run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]
ONE = ["--embedded"] if connections["default"].vendor == "sqlite" else []
only_with_processes = pytest.mark.skipif(bool(ONE), reason="On SQLite it runs as one process.")


def stopped(result):
    job = Job.objects.get(pk=result.id)
    return job.state == "discarded" and job.executions.get().outcome == "discarded"


@pytest.mark.parametrize("task", [tasks.loop, tasks.wait])
def test_stopped_job_is_interrupted_and_discarded(runqueue, task):
    result = task.enqueue()
    child = runqueue(*ONE)
    until(lambda: Run.objects.filter(job__startswith="begun"))

    assert Job.objects.all().stop() == 1
    assert Job.objects.all().stop() == 0

    until(lambda: stopped(result))
    assert Execution.objects.get().error_type == "django_dbqueue.exceptions.Stopped"
    assert Run.objects.filter(job__startswith="cleared up").exists()
    assert not Failure.objects.exists()
    assert child.poll() is None
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1


@only_with_processes
def test_stopped_job_that_ignores_interrupts_ends_with_its_process(runqueue):
    result = tasks.sleep.enqueue(3600)
    neighbour = tasks.sleep.enqueue(5)
    runqueue(DBQUEUE_OPTIONS=json.dumps({"timeout_grace": 1}))
    until(lambda: Job.objects.running().count() == 2)

    Job.objects.filter(pk=result.id).stop()

    until(lambda: stopped(result))
    assert neighbour.wait(LONG).status == "SUCCESSFUL"
    assert Execution.objects.get(job=neighbour.id).attempt == 1
    assert "time.sleep(seconds)" in Execution.objects.get(job=result.id).traceback


@pytest.mark.parametrize("task", [tasks.loop, tasks.wait])
def test_job_stopped_to_be_retried_runs_again(runqueue, task):
    result = task.enqueue()
    runqueue(*ONE)
    until(lambda: Run.objects.filter(job__startswith="begun"))

    Run.objects.all().delete()
    assert Job.objects.all().stop(then="retry") == 1

    until(lambda: Run.objects.filter(job__startswith="begun").exists())
    first = Execution.objects.get(job=result.id)
    assert (first.attempt, first.outcome) == (1, "stopped")
    assert first.error_type == "django_dbqueue.exceptions.Stopped"
    assert not Failure.objects.exists()
    Run.objects.all().delete()
    Job.objects.all().stop()
    until(lambda: Job.objects.get().state == "discarded")


@only_with_processes
def test_uninterruptible_job_stopped_to_be_retried_runs_again_in_another_process(runqueue):
    result = tasks.sleep.enqueue(3600)
    runqueue(DBQUEUE_OPTIONS=json.dumps({"timeout_grace": 1}))
    until(lambda: Job.objects.running().exists())

    Job.objects.all().stop(then="retry")

    until(lambda: Execution.objects.filter(job=result.id, outcome="stopped").exists())
    until(lambda: Job.objects.filter(state="running", attempt=2).exists())
    assert "time.sleep(seconds)" in Execution.objects.get(job=result.id).traceback
    Job.objects.all().stop()
    until(lambda: Job.objects.get().state == "discarded")


@only_with_processes
def test_stopped_job_of_dead_process_is_not_retried(runqueue):
    result = tasks.begin_and_sleep.enqueue("x", 3600)
    runqueue()
    until(Run.objects.exists)
    Job.objects.all().stop()

    os.kill(Process.objects.get(kind="worker").pid, signal.SIGKILL)

    until(lambda: stopped(result))


def test_stop_of_ended_job_does_not_affect_its_retry(runqueue):
    result = tasks.add.enqueue(1)
    Job.objects.update(
        state="successful",
        finished_at="2026-01-01T00:00:00Z",
        stop_requested_at="2026-01-01T00:00:00Z",
    )
    Job.objects.update(state="failed")
    Job.objects.all().retry()

    assert runqueue("--drain", *ONE).wait(LONG) == 0
    assert result.wait(1).return_value == 1


@only_with_processes
def test_hanging_job_is_shown_with_its_stack_trace(runqueue, admin_client):
    result = tasks.sleep.enqueue(3600)
    child = runqueue(DBQUEUE_OPTIONS=json.dumps({"per_queue": {"default": {"hanged_after": 1}}}))

    until(lambda: "hangs" in log_of(child))
    job = until(lambda: Job.objects.filter(stack__isnull=False).first())

    assert "time.sleep(seconds)" in job.stack.text
    page = admin_client.get("/admin/dbqueue/hangedjob/?backend=default").content.decode()
    assert str(result.id) in page
    page = admin_client.get(
        f"/admin/dbqueue/job/{result.id}/change/?backend=default"
    ).content.decode()
    assert "time.sleep(seconds)" in page
    Job.objects.all().stop()
