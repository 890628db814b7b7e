"""Concurrency limits and rate limits: never exceeded, never stuck."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_dbqueue import Rate, limit, task
from django_dbqueue.compat import InvalidTask
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.engine.limit_sweeps import replan_rates
from django_dbqueue.models import Execution, Job, Queue, Semaphore, Slot
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.supervisor.drain import Drain
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.testing import drain

from .. import direct
from ..conftest import a_process, all_claimed, most_at_a_time, until
from ..models import Interval
from ..tasks import (
    add,
    call_often,
    call_service,
    charge,
    move_money,
    occupy,
    one_at_a_time,
    report,
    scan,
)

pytestmark = pytest.mark.django_db(transaction=True)
State, Outcome = Job.State, Execution.Outcome


def settle(*jobs, outcome=Outcome.SUCCESSFUL, state=State.SUCCESSFUL, **rest):
    return direct.settle([AttemptResult.of(job, outcome, state, **rest) for job in jobs])


def states(task=None) -> list[str]:
    rows = Job.objects.filter(task=task.module_path) if task else Job.objects.all()
    return [str(state) for state in rows.order_by("pk").values_list("state", flat=True)]


def enqueue_ready(task, *calls):
    """Enqueue jobs as READY, like concurrent producers that do not see each other's jobs."""
    jobs = task.enqueue_many(calls)
    Job.objects.filter(state=State.BLOCKED).update(state=State.READY, blocked_by=None)
    return jobs


# Slots


def test_claim_respects_limit_of_each_key(claim):
    enqueue_ready(charge, (1,), (1,), (1,), (2,))

    assert sorted(job.args[0] for job in claim()) == [1, 1, 2]
    assert states() == ["running", "running", "blocked", "running"]
    assert claim() == []


def test_finished_job_unblocks_next_waiter(claim):
    enqueue_ready(charge, (1,), (1,), (1,))
    first, _second = claim()

    settled = settle(first)

    assert settled.unblocked == ["default"]
    assert states() == ["successful", "running", "ready"]
    assert len(claim()) == 1


@pytest.mark.parametrize(
    ("outcome", "state", "wait"),
    [
        (Outcome.FAILED, State.FAILED, 0.0),
        (Outcome.FAILED, State.SCHEDULED, 60.0),
        (Outcome.DISCARDED, State.DISCARDED, 0.0),
        (Outcome.LOST, State.SCHEDULED, 3.0),
    ],
)
def test_every_outcome_releases_the_slot(claim, outcome, state, wait):
    enqueue_ready(one_at_a_time, (), ())
    (job,) = claim()

    settle(job, outcome=outcome, state=state, wait=wait)

    assert Job.objects.exclude(pk=job.pk).get().state == "ready"


def test_released_job_acquires_its_slot_again(claim):
    enqueue_ready(one_at_a_time, (), ())
    (job,) = claim()

    direct.release([job])

    assert len(claim()) == 1
    assert states().count("running") == 1


def test_recovery_releases_slots_of_dead_worker(claim, backend, process):
    enqueue_ready(one_at_a_time, (), ())
    claim()

    recovery.recover(
        backend,
        type(process).objects.filter(pk=process.pk),
        recovery.ExitReason(how="was killed"),
        list,
    )

    assert sorted(states()) == ["ready", "scheduled"]


def test_orphaned_slot_does_not_count(claim):
    enqueue_ready(one_at_a_time, (), ())
    (job,) = claim()
    Job.objects.filter(pk=job.pk).delete()
    Slot.objects.create(semaphore_id="tests.tasks.one_at_a_time", job_id=job.pk, attempt=1)

    assert direct.sweep(100) == ["default"]
    assert len(claim()) == 1


def test_waiter_with_highest_priority_is_next(claim):
    one_at_a_time.enqueue()
    (running,) = claim()
    one_at_a_time.enqueue()
    one_at_a_time.using(priority=5).enqueue()
    assert claim() == []

    settle(running)

    assert list(Job.objects.order_by("-priority", "-pk").values_list("state", flat=True)) == [
        "ready",
        "blocked",
        "successful",
    ]


