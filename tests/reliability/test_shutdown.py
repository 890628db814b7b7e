"""A shutdown ends in time, whatever runs; a deploy spends no attempt."""

from __future__ import annotations

import signal
import time

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Job, Process

from .. import tasks
from ..conftest import LONG, log_of, until
from ..models import Run
from .conftest import held_open

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

ONE = ["--embedded"] if connections["default"].vendor == "sqlite" else []


def test_fifty_running_jobs_are_released_in_time(runqueue):
    plain = tasks.sleep.enqueue_many([(1 + 60 * number,) for number in range(30)])
    tasks.echo.enqueue_many([("x", 1.0 + 60 * number) for number in range(20)])
    child = runqueue("--threads", "30", "--shutdown-timeout", "5", *ONE)
    until(lambda: Job.objects.running().count() == 50)

    began = time.monotonic()
    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert time.monotonic() - began < 40, log_of(
        child
    )  # The shutdown timeout of five seconds, and a busy machine.
    assert set(Job.objects.values_list("state", flat=True)) == {"successful", "ready"}
    assert Job.objects.get(pk=plain[0].id).state == "successful"
    assert not Job.objects.exclude(failures=0).exists()
    assert set(Execution.objects.values_list("outcome", flat=True)) == {"successful", "interrupted"}
    assert Execution.objects.count() == 50
    assert not Process.objects.exists()


def test_interrupted_task_resumes_from_saved_metadata(runqueue):
    result = tasks.count_to.enqueue(60)
    child = runqueue("--shutdown-timeout", "3600", *ONE)
    until(lambda: Job.objects.get().metadata.get("done", 0) >= 3)

    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    job = Job.objects.get()
    assert (job.state, job.failures, Execution.objects.get().outcome) == ("ready", 0, "interrupted")

    assert runqueue("--drain", *ONE).wait(LONG) == 0
    assert result.wait(1).return_value == 60
    assert Run.objects.count() == 60


def test_interrupted_task_cleans_up(runqueue):
    tasks.loop.enqueue()
    tasks.wait.enqueue()
    child = runqueue("--shutdown-timeout", "0.5", *ONE)
    until(lambda: Run.objects.filter(job__startswith="begun").count() == 2)

    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert Run.objects.filter(job__startswith="cleared up").count() == 2
    assert set(Execution.objects.values_list("outcome", flat=True)) == {"interrupted"}
    assert "ends with its process" not in log_of(child)


@pytest.mark.parametrize("task", [tasks.transfer_slowly, tasks.transfer_in_a_loop])
def test_started_on_lost_fail_job_is_not_released(runqueue, task):
    result = task.enqueue()
    child = runqueue("--shutdown-timeout", "0.5", *ONE)
    until(Run.objects.exists)

    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert Job.objects.get(pk=result.id).state == "failed"
    assert Execution.objects.get().outcome == "lost"


@pytest.mark.parametrize("how", ["cut", "silence"])
@pytest.mark.parametrize("embedded", [True, False])
def test_shutdown_ends_in_time_during_outage(runqueue, proxy, how, embedded):
    tasks.sleep.enqueue_many([(1.0,), (3600.0,)])
    child = runqueue(
        "--shutdown-timeout", "2", *(["--embedded"] if embedded else []), DATABASE_URL=proxy.url
    )
    until(lambda: Job.objects.running().count() == 2)

    getattr(proxy, how)()
    began = time.monotonic()
    child.send_signal(signal.SIGTERM)

    child.wait(LONG)
    # Options.longest_shutdown, and a busy machine.
    assert time.monotonic() - began < 2 + 10 + 15, log_of(child)


@pytest.fixture
def claimed_ahead(runqueue):
    """A ``runqueue`` with one thread that has claimed more one-second jobs than it runs."""

    def claimed_ahead(**env):
        tasks.nothing.enqueue_many([()] * 300)
        child = runqueue("--threads", "1", "--shutdown-timeout", "2", **env)
        until(lambda: not Job.objects.exclude(state="successful").exists())
        Execution.objects.all().delete()
        tasks.sleep.enqueue_many([(1.0,)] * 10)
        until(lambda: Job.objects.running().count() > 3)
        return child

    return claimed_ahead


@pytest.mark.skipif(connections["default"].vendor == "sqlite", reason="SQLite locks as a whole.")
@pytest.mark.parametrize("for_long", [False, True])
def test_unstarted_job_with_locked_row_spends_no_attempt(claimed_ahead, for_long):
    child = claimed_ahead()
    last = Job.objects.running().order_by("run_after", "pk").last()

    with held_open(lambda: Job.objects.select_for_update().get(pk=last.pk)):
        child.send_signal(signal.SIGTERM)
        until(
            lambda: (
                "has ended" in log_of(child) if for_long else "jobs still running:" in log_of(child)
            )
        )
    assert child.wait(LONG) == 0

    assert not Job.objects.running().exists()
    assert not Execution.objects.filter(job=last.pk).exists()
    assert Job.objects.get(pk=last.pk).state == "ready"


def test_unstarted_jobs_spend_no_attempt_in_shutdown_during_outage(claimed_ahead, runqueue, proxy):
    child = claimed_ahead(DATABASE_URL=proxy.url)

    proxy.cut()
    child.send_signal(signal.SIGTERM)
    child.wait(LONG)
    assert Job.objects.running().count() > 3
    runqueue("--threads", "10")

    until(lambda: not Job.objects.exclude(state="successful").exists())
    # The running job, and one that started before the end.
    assert Execution.objects.filter(outcome="lost").count() <= 2
    assert Job.objects.filter(failures__gt=0).count() <= 2
