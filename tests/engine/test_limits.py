"""How many run at a time, and how often one starts: never more, and never stuck."""

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
from django_dbqueue.models import Execution, Job, Queue, Semaphore, Slot
from django_dbqueue.runtime import recovery
from django_dbqueue.runtime.supervisor.drain import Drain
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.testing import drain

from .. import direct
from ..conftest import a_process, all_claimed, most_at_a_time, until
from ..models import Interval
from ..tasks import add, call_often, call_service, charge, occupy, one_at_a_time, report, scan

pytestmark = pytest.mark.django_db(transaction=True)
State, Outcome = Job.State, Execution.Outcome


def settle(*jobs, outcome=Outcome.SUCCESSFUL, state=State.SUCCESSFUL, **rest):
    return direct.settle([AttemptResult.of(job, outcome, state, **rest) for job in jobs])


def states(task=None) -> list[str]:
    rows = Job.objects.filter(task=task.module_path) if task else Job.objects.all()
    return [str(state) for state in rows.order_by("pk").values_list("state", flat=True)]


def enqueue_ready(task, *calls):
    """As many producers at the same moment do: nobody sees the others' jobs in the line."""
    jobs = task.enqueue_many(calls)
    Job.objects.filter(state=State.BLOCKED).update(state=State.READY, blocked_by=None)
    return jobs


# Slots


def test_no_more_run_at_a_time_than_the_limit_of_their_key_allows(claim):
    enqueue_ready(charge, (1,), (1,), (1,), (2,))

    assert sorted(job.args[0] for job in claim()) == [1, 1, 2]
    assert states() == ["running", "running", "blocked", "running"]
    assert claim() == []


def test_a_job_that_ends_has_the_next_one_ready(claim):
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
def test_however_it_ends_its_slot_is_free(claim, outcome, state, wait):
    enqueue_ready(one_at_a_time, (), ())
    (job,) = claim()

    settle(job, outcome=outcome, state=state, wait=wait)

    assert states()[1] == "ready"


def test_what_is_given_back_before_it_began_takes_its_slot_anew(claim):
    enqueue_ready(one_at_a_time, (), ())
    (job,) = claim()

    direct.release([job])

    assert len(claim()) == 1
    assert states().count("running") == 1


def test_the_slot_of_a_dead_worker_is_free_when_its_job_is_recovered(claim, backend, process):
    enqueue_ready(one_at_a_time, (), ())
    claim()

    recovery.recover(
        backend,
        type(process).objects.filter(pk=process.pk),
        recovery.ExitReason(how="was killed"),
        list,
    )

    assert sorted(states()) == ["ready", "scheduled"]


def test_a_slot_that_was_left_behind_counts_for_nothing(claim):
    enqueue_ready(one_at_a_time, (), ())
    (job,) = claim()
    Job.objects.filter(pk=job.pk).delete()
    Slot.objects.create(semaphore_id="tests.tasks.one_at_a_time", job_id=job.pk, attempt=1)

    assert direct.sweep(100) == ["default"]
    assert len(claim()) == 1


def test_the_highest_priority_is_next(claim):
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


def test_a_job_that_is_behind_others_waits_from_the_beginning(claim):
    charge.enqueue_many([(1,)] * 5)

    assert states() == ["ready", "ready", "blocked", "blocked", "blocked"]
    charge.enqueue(1)
    assert states()[5] == "blocked"


def test_a_sweep_goes_past_a_limit_that_was_lowered_below_what_runs(claim):
    enqueue_ready(charge, (1,), (1,), (1,), (2,), (2,), (2,))
    last = claim()[-1]
    Semaphore.objects.filter(pk="tests.tasks.charge account=1").update(most=1)
    Slot.objects.filter(job=last.pk).delete()

    assert direct.sweep(100) == ["default"]
    assert states() == ["running", "running", "blocked", "running", "running", "ready"]


def test_one_that_waits_although_its_line_has_gone_is_found(claim):
    charge.enqueue_many([(1,)] * 3)
    Job.objects.exclude(state=State.BLOCKED).delete()
    Semaphore.objects.create(key="tests.tasks.charge account=1", most=2)

    assert direct.sweep(100) == ["default"]
    assert states() == ["ready"]


def test_a_line_whose_first_jobs_are_called_off_before_one_is_claimed_goes_on(claim):
    charge.enqueue_many([(1,)] * 5)
    Job.objects.ready().discard()

    assert direct.unblock_orphans(100) == ["default"]
    settle(*claim())

    assert states() == ["discarded", "discarded", "successful", "ready", "ready"]


def test_a_rate_whose_first_job_is_called_off_before_it_is_claimed_goes_on(claim):
    call_service.enqueue_many([(1,)] * 3)
    Job.objects.ready().discard()

    assert direct.unblock_orphans(100) == ["default"]
    claim()

    assert states() == ["discarded", "running", "blocked"]