def test_surplus_jobs_are_enqueued_as_blocked(claim):
    charge.enqueue_many([(1,)] * 5)

    assert states() == ["ready", "ready", "blocked", "blocked", "blocked"]
    charge.enqueue(1)
    assert states()[5] == "blocked"


def test_sweep_skips_limit_lowered_below_running_jobs(claim):
    enqueue_ready(charge, (1,), (1,), (1,), (2,), (2,), (2,))
    last = claim()[-1]
    Semaphore.objects.filter(pk="tests.tasks.charge account=1").update(max_running=1)
    Slot.objects.filter(job=last.pk).delete()

    assert direct.sweep(100) == ["default"]
    assert states() == ["running", "running", "blocked", "running", "running", "ready"]


def test_sweep_unblocks_waiter_without_running_jobs(claim):
    charge.enqueue_many([(1,)] * 3)
    Job.objects.exclude(state=State.BLOCKED).delete()
    Semaphore.objects.create(key="tests.tasks.charge account=1", max_running=2)

    assert direct.sweep(100) == ["default"]
    assert states() == ["ready"]


def test_waiters_continue_after_first_jobs_are_discarded(claim):
    charge.enqueue_many([(1,)] * 5)
    Job.objects.ready().discard()

    assert direct.unblock_orphans(100) == ["default", "default"]
    settle(*claim())

    assert states() == ["discarded", "discarded", "successful", "successful", "ready"]


def test_waiter_whose_row_has_lost_its_limits_stops_no_sweep():
    charge.enqueue_many([(1,)] * 4)
    Job.objects.ready().discard()
    Job.objects.filter(state=State.BLOCKED).update(limits=None)

    assert direct.unblock_orphans(100) == ["default"]


def test_rate_waiters_continue_after_first_job_is_discarded(claim):
    call_service.enqueue_many([(1,)] * 3)
    Job.objects.ready().discard()

    assert direct.unblock_orphans(100) == ["default"]
    claim()

    assert states() == ["discarded", "running", "blocked"]


def test_job_respects_all_its_limits(claim):
    enqueue_ready(report, (1,), (1,), (2,), (3,))

    running = claim()

    assert [job.args[0] for job in running] == [1, 2]
    blocked = dict(Job.objects.filter(state=State.BLOCKED).values_list("blocked_by", "args"))
    assert blocked == {"tests.tasks.report account=1": [1], "tests.tasks.report": [3]}
    settle(running[1])
    assert [job.args[0] for job in claim()] == [3]


def test_two_limits_with_one_key_are_one_with_the_smaller_number(claim, process):
    result = move_money.enqueue(3, 3)
    both = Job.objects.get(pk=result.id).limits
    assert [(each["key"], each["max_running"]) for each in both] == [('"accounts" 3', 1)]
    # As a row by hand has them.
    Job.objects.update(limits=[{**both[0], "max_running": 2}, both[0]])
    add.enqueue(1)

    jobs = claim()

    assert sorted(job.task.rpartition(".")[2] for job in jobs) == ["add", "move_money"]
    assert Slot.objects.count() == 1
    move_money.enqueue(3, 4)
    assert claim() == []
    settle(*jobs)
    assert [job.args for job in claim()] == [[3, 4]]


def test_of_two_limits_with_one_key_the_smaller_number_is_stored():
    twice = add.using(concurrency=(limit(3, group="a", on_conflict="discard"), limit(2, group="a")))
    (stored,) = Job.objects.get(pk=twice.enqueue(1).id).limits
    assert (stored["max_running"], stored["discard"]) == (2, True)


def test_two_rates_with_one_key_are_the_slower_one():
    twice = add.using(rate=(Rate(10, group="a", burst=3), Rate(2, group="a", burst=5)))
    (stored,) = Job.objects.get(pk=twice.enqueue(1).id).limits
    assert (stored["interval"], stored["burst"]) == (0.5, 3)


def test_tasks_of_one_group_share_its_limit(claim):
    first = task(concurrency=limit(1, group="printer"))(add.func)
    second = task(concurrency=limit(1, group="printer"), priority=5)(add.func)
    enqueue_ready(first, (1,))
    enqueue_ready(second, (1,))

    assert len(claim()) == 1


