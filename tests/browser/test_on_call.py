"""What an engineer on call does, from the first page on, without typing an address."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.utils import timezone

from django_dbqueue import testing
from django_dbqueue.engine.statistics import fold
from django_dbqueue.models import (
    Execution,
    Failure,
    Job,
    Process,
    Queue,
    StackTrace,
    Statistic,
    StatisticDelta,
    TaskState,
)

from .. import tasks
from ..conftest import a_process

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.browser,
    pytest.mark.skipif(
        connection.vendor != "sqlite",
        reason="Pages are the same on every database: one run is enough.",
    ),
]


@pytest.fixture
def on_call(operator):
    """An operator who has opened the admin and no other page."""
    operator.open("/admin/")
    yield operator
    assert operator.console_errors() == []


def run_all() -> None:
    """Run the jobs that are ready, and count them as a dispatcher does."""
    testing.drain()
    fold("default", 10_000)


def first_row(user) -> str:
    return user.browser.find_element("css selector", "#result_list tbody tr").text


def test_worst_failure_of_the_hour_and_since_when_in_two_clicks(on_call):
    for number in range(5):
        tasks.fail.enqueue(f"order {number} is late")
    tasks.fail.enqueue("no such customer")
    run_all()

    on_call.click("Failures")
    on_call.click("1 hour")

    worst = first_row(on_call)
    assert "order 0 is late" in worst and "5" in worst
    assert "first:" in worst and "failed now: 5" in worst


def test_regression_after_a_deploy_is_seen(on_call, monkeypatch):
    monkeypatch.setenv("RELEASE", "v1")
    tasks.fail.enqueue("order 1 is late")
    run_all()
    Failure.objects.resolve()
    a_day = timedelta(days=1)
    Statistic.objects.update(start=timezone.now() - a_day)
    monkeypatch.setenv("RELEASE", "v2")
    a_process("worker@web1:1:abc", release="v2")
    tasks.fail.enqueue("order 2 is late")
    tasks.fail.enqueue("a new kind of trouble")
    run_all()

    text = on_call.click("Failures")
    assert "Regression" in text and "New in v2" in text
    assert "v2 since" in on_call.click("Overview") or "v2 since" in on_call.click("7 days")


def test_retry_of_a_few_stops_if_they_fail_again(on_call):
    for number in range(20):
        tasks.fail.enqueue(f"order {number} is late")
    run_all()
    on_call.click("Failures")
    on_call.open_first_row()

    on_call.press("Retry in steps")
    assert "0 of 20" in on_call.press("Retry in steps: 20 jobs")
    for _round in range(4):
        run_all()
        Job.objects.scheduled().run_now()
    on_call.browser.refresh()

    assert "3 of 20" in on_call.text() and "Stopped" in on_call.text()
    assert Execution.objects.filter(failure__isnull=False).count() == 23


def test_why_a_job_does_not_run(on_call):
    tasks.add.using(queue_name="mail").enqueue(1)
    Queue.objects.ensure_rows(["mail"])
    Queue.objects.pause()

    on_call.click("Jobs")
    text = on_call.open_first_row()

    assert "Why is it not running?" in text and "paused" in text


def test_queue_is_paused_for_an_hour(on_call):
    tasks.add.using(queue_name="mail").enqueue(1)

    on_call.click("Queues")
    on_call.click("mail")
    on_call.press("Pause for a while")
    on_call.fill(value="1 hour")
    text = on_call.press("Pause for a while: 1 queue")

    assert "Paused for 1 h" in text
    queue = Queue.objects.get(name="mail")
    assert timedelta(minutes=59) < queue.resume_at - timezone.now() <= timedelta(hours=1)


def test_hanged_job_is_found_understood_and_stopped(on_call):
    process = a_process("worker@web1:1:abc")
    pk = tasks.add.enqueue(1).id
    now = timezone.now()
    Job.objects.filter(pk=pk).update(
        state="running", process=process, attempt=1, started_at=now - timedelta(hours=3)
    )
    StackTrace.objects.record(
        Job.objects.get(pk=pk), '  File "/srv/shop/reports.py", line 40, in build\n    wait()\n', {}
    )

    text = on_call.click("Hanged jobs")
    assert "3 h" in text and "reports.py:40 build" in text
    assert "wait()" in on_call.click("add")
    on_call.press("Stop")
    on_call.press("Stop: 1 job")

    assert Job.objects.get(pk=pk).stop_requested_at


def test_throughput_and_latency_of_yesterday(on_call):
    yesterday = timezone.now() - timedelta(days=1)
    counts = {"runs": 1234, "enqueued": 1300, "wait_time": [9.0, 3.0, {"24": 3}]}
    StatisticDelta.objects.create(at=yesterday, queue="mail", task="t", counts=counts)
    fold("default", 10_000)

    on_call.click("Overview")
    text = on_call.click("7 days")

    assert "1,234" in text and "1,300" in text
    assert "highest p95: 3" in text


def test_all_jobs_of_a_customer(on_call):
    tasks.add.enqueue(17, b=1)
    tasks.add.enqueue(18, b=1)
    tasks.add.enqueue(1, b=17)

    on_call.click("Jobs")
    on_call.fill(q="a:17")
    text = on_call.press("Search")

    assert "a = 17 in arguments and metadata" in text
    assert len(on_call.browser.find_elements("css selector", "#result_list tbody tr")) == 1
    assert "a=17" in first_row(on_call)


def test_which_worker_runs_what(on_call):
    process = a_process("worker@web1:1:abc")
    Job.objects.filter(pk=tasks.add.enqueue(5).id).update(
        state="running", process=process, attempt=1, started_at=timezone.now()
    )

    text = on_call.click("Processes")
    assert "worker@web1" in text
    assert "running for" in on_call.click("worker@web1").lower()
    on_call.click("1")

    assert "a=5" in first_row(on_call) and "Running" in first_row(on_call)


def test_job_is_enqueued_by_hand_and_again_with_another_argument(on_call):
    TaskState.objects.ensure_rows(["tests.tasks.add"])
    on_call.click("Tasks")
    on_call.click("tests.tasks.add")
    on_call.click("Enqueue a job")
    on_call.fill(arg_a="5")
    on_call.press("Enqueue")
    assert Job.objects.get().kwargs == {"a": 5}

    on_call.click("Edit and run again")
    on_call.fill(arg_a="6")
    assert "5" in on_call.press("Show the changes")
    on_call.press("Enqueue with these arguments")

    assert [job.kwargs["a"] for job in Job.objects.order_by("pk")] == [5, 6]
    assert LogEntry.objects.filter(change_message="Enqueued by hand: created.").count() == 2


def test_discard_is_undone(on_call):
    tasks.fail.enqueue("x")
    run_all()
    on_call.click("Jobs")
    on_call.open_first_row()
    on_call.press("Discard")
    on_call.press("Discard: 1 job")
    assert not Job.objects.failed().exists()

    on_call.click("Operations")
    on_call.open_first_row()
    on_call.press("Undo")
    on_call.press("Undo: 1 operation")

    assert Job.objects.failed().count() == 1


def test_overview_says_that_no_worker_is_alive(on_call):
    for _number in range(4):
        tasks.add.enqueue(1)
    assert not Process.objects.exists()

    text = on_call.click("Overview")

    assert "No runqueue is alive." in text and "4 ready jobs" in text