def test_several_limits_hold_together(claim):
    enqueue_ready(report, (1,), (1,), (2,), (3,))

    running = claim()

    assert [job.args[0] for job in running] == [1, 2]
    blocked = dict(Job.objects.filter(state=State.BLOCKED).values_list("blocked_by", "args"))
    assert blocked == {"tests.tasks.report account=1": [1], "tests.tasks.report": [3]}
    settle(running[1])
    assert [job.args[0] for job in claim()] == [3]


def test_a_group_is_one_limit_for_several_tasks(claim):
    first = task(concurrency=limit(1, group="printer"))(add.func)
    second = task(concurrency=limit(1, group="printer"), priority=5)(add.func)
    enqueue_ready(first, (1,))
    enqueue_ready(second, (1,))

    assert len(claim()) == 1


def test_a_job_that_would_have_to_wait_can_be_discarded_instead(claim):
    scan.enqueue()
    (running,) = claim()
    scan.enqueue("again")

    (refused,) = claim()

    assert refused.not_to_run
    assert Slot.objects.taken().count() == 1
    settle(running)


def test_what_is_discarded_for_want_of_a_slot_says_so(claim, backend):
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


def test_no_key_is_no_limit(claim):
    enqueue_ready(charge, *[(None,)] * 5)

    assert len(claim()) == 5


def test_a_lower_limit_holds_for_what_comes_after_it(claim):
    wider = task(concurrency=limit(2, group="account"))(add.func)
    enqueue_ready(wider, (1,), (1,))
    claim()
    narrower = task(concurrency=limit(1, group="account"))(add.func)
    narrower.enqueue(1)

    assert claim() == []
    assert Semaphore.objects.get().most == 1


def test_a_retried_job_takes_its_slot_anew(claim):
    enqueue_ready(one_at_a_time, (), ())
    (job,) = claim()
    settle(job, outcome=Outcome.FAILED, state=State.FAILED)
    Job.objects.all().retry()

    assert len(claim()) == 1
    assert sorted(states()) == ["blocked", "running"]


def test_drain_runs_all_of_them():
    charge.enqueue_many([(1,)] * 7)

    assert drain() == 7
    assert set(states()) == {"successful"}


def test_unused_semaphores_and_left_slots_are_forgotten(claim):
    enqueue_ready(charge, (1,), (2,))
    settle(claim()[0])

    assert direct.prune_semaphores(100) == 1

    assert Semaphore.objects.count() == 1
    assert Slot.objects.count() == 1


def statements(act) -> list[str]:
    """What kinds of statements it takes."""
    with CaptureQueriesContext(connection) as captured:
        act()
    # One that is executed for many rows is said to be "3 times: INSERT …".
    kinds = [query["sql"].rpartition(" times: ")[2].lstrip("(").split()[0] for query in captured]
    kinds = ["INSERT" if kind == "COPY" else kind for kind in kinds]
    return [kind for kind in kinds if kind in ("SELECT", "INSERT", "UPDATE", "DELETE")]


def test_jobs_without_keys_and_limits_cost_not_one_statement_more(claim, process):
    with transaction.atomic():  # Whom it wakes is another matter.
        reads_back = [] if connection.features.can_return_columns_from_insert else ["SELECT"]
        assert statements(lambda: add.enqueue(1)) == ["INSERT", *reads_back]
    (lane,) = Job.objects.lanes()
    jobs = []

    finds_first = ["SELECT"] if connection.vendor == "mysql" else []
    assert statements(lambda: jobs.extend(direct.claim(lane, process, 1))) == [
        *finds_first,
        "SELECT",
        "UPDATE",
    ]
    assert statements(lambda: settle(*jobs)) == ["SELECT", "UPDATE", "INSERT"]


def test_a_drain_waits_for_jobs_that_others_block(claim):
    drain_of = Drain(
        "default", QueueSelector(("*",)), Options(), a_process("supervisor", kind="supervisor")
    )
    enqueue_ready(one_at_a_time, (), ())
    claim()
    assert states() == ["running", "blocked"]

    assert drain_of._any_left(Job.objects.all())

    Semaphore.objects.update(every=timedelta(seconds=5))
    assert not drain_of._any_left(Job.objects.exclude(state=State.RUNNING))


# Queues


def claimer(process, **options):
    return Claimer("default", process, QueueSelector(("*",)), Options(**options))


def test_a_queue_may_have_a_limit_of_its_own(process):
    add.using(queue_name="reports").enqueue_many([(n,) for n in range(5)])
    add.enqueue(9)
    of_settings = claimer(process, per_queue={"reports": {"limit": 2}})

    jobs = all_claimed(of_settings, 10)

    assert sorted(job.queue for job in jobs) == ["default", "reports", "reports"]
    assert all_claimed(of_settings, 10) == []
    settle(*[job for job in jobs if job.queue == "reports"][:1])
    assert len(all_claimed(of_settings, 10)) == 1