def test_conflicting_job_is_discarded_instead_of_blocked(claim):
    scan.enqueue()
    (running,) = claim()
    scan.enqueue("again")

    (refused,) = claim()

    assert refused.not_to_run
    assert Slot.objects.taken().count() == 1
    settle(running)


def test_discarded_job_records_the_missing_slot(claim, backend):
    scan.enqueue()
    claim()
    second = scan.enqueue("again")

    drain()

    (execution,) = Execution.objects.filter(job=second.id)
    assert (execution.outcome, Job.objects.get(pk=second.id).state) == (
        Outcome.DISCARDED,
        State.DISCARDED,
    )
    assert 'There was no slot free of "scanner", of which there are 1.' in execution.message


def test_job_without_key_is_not_limited(claim):
    enqueue_ready(charge, *[(None,)] * 5)

    assert len(claim()) == 5


def test_lowered_limit_applies_to_later_jobs(claim):
    wider = task(concurrency=limit(2, group="account"))(add.func)
    enqueue_ready(wider, (1,), (1,))
    claim()
    narrower = task(concurrency=limit(1, group="account"))(add.func)
    narrower.enqueue(1)

    assert claim() == []
    assert Semaphore.objects.get().max_running == 1


def test_retried_job_acquires_its_slot_again(claim):
    enqueue_ready(one_at_a_time, (), ())
    (job,) = claim()
    settle(job, outcome=Outcome.FAILED, state=State.FAILED)
    Job.objects.all().retry()

    assert len(claim()) == 1
    assert sorted(states()) == ["blocked", "running"]


def test_drain_runs_all_limited_jobs():
    charge.enqueue_many([(1,)] * 7)

    assert drain() == 7
    assert set(states()) == {"successful"}


def test_prune_removes_unused_semaphores_and_slots(claim):
    enqueue_ready(charge, (1,), (2,))
    settle(claim()[0])

    assert direct.prune_semaphores(100) == 1

    assert Semaphore.objects.count() == 1
    assert Slot.objects.count() == 1


def statement_kinds(act) -> list[str]:
    """Return the kinds of statements that ``act`` executes."""
    with CaptureQueriesContext(connection) as captured:
        act()
    # Django logs executemany() as "3 times: INSERT …".
    kinds = [query["sql"].rpartition(" times: ")[2].lstrip("(").split()[0] for query in captured]
    kinds = ["INSERT" if kind in ("COPY", "WITH") else kind for kind in kinds]
    return [kind for kind in kinds if kind in ("SELECT", "INSERT", "UPDATE", "DELETE")]


def test_plain_jobs_need_no_extra_statements(claim, process):
    with transaction.atomic():  # The NOTIFY follows on commit.
        reads_back = [] if connection.features.can_return_columns_from_insert else ["SELECT"]
        # The counts for the statistics: on PostgreSQL they are part of the INSERT.
        inserts = ["INSERT"] * (1 if connection.vendor == "postgresql" else 2)
        assert statement_kinds(lambda: add.enqueue(1)) == [*inserts, *reads_back]
    (lane,) = Job.objects.lanes()
    jobs = []

    assert statement_kinds(lambda: jobs.extend(direct.claim(lane, process, 1))) == [
        "SELECT",
        "UPDATE",
    ]
    # Of the execution and of the counts: on PostgreSQL these are part of the UPDATE.
    rest = ["INSERT"] if connection.vendor == "postgresql" else ["INSERT", "UPDATE"]
    assert statement_kinds(lambda: settle(*jobs)) == ["SELECT", "INSERT", *rest]


def test_drain_waits_for_blocked_jobs(claim):
    drain_of = Drain(
        "default", [QueueSelector(("*",))], Options(), a_process("supervisor", kind="supervisor")
    )
    enqueue_ready(one_at_a_time, (), ())
    claim()
    assert states() == ["running", "blocked"]

    assert not drain_of.is_over()

    Job.objects.running().delete()
    assert not drain_of.is_over()

    Semaphore.objects.update(interval=timedelta(seconds=5))
    assert drain_of.is_over()


# Queues


