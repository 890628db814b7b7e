"""Attacks on the database's constraints and on the guards of single statements."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial

import pytest
from django.db import IntegrityError, connections, transaction
from django.db.models import F
from django.utils import timezone

from django_dbqueue.compat import task_backends
from django_dbqueue.core.error_reports import ErrorReport
from django_dbqueue.engine import settle as settling
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Execution, Failure, Job, Process, Queue
from django_dbqueue.models.enums import Lane, Outcome, State
from django_dbqueue.models.failure import FailureQuerySet
from django_dbqueue.runtime import announcer, recovery

from .. import direct, tasks
from ..conftest import LONG, a_process

pytestmark = pytest.mark.django_db(transaction=True)


def succeed(job: Job, result=None) -> AttemptResult:
    return AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, Job.State.SUCCESSFUL, result=result)


def recover(dead, how="was killed by signal 9", **values):
    backend = task_backends["default"]
    return recovery.recover(
        backend, dead, recovery.ExitReason(how=how, **values), partial(announcer.announce, backend)
    )


def settle(*settlements: AttemptResult):
    return direct.settle(settlements)


@pytest.mark.parametrize(
    "values",
    [
        {"state": "asleep"},
        {"state": "running"},
        {"state": "ready", "process_id": 1},
        {"state": "successful"},
        {"state": "ready", "finished_at": timezone.now()},
        {"priority": 101},
        {"priority": -101},
        {"failures": 1},
        {"rerun_requested": True},
        {"state": "blocked"},
        {"blocked_by": "a limit"},
    ],
)
def test_inconsistent_job_is_refused(values):
    job = Job.objects.create(task="t", queue="q")

    with pytest.raises(IntegrityError):
        Job.objects.filter(pk=job.pk).update(**values)


def test_an_attempt_is_recorded_once(claim):
    tasks.add.enqueue(1)
    (job,) = claim()
    settle(succeed(job))

    with pytest.raises(IntegrityError):
        settling._record(direct.DATABASE, [succeed(job)])


def test_process_declared_dead_claims_nothing(claim, process):
    """A process on a suspended host, whose clock stood still, does not know that it was declared dead."""
    tasks.add.enqueue(1)
    Process.objects.all().erase()

    assert claim() == []
    assert Job.objects.get().state == "ready"


def test_late_outcome_does_not_overwrite_new_owner(claim):
    tasks.add.enqueue(1)
    (late,) = claim()
    direct.release([late])
    (owner,) = claim(a_process("another"))

    settled = settle(succeed(late, result="late"))

    assert [s.fence for s in settled.lost] == [late.fence]
    job = Job.objects.get()
    assert (job.state, job.attempt, job.process_id, job.result) == (
        "running",
        2,
        owner.process_id,
        None,
    )
    lost = Execution.objects.get()
    assert (lost.attempt, lost.outcome, lost.process) == (1, "lost", late.process.name)
    assert lost.message.startswith("It ended (successful) when its job belonged to another process")


def test_late_outcome_does_not_overwrite_result_of_new_owner(claim):
    tasks.add.enqueue(1)
    (late,) = claim()
    direct.release([late])
    (owner,) = claim(a_process("another"))
    settle(succeed(owner, result="right"))

    assert settle(succeed(late, result="late")).lost
    assert Job.objects.get().result == "right"


def test_second_outcome_of_attempt_is_lost(claim):
    tasks.add.enqueue(1)
    (job,) = claim()
    settle(AttemptResult.of(job, Execution.Outcome.INTERRUPTED, Job.State.READY))

    assert settle(succeed(job)).lost
    assert Job.objects.get().state == Job.State.READY


def test_a_stale_release_changes_nothing(claim):
    tasks.add.enqueue(1)
    (stale,) = claim()
    direct.release([stale])
    claim(a_process("another"))

    direct.release([stale])
    assert Job.objects.get().state == Job.State.RUNNING


def test_release_keeps_attempt_and_records_no_execution(claim):
    tasks.add.enqueue(1)
    direct.release(claim())
    (job,) = claim()

    assert job.attempt == 2
    assert not Execution.objects.exists()


def test_discarded_job_is_claimed_only_after_retry(claim):
    tasks.add.enqueue(1)
    assert Job.objects.all().discard() == 1
    assert claim() == []
    assert Job.objects.all().retry() == 1
    assert len(claim()) == 1


def test_running_job_is_neither_discarded_nor_retried(claim):
    tasks.add.enqueue(1)
    claim()

    assert Job.objects.all().discard() == Job.objects.all().retry() == 0


def test_successful_job_is_neither_discarded_nor_retried(claim):
    tasks.add.enqueue(1)
    settle(succeed(*claim()))

    assert Job.objects.all().discard() == Job.objects.all().retry() == 0


def test_locked_row_does_not_delay_its_settlement(claim):
    if not connections["default"].features.has_select_for_update_skip_locked:
        pytest.skip("SQLite locks the whole database.")
    tasks.add.enqueue_many([(1,), (2,)])
    held, free = claim()
    holding, done = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic():
            Job.objects.select_for_update().get(pk=held.pk)
            holding.set()
            done.wait(LONG)
        connections["default"].close()

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait(LONG)
    try:
        settled = settle(succeed(held), succeed(free))
    finally:
        done.set()
        holder.join()

    assert [s.fence for s in settled.written] == [free.fence]
    assert [s.fence for s in settled.locked_elsewhere] == [held.fence]
    assert settle(*settled.locked_elsewhere).written


def test_concurrent_claims_never_share_a_job():
    tasks.add.enqueue_many([(n,) for n in range(400)])
    claimed: list[list] = [[], [], [], []]
    start = threading.Barrier(4)

    def take(number):
        from django_dbqueue.runtime.connections import prepare

        prepare("default", 10)
        process = a_process(f"claimer {number}")
        start.wait()
        while jobs := direct.claim(Lane("default", 0), process, 7):
            claimed[number] += [job.pk for job in jobs]
        connections["default"].close()

    threads = [threading.Thread(target=take, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    everything = [pk for each in claimed for pk in each]
    assert len(everything) == len(set(everything)) == 400
    assert set(Job.objects.values_list("attempt", flat=True)) == {1}


def test_silent_process_is_deleted_and_its_jobs_recovered(claim, process):
    tasks.add.enqueue(1)
    (job,) = claim()
    Process.objects.filter(pk=process.pk).update(expires_at=timezone.now() - timedelta(minutes=5))

    assert recover(Process.objects.silent()) == 1

    assert not Process.objects.filter(pk=process.pk).beat(30)
    execution = Execution.objects.get()
    assert (execution.outcome, execution.process) == ("lost", process.name)
    assert Job.objects.get().state == Job.State.SCHEDULED
    assert settle(succeed(job)).lost


def test_process_is_silent_by_its_own_deadline():
    quick, slow = a_process("quick"), a_process("slow")
    Process.objects.filter(pk=quick.pk).beat(5)
    Process.objects.filter(pk=slow.pk).beat(60)

    Process.objects.update(expires_at=F("expires_at") - timedelta(seconds=10))

    assert Process.objects.silent().get() == quick
    assert Process.objects.alive().get() == slow


def test_jobs_of_live_process_are_not_recovered(claim):
    tasks.add.enqueue(1)
    claim()

    assert recover(Process.objects.silent()) == 0
    assert Job.objects.get().state == Job.State.RUNNING


def test_job_that_kills_its_processes_fails():
    tasks.add.enqueue(1)
    for number in range(3):
        process = a_process(f"victim {number}")
        Job.objects.filter(state=Job.State.SCHEDULED).update(state=Job.State.READY)
        assert direct.claim(Lane("default", 0), process, 1)
        recover(Process.objects.filter(pk=process.pk))

    assert Job.objects.get().state == Job.State.FAILED
    assert Execution.objects.filter(outcome="lost").count() == 3
    assert (
        tasks.add.get_result(str(Job.objects.get().pk)).errors[0].exception_class.__name__
        == "ProcessLost"
    )


def lose(how: str) -> None:
    """Lose a job of a new process."""
    process = a_process(f"worker@web1:{Job.objects.count()}:{how[-1]}f3a")
    tasks.add.enqueue(Job.objects.count())
    assert direct.claim(Lane("default", 0), process, 1)
    recover(Process.objects.filter(pk=process.pk), how)


def test_losses_with_same_cause_share_a_failure():
    for how in ("was killed by signal 9", "was killed by signal 9", "was killed by signal 11"):
        lose(how)

    groups = {
        failure.message.rpartition(" ")[2]: failure.count for failure in Failure.objects.all()
    }
    assert groups == {"9.": 2, "11.": 1}


def test_failure_keeps_first_message_of_settlement(claim):
    tasks.add.enqueue(1)
    tasks.add.enqueue(2)
    reports = [
        ErrorReport(
            type="ValueError", message=f"order {n}", traceback="", location="x", pattern="order #"
        )
        for n in (1, 2)
    ]
    settle(
        *(
            AttemptResult.of(job, Outcome.FAILED, State.FAILED, error=error)
            for job, error in zip(claim(), reports, strict=True)
        )
    )

    assert Failure.objects.get().message == "order 1"


@pytest.mark.parametrize("together", [1, 30])
def test_failures_of_one_location_merge_from_twenty_first_on(claim, together):
    def failure(word, location="x"):
        return ErrorReport(
            type="ValueError", message=word, traceback="", location=location, pattern=word
        )

    words = [failure("w" * length) for length in range(1, 31)]
    errors = [*words, failure("w"), failure("w", location="elsewhere")]
    tasks.add.enqueue_many([(number,) for number in range(32)])
    ends = [
        AttemptResult.of(job, Outcome.FAILED, State.FAILED, error=e)
        for job, e in zip(claim(), errors, strict=True)
    ]

    for start in range(0, 32, together):
        settle(*ends[start : start + together])

    counts = dict(Failure.objects.filter(location="x").values_list("pk", "count"))
    assert sorted(counts.values()) == [*[1] * 19, 2, 10]
    assert Failure.objects.get(location="elsewhere").count == 1
    assert Execution.objects.filter(failure__count=10).count() == 10


def test_failure_that_is_deleted_as_another_worker_inserts_it_is_inserted_again(monkeypatch):
    report = ErrorReport(type="a", message="", traceback="", location="x", pattern="")
    insert, lost = FailureQuerySet.bulk_create, []

    def insert_into_conflict(rows, failures, **options):
        return insert(rows, failures, **options) if lost else lost.append(failures)

    monkeypatch.setattr(FailureQuerySet, "bulk_create", insert_into_conflict)

    found = Failure.objects.identify({report.fingerprint: (report, "")})

    assert lost and found == {report.fingerprint: Failure.objects.get().pk}


@pytest.mark.parametrize(("failures", "state"), [(1, "scheduled"), (4, "failed")])
def test_lost_job_is_retried_until_max_attempts(claim, process, failures, state):
    """Recovery does not import the task, because the import may kill the process."""
    result = tasks.succeed_at_third.enqueue()
    Job.objects.filter(pk=result.id).update(
        task="tests.explosive.task", attempt=failures, failures=failures
    )
    claim()

    recover(Process.objects.filter(pk=process.pk))

    assert Job.objects.get().state == state


def test_dispatch_makes_only_due_jobs_ready():
    tasks.add.using(run_after=timedelta(milliseconds=-1)).enqueue(1)
    tasks.add.using(run_after=timedelta(hours=1)).enqueue(2)

    assert direct.dispatch() == ["default"]
    assert Job.objects.ready().get().args == [1]


def test_lanes_include_only_ready_jobs():
    for queue, priority in [("b", 0), ("a", 5), ("a", -5), ("a", 5)]:
        tasks.add.using(queue_name=queue, priority=priority).enqueue(1)
    tasks.add.using(queue_name="later", run_after=timedelta(hours=1)).enqueue(1)

    assert Job.objects.lanes() == [("a", -5), ("a", 5), ("b", 0)]
    assert Job.objects.lanes(["b", "nowhere"]) == [("b", 0)]
    assert Job.objects.lanes([]) == []
    assert len(Job.objects.lanes(["a", *map("q{}".format, range(700)), "b", "b"])) == 3


def test_lanes_of_names_that_differ_by_case_only():
    for queue in ("mail", "Mail", "maíl"):
        tasks.add.using(queue_name=queue).enqueue(1)

    assert {lane.queue for lane in Job.objects.lanes()} == {"mail", "Mail", "maíl"}
    assert Job.objects.lanes(["Mail"]) == [("Mail", 0)]


def test_lanes_of_filtered_jobs_are_refused():
    with pytest.raises(TypeError, match="not of filtered ones"):
        Job.objects.ready().lanes()


def test_pause_and_resume_count_changed_queues():
    Queue.objects.ensure_rows(["a", "b"])
    Queue.objects.ensure_rows(["b", "c"])

    assert Queue.objects.filter(name="a").pause() == 1
    assert Queue.objects.all().pause() == 2
    assert Queue.objects.all().pause() == 0
    assert Queue.objects.all().resume() == 3
