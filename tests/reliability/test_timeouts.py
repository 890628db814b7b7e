"""Jobs that exceed their timeout are stopped, and their neighbours are not affected."""

from __future__ import annotations

import pytest
from django.db import connections

from django_dbqueue.models import Execution, Job, Process

from .. import tasks
from ..conftest import LONG, log_of, until
from ..models import Run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]
only_with_processes = pytest.mark.skipif(
    connections["default"].vendor == "sqlite", reason="On SQLite it runs as one process."
)


def outcomes(result):
    return list(
        Execution.objects.filter(job=result.id)
        .order_by("attempt")
        .values_list("outcome", flat=True)
    )


def test_loop_is_interrupted_and_cleans_up(runqueue):
    result = tasks.loop_too_long.enqueue()
    child = runqueue("--embedded")

    until(lambda: outcomes(result) == ["timed_out"])

    execution = Execution.objects.get()
    assert 1.9 < (execution.finished_at - execution.started_at).total_seconds() < 20
    assert "while True" in execution.traceback or "time.sleep(0.01)" in execution.traceback
    assert Run.objects.filter(job="cleared up").exists()
    assert Job.objects.get().state == "failed"
    assert "does not stop" not in log_of(child)
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1


def test_coroutine_is_cancelled_and_cleans_up(runqueue):
    result = tasks.wait_too_long.enqueue()
    neighbour = tasks.echo.enqueue("x", wait=4)
    runqueue("--embedded")

    until(lambda: outcomes(result) == ["timed_out"])

    assert "asyncio.sleep(3600)" in Execution.objects.get(job=result.id).traceback
    assert Run.objects.filter(job="cleared up").exists()
    assert neighbour.wait(LONG).return_value == "x"


def test_wait_of_a_coroutine_for_the_database_thread_is_not_its_run_time(runqueue):
    """The thread is shared: starts and ends of coroutines wait for a query of another one."""
    tasks.row_async.enqueue("first")  # From now on, starts need the thread.
    child = runqueue("--embedded", DBQUEUE_OPTIONS='{"timeout_grace": 1}')
    until(lambda: Run.objects.exists())
    before = tasks.end_soon.enqueue("ends meanwhile", 1.0)
    until(lambda: Job.objects.get(pk=before.id).state == "running")

    tasks.hold_the_database_thread.enqueue(7)
    later = [tasks.end_soon.enqueue(f"begins meanwhile {number}", 0) for number in range(3)]

    assert before.wait(LONG).return_value == "ends meanwhile"
    for each in later:
        assert each.wait(LONG).attempts == 1 and each.status == "SUCCESSFUL"
    assert "does not stop" not in log_of(child)


@pytest.mark.skipif(
    connections["default"].vendor == "sqlite",
    reason="SQLite has no line on which an answer can be under way.",
)
def test_connection_interrupted_in_a_query_is_not_reused(worker):
    """On MariaDB, half of twelve interruptions come between the query and its reply."""
    interrupted = [tasks.query_too_long.enqueue(0.02) for _ in range(12)]
    neighbours = [tasks.row.enqueue(str(number)) for number in range(24)]

    worker(threads=4)

    until(lambda: not Job.objects.exclude(state__in=["failed", "successful"]).exists())
    assert {tuple(outcomes(each)) for each in interrupted} == {("timed_out",)}
    assert {tuple(outcomes(each)) for each in neighbours} == {("successful",)}


@only_with_processes
@pytest.mark.parametrize(
    ("stuck", "place"),
    [
        (lambda: tasks.sleep_too_long.enqueue(3600), "time.sleep(seconds)"),
        (lambda: tasks.block_too_long.enqueue(), "time.sleep(3600)"),
        (lambda: tasks.count_too_long.enqueue(), "in count_too_long"),
    ],
    ids=["sleeps in C", "blocks the event loop", "does not let go of the interpreter"],
)
def test_stuck_job_ends_with_its_process_after_neighbours_finish(runqueue, stuck, place):
    neighbours = tasks.sleep.enqueue_many([(4,)] * 7)
    result = stuck()
    child = runqueue(DBQUEUE_OPTIONS='{"timeout_grace": 1}')

    until(lambda: outcomes(result) == ["timed_out"])

    execution = Execution.objects.get(job=result.id)
    assert (execution.finished_at - execution.started_at).total_seconds() < 25, log_of(child)
    assert Job.objects.get(pk=result.id).state == "failed"
    assert place in Execution.objects.get(job=result.id).traceback
    for neighbour in neighbours:
        neighbour.wait(LONG)
        assert outcomes(neighbour)[-1] == "successful"
        assert set(outcomes(neighbour)[:-1]) <= {"interrupted"}
    assert not Job.objects.exclude(failures=0).exclude(pk=result.id).exists()
    assert tasks.add.enqueue(1).wait(LONG).return_value == 1


def test_time_neighbour_holds_gil_counts_beyond_the_timeout_only(
    worker,
):
    """Three seconds exceed the timeout of two; the neighbours cannot be blamed for it."""
    neighbours = [tasks.loop_for.enqueue(0.5), tasks.loop_for.enqueue(60)]
    worker(threads=3)
    until(lambda: Job.objects.running().count() == 2)
    holder = tasks.hold_the_interpreter.enqueue(3)

    until(lambda: not Job.objects.exclude(state__in=["failed", "successful"]).exists())

    assert [outcomes(each) for each in (holder, *neighbours)] == [
        ["successful"],
        ["successful"],
        ["timed_out"],
    ]


@only_with_processes
def test_replacement_works_while_worker_with_stuck_job_ends(runqueue, tmp_path):
    stuck = tasks.sleep_too_long.enqueue(3600)
    neighbour = tasks.leave_line.enqueue(str(tmp_path / "begun"), str(tmp_path / "go"))
    runqueue(DBQUEUE_OPTIONS='{"timeout_grace": 1, "shutdown_timeout": 600}')
    until(lambda: Process.objects.filter(kind="worker").count() == 2)

    result = tasks.add.enqueue(1)

    assert result.wait(LONG).return_value == 1
    assert outcomes(neighbour) == outcomes(stuck) == []
    assert (
        Execution.objects.get(job=result.id).process
        != Job.objects.get(pk=neighbour.id).process.name
    )
    (tmp_path / "go").touch()
    until(lambda: outcomes(neighbour) == ["successful"] and outcomes(stuck) == ["timed_out"])


def test_stuck_job_ends_embedded_process(runqueue):
    result = tasks.sleep_too_long.enqueue(3600)
    child = runqueue("--embedded", DBQUEUE_OPTIONS='{"timeout_grace": 1}')

    assert child.wait(LONG) == 75
    assert outcomes(result) == ["timed_out"]