def claimer(process, **options):
    return Claimer("default", process, QueueSelector(("*",)), Options(**options))


def test_queue_limit_from_settings_applies(process):
    add.using(queue_name="reports").enqueue_many([(n,) for n in range(5)])
    add.enqueue(9)
    of_settings = claimer(process, per_queue={"reports": {"limit": 2}})

    jobs = all_claimed(of_settings, 10)

    assert sorted(job.queue for job in jobs) == ["default", "reports", "reports"]
    assert all_claimed(of_settings, 10) == []
    settle(*[job for job in jobs if job.queue == "reports"][:1])
    assert len(all_claimed(of_settings, 10)) == 1


def test_operator_limit_overrides_settings_at_once(process):
    add.using(queue_name="reports").enqueue_many([(n,) for n in range(5)])
    workers = claimer(process, limit=1)
    workers.FRESH = -1.0
    assert len(all_claimed(workers, 10)) == 1

    assert Queue.objects.named("reports").restrict(4) == 1
    assert len(all_claimed(workers, 10)) == 3
    assert Queue.objects.named("reports").restrict(None) == 1
    assert all_claimed(workers, 10) == []


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_invalid_queue_limit_is_refused(limit):
    with pytest.raises(ValueError, match=r"is not a whole number of at least 1\. Pause the queue"):
        Queue.objects.named("reports").restrict(limit)


def test_queue_limit_holds_across_hosts(runqueue):
    occupy.using(queue_name="reports").enqueue_many([(str(n), 0.05) for n in range(60)])
    Queue.objects.named("reports").restrict(3)
    for _ in range(1 if connection.vendor == "sqlite" else 2):
        runqueue("--processes", "1", "--embedded")

    until(lambda: Interval.objects.filter(ended_at__isnull=False).count() == 60)

    assert most_at_a_time(Interval.objects.all()) == 3


# Rates


def count_started(number, claim) -> int:
    """Return how many of ``number`` jobs start at once."""
    return len(claim(limit=number))


def advance_time(seconds: float) -> None:
    """Shift all stored times ``seconds`` into the past."""
    for row in Semaphore.objects.all():
        row.earliest -= timedelta(seconds=seconds)
        row.booked -= timedelta(seconds=seconds)
        row.save()
    for job in Job.objects.filter(state=State.SCHEDULED):
        Job.objects.filter(pk=job.pk).update(run_after=job.run_after - timedelta(seconds=seconds))


def test_rate_limited_jobs_start_evenly(claim):
    enqueue_ready(call_service, *[(n,) for n in range(5)])

    assert count_started(5, claim) == 1
    assert count_started(5, claim) == 0
    advance_time(6)
    direct.reserve_times()
    advance_time(5)
    direct.dispatch()
    assert count_started(5, claim) == 1


def test_waiters_get_start_times_at_the_rate(claim):
    frequent = task(rate=Rate(1, per=2, group="frequent"))(add.func)
    frequent.enqueue(0)
    claim()
    frequent.enqueue_many([(n,) for n in range(1, 5)])
    frequent.using(priority=9).enqueue(9)
    claim()

    direct.reserve_times()

    scheduled = list(Job.objects.filter(state=State.SCHEDULED).order_by("run_after"))
    assert 2 <= len(scheduled) <= 3
    gaps = [(b.run_after - a.run_after).total_seconds() for a, b in itertools.pairwise(scheduled)]
    assert gaps == pytest.approx([2.0] * len(gaps))


def test_rate_holds_after_pause_of_all_workers(claim):
    frequent = task(rate=Rate(1, per=1, group="frequent"))(add.func)
    frequent.enqueue(0)
    claim()
    frequent.enqueue_many([(n,) for n in range(1, 5)])
    claim()
    assert states().count("scheduled") >= 3

    advance_time(60)
    direct.dispatch()

    assert count_started(10, claim) == 1


def test_jobs_of_a_burst_start_together(claim):
    enqueue_ready(call_often, *[(n,) for n in range(30)])

    assert 10 <= count_started(30, claim) <= 10 + 6


