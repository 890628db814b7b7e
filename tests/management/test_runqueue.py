"""``manage.py runqueue`` with real processes and real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.db.models import Count, Max, Min

from django_dbqueue.models import Execution, Job, Process, Queue, TaskState

from .. import tasks
from ..conftest import LONG, is_found_within, log_of, until
from ..models import Run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]

# SQLite has one writer at a time, so its runtime is one process.
MANY = [] if connections["default"].vendor != "sqlite" else ["--embedded"]


def state_of(result):
    return Job.objects.values_list("state", flat=True).get(pk=result.id)


@pytest.mark.timeout(900)  # On a quiet machine it takes 20 s.
def test_ten_thousand_jobs_run_exactly_once(runqueue):
    tasks.record.enqueue_many([()] * 10_000)

    child = runqueue("--drain", *(MANY or ["--processes", "4"]))

    assert child.wait(800) == 0, log_of(child)
    assert Run.objects.count() == 10_000
    assert set(Job.objects.values_list("state", flat=True)) == {"successful"}
    # One for each job: a job that is released before it starts leaves no execution.
    assert set(Execution.objects.values_list("outcome", flat=True)) == {"successful"}
    assert Execution.objects.count() == 10_000


def test_drain_with_failed_job_exits_with_1(runqueue):
    tasks.fail.enqueue()
    tasks.add.enqueue(1)

    child = runqueue("--drain", *MANY)

    assert child.wait(LONG) == 1
    assert "failed: ValueError: it failed" in log_of(child)
    assert set(Job.objects.values_list("state", flat=True)) == {"failed", "successful"}


def test_drain_leaves_scheduled_jobs(runqueue):
    later = tasks.add.using(run_after=timedelta(hours=1)).enqueue(1)

    assert runqueue("--drain", *MANY).wait(LONG) == 0
    assert state_of(later) == "scheduled"


@pytest.mark.parametrize("embedded", [True, False])
def test_misbehaving_task_does_not_affect_neighbours(runqueue, embedded):
    bad = [
        "exit",
        "interrupt",
        "memory",
        "recursion",
        "unrepresentable",
        "stop iteration",
        "not json",
    ]
    worse = ["open transaction", "broken transaction", "autocommit off", "closed connection"]
    worse.append("transaction by SQL")
    for _ in range(3):
        for how in [*bad, *worse]:
            tasks.misbehave.enqueue(how)
            tasks.record.enqueue()
            tasks.echo.enqueue(how)

    child = runqueue("--drain", "--threads", "2", *(["--embedded"] if embedded else MANY))

    assert child.wait(LONG) == 1
    assert not list(
        Execution.objects.filter(outcome="failed")
        .exclude(job__task="tests.tasks.misbehave")
        .values_list("traceback", flat=True)
    )
    assert Run.objects.count() == 36
    assert not Run.objects.filter(job__startswith="never").exists()
    assert not Job.objects.exclude(state__in=["successful", "failed"]).exists()
    assert Job.objects.filter(task="tests.tasks.echo", state="successful").count() == 36
    assert Job.objects.filter(task="tests.tasks.misbehave", state="failed").count() == 3 * len(
        [*bad, "broken transaction"]
    )
    assert "was lost" not in log_of(child)


def test_coroutines_run_concurrently(runqueue):
    tasks.echo.enqueue_many([("x", 1.0)] * 50)

    assert runqueue("--drain", "--threads", "1", *MANY).wait(LONG) == 0

    assert Job.objects.filter(state="successful").count() == 50
    ran = Execution.objects.aggregate(first=Min("started_at"), last=Max("finished_at"))
    assert (ran["last"] - ran["first"]).total_seconds() < 25


def test_sigterm_lets_running_jobs_finish(runqueue):
    result = tasks.tell_and_sleep.enqueue(2)
    child = runqueue(*MANY)
    until(Run.objects.exists)

    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert state_of(result) == "successful"
    assert not Process.objects.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_process_group_lets_running_jobs_finish(runqueue, number):
    result = tasks.tell_and_sleep.enqueue(2)
    child = runqueue(*MANY, fresh=True)
    until(Run.objects.exists)

    os.killpg(child.pid, number)

    assert child.wait(LONG) == 0
    assert state_of(result) == "successful"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_job_is_released_after_shutdown_timeout_without_failure(runqueue, number):
    result = tasks.tell_and_sleep.enqueue(60)
    child = runqueue("--shutdown-timeout", "0.5", *MANY)
    until(Run.objects.exists)

    child.send_signal(number)

    assert child.wait(LONG) == 0, log_of(child)
    assert state_of(result) == "ready"
    assert Execution.objects.get().outcome == Execution.Outcome.INTERRUPTED
    assert Job.objects.get().failures == 0
    assert "ends with its process" in log_of(child)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGQUIT])
def test_second_signal_shuts_down_immediately(runqueue, second):
    result = tasks.tell_and_sleep.enqueue(3600)
    child = runqueue("--shutdown-timeout", "3600", *MANY)
    until(Run.objects.exists)

    child.send_signal(signal.SIGTERM)
    until(lambda: "jobs still running:" in log_of(child))
    child.send_signal(second)

    assert child.wait(LONG) == 0
    assert state_of(result) == "ready"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_signal_to_reloader_lets_running_jobs_finish(runqueue, send, number):
    result = tasks.tell_and_sleep.enqueue(2)
    child = runqueue("--reload")
    until(Run.objects.exists)

    send(child.pid, number)

    assert child.wait(LONG) == 0
    assert state_of(result) == "successful"
    assert not Process.objects.exists()


def test_second_signal_to_reloader_shuts_down_immediately(runqueue):
    result = tasks.tell_and_sleep.enqueue(3600)
    child = runqueue("--reload", "--shutdown-timeout", "3600")
    until(Run.objects.exists)

    child.send_signal(signal.SIGTERM)
    until(lambda: "jobs still running:" in log_of(child))
    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert state_of(result) == "ready"
    assert not Process.objects.exists()


def test_change_of_code_releases_running_jobs(runqueue, tmp_path):
    module = tmp_path / "changing.py"
    module.write_text("")
    tasks.tell_and_sleep.enqueue(3600)
    child = runqueue(
        "--reload",
        PYTHONPATH=str(tmp_path),
        DBQUEUE_OPTIONS=json.dumps({"task_modules": ["changing"]}),
    )
    until(Run.objects.exists)

    def is_released():
        os.utime(module)
        return Execution.objects.filter(outcome="interrupted").exists()

    until(is_released)
    until(lambda: log_of(child).count("in this process") > 1)
    assert child.poll() is None


def test_prefetched_jobs_are_released_at_shutdown(runqueue):
    tasks.nothing.enqueue_many([()] * 300)
    child = runqueue("--threads", "1", *MANY)
    until(lambda: not Job.objects.filter(state__in=["ready", "running"]).exists())
    tasks.sleep.enqueue_many([(0.3,)] * 30)
    until(lambda: Job.objects.running().count() > 1)

    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert not Job.objects.running().exists()
    assert Job.objects.ready().count() > 10
    assert set(Execution.objects.values_list("outcome", flat=True)) == {"successful"}


@pytest.mark.skipif(bool(MANY), reason="A single process has no supervisor.")
@pytest.mark.parametrize(("how", "cause"), [("kill", "signal 9"), (7, "exit code 7")])
def test_dead_worker_is_replaced_until_its_killer_job_fails(runqueue, how, cause):
    killer = tasks.die.enqueue(how)

    child = runqueue("--threads", "2")

    until(lambda: state_of(killer) == "failed")
    assert cause in log_of(child)
    assert Execution.objects.filter(job_id=killer.id, outcome="lost").count() == 3
    after = tasks.add.enqueue(1)
    until(lambda: state_of(after) == "successful")


@pytest.mark.skipif(bool(MANY), reason="A single process has no supervisor.")
@pytest.mark.parametrize("code", [0, 75])
def test_exit_by_task_is_a_crash_whatever_its_code(runqueue, code):
    """With code 75, that of a shutdown, the job ran again and again; with 0, it was found after 30 s."""
    killer = tasks.die.using(on_lost="fail").enqueue(code)

    child = runqueue("--threads", "2")

    until(lambda: state_of(killer) == "failed")
    assert f"ended with exit code {code}." in log_of(child)
    assert Execution.objects.get(job_id=killer.id).outcome == "lost"


@pytest.mark.skipif(bool(MANY), reason="A single process has no supervisor.")
def test_exit_by_task_during_shutdown_leaves_no_job_running(runqueue):
    jobs = [tasks.sleep.enqueue(30), tasks.die.enqueue(0, after=2)]
    child = runqueue("--threads", "2")
    until(lambda: [state_of(job) for job in jobs] == ["running"] * 2)

    child.send_signal(signal.SIGTERM)

    assert child.wait(LONG) == 0
    assert not Job.objects.running().exists()
    assert not Process.objects.exists()


@pytest.mark.skipif(bool(MANY), reason="A single process has no supervisor.")
def test_job_that_breaks_event_loop_is_lost_with_its_process_alone(runqueue):
    """The loop was restarted without end: 33,000 lines a second, and no coroutine ran."""
    killer = tasks.break_event_loop.using(on_lost="fail").enqueue()
    child = runqueue("--threads", "2", "--shutdown-timeout", "1")

    until(lambda: state_of(killer) == "failed")
    after = tasks.echo.enqueue("on")

    until(lambda: state_of(after) == "successful")
    assert log_of(child).count("async pool: event loop failed") == 1


@pytest.mark.skipif(bool(MANY), reason="A single process has no supervisor.")
def test_neighbour_of_killer_job_runs_again(runqueue):
    neighbour = tasks.sleep.enqueue(1)
    runqueue("--threads", "2")
    until(lambda: state_of(neighbour) == "running")

    killer = tasks.die.enqueue()
    until(lambda: Execution.objects.filter(outcome="lost").count() >= 2)
    until(Job.objects.filter(pk=killer.id).discard)

    until(lambda: state_of(neighbour) == "successful")


@pytest.mark.skipif(bool(MANY), reason="A single process has no supervisor.")
def test_workers_end_with_their_supervisor(runqueue):
    child = runqueue("--processes", "2")
    pids = until(
        lambda: (
            [p.pid for p in Process.objects.filter(kind="worker")]
            if Process.objects.count() == 4
            else None
        )
    )

    os.kill(child.pid, signal.SIGKILL)
    child.wait(LONG)

    def gone(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    until(lambda: all(gone(pid) for pid in pids))


def test_queues_are_served_in_the_order_given(runqueue):
    for name in ["low", "skip", "mid-1", "high"]:
        for number in range(3):
            tasks.row.using(queue_name=name).enqueue(f"{name} {number}")

    assert (
        runqueue("--drain", "--embedded", "--threads", "1", "--queues", "high,mid*,-skip,*").wait(
            LONG
        )
        == 0
    )

    order = [
        re.sub(r" \d", "", name)
        for name in Run.objects.order_by("pk").values_list("job", flat=True)
    ]
    assert order == ["high"] * 3 + ["mid-1"] * 3 + ["low"] * 3
    assert Job.objects.ready().filter(queue="skip").count() == 3


def test_higher_priority_runs_first(runqueue):
    for priority in [0, -100, 100, 50]:
        tasks.row.using(priority=priority, queue_name=f"queue-{priority}").enqueue(f"{priority}")

    assert runqueue("--drain", "--embedded", "--threads", "1").wait(LONG) == 0

    assert list(Run.objects.order_by("pk").values_list("job", flat=True)) == [
        "100",
        "50",
        "0",
        "-100",
    ]


def test_paused_queue_is_served_only_after_resume(runqueue):
    Queue.objects.ensure_rows(["default"])
    Queue.objects.all().pause()
    result = tasks.add.enqueue(1)
    runqueue(*MANY)
    other = tasks.add.using(queue_name="free").enqueue(1)
    until(lambda: state_of(other) == "successful")
    assert state_of(result) == "ready"

    Queue.objects.all().resume()

    until(lambda: state_of(result) == "successful")


def test_drain_leaves_jobs_of_paused_tasks(runqueue):
    TaskState.objects.ensure_rows(["tests.tasks.add"])
    TaskState.objects.all().pause()
    left = tasks.add.enqueue(1)
    ran = tasks.row.enqueue("ran")

    assert runqueue("--drain", "--embedded").wait(LONG) == 0

    assert (state_of(left), state_of(ran)) == ("ready", "successful")


def test_scheduled_job_runs_on_time(runqueue):
    runqueue(*MANY)
    until(lambda: Process.objects.filter(kind="dispatcher").exists())
    result = tasks.add.using(run_after=timedelta(seconds=1)).enqueue(1)

    until(lambda: state_of(result) == "successful")

    execution, job = Execution.objects.get(), Job.objects.get()
    assert 0 <= (execution.started_at - job.run_after).total_seconds() < 8


def test_idle_worker_is_woken_by_notify(runqueue):
    if connections["default"].vendor != "postgresql":
        pytest.skip("Only PostgreSQL can wake a worker.")
    runqueue("--poll-interval", "30")

    assert is_found_within(tasks.nothing, 2)


def test_worker_is_replaced_after_max_jobs(runqueue):
    tasks.nothing.enqueue_many([()] * 30)

    child = runqueue("--drain", "--max-jobs", "10", "--threads", "1", *MANY)

    assert child.wait(LONG) == 0, log_of(child)
    assert Execution.objects.values("process").distinct().count() > 1
    assert Execution.objects.filter(outcome="successful").count() == 30


def test_each_worker_runs_max_jobs(runqueue):
    """Jobs that were claimed ahead and released counted too: processes ran a part of theirs."""
    if MANY:
        pytest.skip("An embedded worker ends its last jobs before its successor starts.")
    tasks.sleep.enqueue_many([(0.1,)] * 24)

    child = runqueue("--drain", "--max-jobs", "8", "--threads", "4", "--processes", "1")

    assert child.wait(LONG) == 0, log_of(child)
    ran = Execution.objects.filter(outcome="successful").values("process")
    assert [each["n"] for each in ran.annotate(n=Count("pk")).order_by()] == [8, 8, 8]


def test_worker_replaced_after_max_jobs_finishes_running_jobs(runqueue):
    long = tasks.sleep.using(priority=1).enqueue(3)
    tasks.nothing.enqueue_many([()] * 30)

    child = runqueue(
        "--drain", "--max-jobs", "10", "--threads", "2", "--shutdown-timeout", "0.5", *MANY
    )

    assert child.wait(LONG) == 0, log_of(child)
    assert long.wait(timeout=1).attempts == 1


def test_workers_with_long_jobs_are_kept_past_max_jobs(runqueue):
    if MANY:
        pytest.skip("An embedded worker ends its last jobs before its successor starts.")
    tasks.sleep.enqueue_many([(20,)] * 12)
    runqueue("--max-jobs", "1", "--threads", "2", "--shutdown-timeout", "0.5")
    # Of two workers: the first may have released a job that it had not started.
    until(lambda: Job.objects.running().count() >= 3)

    def workers() -> int:
        time.sleep(0.1)
        return Process.objects.filter(kind="worker").count()

    assert max(workers() for _ in range(60)) == 2


def test_dispatcher_and_workers_run_separately(runqueue):
    if MANY:
        pytest.skip("SQLite has one writer at a time.")
    result = tasks.add.using(run_after=timedelta(milliseconds=1)).enqueue(1)
    runqueue("--only", "workers")
    until(lambda: Process.objects.filter(kind="worker").exists())
    assert not Process.objects.filter(kind="dispatcher").exists()
    assert state_of(result) == "scheduled"

    runqueue("--only", "dispatcher")

    until(lambda: state_of(result) == "successful")


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_other_backend_has_its_own_workers(runqueue):
    result = tasks.add.using(backend="other").enqueue(1)

    assert runqueue("--drain", "--backend", "other", *MANY).wait(LONG) == 0

    assert Job.objects.using("other").get(pk=result.id).state == "successful"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--backend", "nowhere"],
            "There is no backend 'nowhere' in TASKS. Choose from default, other.",
        ),
        (["--threads", "0"], "threads=0 is not a whole number of at least 1"),
        (["--drain", "--only", "workers"], "--drain needs workers and a dispatcher"),
        (["--drain", "--reload"], "--reload and --drain exclude each other"),
        (["--queues", ""], "queues is empty"),
        (["--queues", "a*b"], "'a*b' is not a queue"),
        (["--poll-interval", "-1"], "poll_interval=-1.0 is not a number of seconds above 0"),
    ],
)
def test_bad_arguments_are_named_with_their_remedy(runqueue, arguments, message):
    child = runqueue(*arguments)

    assert child.wait(LONG) == 1
    assert message in log_of(child)
    assert "Traceback" not in log_of(child)


@pytest.mark.parametrize("queues", ["default", ["-mail"], [7]])
def test_queues_that_are_no_list_of_names_are_refused(settings, queues):
    settings.TASKS = {
        "default": {"BACKEND": "django_dbqueue.backend.DatabaseBackend", "QUEUES": queues}
    }
    with pytest.raises(CommandError, match=r"is not a list of queue names.*errors\.md#dbqueuee005"):
        call_command("runqueue", "--drain")