def test_an_operators_limit_goes_before_that_of_the_settings_and_holds_at_once(process):
    add.using(queue_name="reports").enqueue_many([(n,) for n in range(5)])
    workers = claimer(process, limit=1)
    workers.FRESH = -1.0
    assert len(all_claimed(workers, 10)) == 1

    assert Queue.objects.named("reports").restrict(4) == 1
    assert len(all_claimed(workers, 10)) == 3
    assert Queue.objects.named("reports").restrict(None) == 1
    assert all_claimed(workers, 10) == []


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "2"])
def test_a_limit_of_a_queue_that_cannot_be_is_refused(limit):
    with pytest.raises(ValueError, match=r"is not a whole number of at least 1\. Pause the queue"):
        Queue.objects.named("reports").restrict(limit)


def test_a_limit_of_a_queue_holds_over_all_hosts(runqueue):
    occupy.using(queue_name="reports").enqueue_many([(str(n), 0.05) for n in range(60)])
    Queue.objects.named("reports").restrict(3)
    for _ in range(1 if connection.vendor == "sqlite" else 2):
        runqueue("--processes", "1", "--embedded")

    until(lambda: Interval.objects.filter(ended_at__isnull=False).count() == 60)

    assert most_at_a_time(Interval.objects.all()) == 3


# Rates


def starts(number, claim) -> int:
    """How many of so many start at once."""
    return len(claim(limit=number))


def step(seconds: float) -> None:
    """As seen from the rows, so many seconds go by."""
    for row in Semaphore.objects.all():
        row.earliest -= timedelta(seconds=seconds)
        row.booked -= timedelta(seconds=seconds)
        row.save()
    for job in Job.objects.filter(state=State.SCHEDULED):
        Job.objects.filter(pk=job.pk).update(run_after=job.run_after - timedelta(seconds=seconds))


def test_jobs_start_evenly(claim):
    enqueue_ready(call_service, *[(n,) for n in range(5)])

    assert starts(5, claim) == 1
    assert starts(5, claim) == 0
    step(6)
    direct.reserve_times()
    step(5)
    direct.dispatch()
    assert starts(5, claim) == 1


def test_the_next_ones_get_their_times_ahead_by_priority(claim):
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


def test_after_a_pause_of_all_workers_the_rate_holds(claim):
    frequent = task(rate=Rate(1, per=1, group="frequent"))(add.func)
    frequent.enqueue(0)
    claim()
    frequent.enqueue_many([(n,) for n in range(1, 5)])
    claim()
    assert states().count("scheduled") >= 3

    step(60)
    direct.dispatch()

    assert starts(10, claim) == 1


def test_a_burst_may_start_together_after_a_pause(claim):
    enqueue_ready(call_often, *[(n,) for n in range(30)])

    assert 10 <= starts(30, claim) <= 10 + 6


def test_a_rate_is_kept_by_workers(runqueue):
    call_often.enqueue_many([(n,) for n in range(110)])
    runqueue("--processes", "2")

    until(lambda: Execution.objects.filter(outcome="successful").count() == 110)

    # A rate is kept where jobs are claimed. By the database's time, that was after the claim's first statement and before the
    # task's first: so far apart, the first and the last of some calls may be at most.
    claimed_at = {str(pk): at for pk, at in Execution.objects.values_list("job", "claimed_at")}
    calls = [
        (began_at, claimed_at[pk])
        for pk, began_at in Interval.objects.order_by("began_at").values_list("job", "began_at")
    ]
    for number in (41, 110):
        for some in zip(*(calls[start:] for start in range(number)), strict=False):
            first, last = min(claimed for _, claimed in some), some[-1][0]
            # Ten of them may be a burst, and six early by a tenth of a second.
            assert (last - first).total_seconds() >= (number - 10 - 6) / 50


# Bad input


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: limit(0), "limit(): 0 is not a whole number of at least 1."),
        (lambda: limit(True), "limit(): True is not a whole number"),
        (
            lambda: limit(1, on_conflict="drop"),
            "limit(on_conflict='drop'): it is 'wait' or 'discard'.",
        ),
        (lambda: limit(1, group=""), "limit(): group='' is not text of 1 to 100 characters."),
        (lambda: Rate(0), "Rate(): 0 is not a whole number of at least 1."),
        (
            lambda: Rate(5, per=-1),
            "Rate(per=-1): give a number of seconds above 0, or a timedelta.",
        ),
        (lambda: Rate(5, per=timedelta()), "give a number of seconds above 0"),
        (lambda: Rate(5, burst=0), "Rate(burst=): 0 is not a whole number of at least 1."),
    ],
)
def test_a_limit_that_cannot_be_is_refused(make, said):
    with pytest.raises(ValueError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"concurrency": 2}, "concurrency must be such as limit(2), or a tuple of these, not 2."),
        ({"rate": limit(2)}, "rate must be such as Rate(100, per=60), or a tuple of these"),
        (
            {"concurrency": limit(2, key=lambda page: page)},
            "concurrency: key takes 'page', which is no argument of add()",
        ),
        (
            {"concurrency": limit(2, key="a")},
            "concurrency: key must be a function of the task's arguments, or text, not 'a'.",
        ),
    ],
)
def test_a_limit_that_does_not_fit_the_task_is_refused_at_import(settings, said):
    with pytest.raises(InvalidTask) as caught:
        task(**settings)(add.func)
    assert said in str(caught.value)