def test_workers_do_not_exceed_the_rate(runqueue):
    call_often.enqueue_many([(n,) for n in range(110)])
    runqueue("--processes", "2")

    until(lambda: Execution.objects.filter(outcome="successful").count() == 110)

    # The rate applies to claims. By the database's time, a claim lies between its first statement
    # and the task's first statement, which bounds the distance of the first and the last call.
    claimed_at = {str(pk): at for pk, at in Execution.objects.values_list("job", "claimed_at")}
    calls = [
        (began_at, claimed_at[pk])
        for pk, began_at in Interval.objects.order_by("began_at").values_list("job", "began_at")
    ]
    for number in (41, 110):
        for some in zip(*(calls[start:] for start in range(number)), strict=False):
            first, last = min(claimed for _, claimed in some), some[-1][0]
            # Allow a burst of ten, and six that start up to 0.1 s early.
            assert (last - first).total_seconds() >= (number - 10 - 6) / 50


# Bad input


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: limit(0), "limit(): 0 is not a whole number from 1 to 999,999."),
        (lambda: limit(True), "limit(): True is not a whole number"),
        (
            lambda: limit(1, on_conflict="drop"),
            "limit(on_conflict='drop'): give 'wait' or 'discard'.",
        ),
        (lambda: limit(1, group=""), "limit(): group='' is not text of 1 to 100 characters."),
        (lambda: Rate(0), "Rate(): 0 is not a whole number from 1 to 999,999."),
        (
            lambda: Rate(5, per=-1),
            "Rate(per=-1): give a number of seconds above 0 and below 100,000,000, or a timedelta.",
        ),
        (lambda: Rate(5, per=timedelta()), "give a number of seconds above 0"),
        (lambda: Rate(5, burst=0), "Rate(burst=): 0 is not a whole number from 1 to 999,999."),
        (lambda: Rate(999_999, per=0.4), "Rate(999999, per=0.4) is a start every 4e-07 s."),
        (
            lambda: Rate(1, per=86_400, burst=36_501),
            "Rate(1, per=86400, burst=36501): 36,501 starts at this rate take more than 36,500 days.",
        ),
    ],
)
def test_invalid_limit_is_refused(make, said):
    with pytest.raises(ValueError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "rate", [Rate(1, per=86_400, burst=36_500), Rate(999_999, per=1.0, burst=999_999)]
)
def test_extreme_rate_runs_and_lets_others_wait_for_it(claim, rate):
    """A burst of 2,700 years ended each worker that claimed, and half a microsecond each dispatcher."""
    extreme = add.using(rate=rate)
    extreme.enqueue(1, 2)
    (first,) = claim()
    extreme.enqueue_many([(n, n) for n in range(3)])
    direct.reserve_times()
    replan_rates("default")
    settle(first)

    assert (
        Job.objects.exclude(pk=first.pk).filter(state__in=[State.READY, State.SCHEDULED]).count()
        == 3
    )


@pytest.mark.parametrize("stored", [{"interval": 4e-7}, {"interval": 86_400.0, "burst": 999_999}])
def test_job_whose_stored_rate_is_too_extreme_is_discarded_alone(claim, stored):
    add.enqueue(1, 2)
    wrong = add.enqueue(3, 4)
    Job.objects.filter(pk=wrong.id).update(limits=[{"key": "rate x", **stored}])

    assert [job.args for job in claim() if not job.not_to_run] == [[1, 2]]


@pytest.mark.parametrize("make", [limit, Rate])
def test_key_of_a_limit_that_is_no_function_is_refused(make):
    with pytest.raises(ValueError, match="key='all' is not a function of the task's arguments"):
        make(2, key="all")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"concurrency": 2},
            "concurrency must be a limit such as limit(2), or a tuple of these, not 2.",
        ),
        ({"rate": limit(2)}, "rate must be a limit such as Rate(100, per=60), or a tuple of these"),
        (
            {"concurrency": limit(2, key=lambda page: page)},
            "concurrency: key takes 'page', which is not an argument of add()",
        ),
    ],
)
def test_limit_not_matching_task_is_refused_at_import(settings, said):
    with pytest.raises(InvalidTask) as caught:
        task(**settings)(add.func)
    assert said in str(caught.value)
