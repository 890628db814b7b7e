"""Many keys with a limit each: one for each customer, account or file, as most limits are."""

from __future__ import annotations

from collections import Counter

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_dbqueue import Rate, task
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.engine.limit_sweeps import sweep
from django_dbqueue.engine.ready_jobs import ReadyJobs
from django_dbqueue.models import Execution, Job, Queue, Semaphore
from django_dbqueue.models.enums import State

from .. import direct
from ..conftest import LONG
from ..reliability.conftest import held_open
from ..tasks import charge

pytestmark = pytest.mark.django_db(transaction=True)
ACCOUNTS = [f"account {number}" for number in range(60)]


def settle(*jobs):
    succeeded = [
        AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, State.SUCCESSFUL) for job in jobs
    ]
    return direct.settle(succeeded)


def states_of(account):
    rows = Job.objects.filter(args__0=account).order_by("pk")
    return list(rows.values_list("state", flat=True))


def test_claim_and_settlement_of_many_keys_take_few_statements(claim):
    charge.enqueue_many([(account, number) for number in range(4) for account in ACCOUNTS])
    numbers = []
    for accounts in (1, len(ACCOUNTS)):
        with CaptureQueriesContext(connection) as queries:
            jobs = claim(limit=accounts)
            settle(*jobs)
        assert len({job.args[0] for job in jobs}) == accounts
        numbers.append(len(queries))
    few, many = numbers

    # Blocks of jobs are changed in parts on some databases.
    assert many <= few + 12, [query["sql"][:200] for query in queries]


@task(rate=Rate(2, per=1, key=lambda customer: customer))
def of_customer(customer, number):
    return number


def wait_for_rates(claim, accounts, number):
    """Use the rate of each account, and let ``number - 1`` jobs wait for it whose times no claim reserves."""
    of_customer.enqueue_many([(account, 0) for account in accounts])
    claim(limit=len(accounts))
    of_customer.enqueue_many([(account, each) for each in range(number) for account in accounts])


def test_start_times_of_many_rates_are_reserved_with_few_statements(claim, monkeypatch):
    """With statements for each key, a dispatcher made no job ready while a thousand waited."""
    wait_for_rates(claim, ACCOUNTS, 5)
    assert not Job.objects.scheduled().exists()
    monkeypatch.setattr("django_dbqueue.engine.limit_sweeps.LONGEST_SWEEP", LONG)

    with CaptureQueriesContext(connection) as queries:
        assert not direct.reserve_times()

    # 60 semaphores are two parts; on some databases their jobs are changed in several statements.
    assert len(queries) <= 40
    planned = Counter(Job.objects.scheduled().values_list("args__0", flat=True))
    assert set(planned) == set(ACCOUNTS)
    assert set(planned.values()) == {4}


def test_sweep_of_rates_that_takes_long_goes_on_in_the_next_round(claim, monkeypatch):
    wait_for_rates(claim, ACCOUNTS, 4)
    monkeypatch.setattr("django_dbqueue.engine.limit_sweeps.LONGEST_SWEEP", 0.0)

    assert direct.reserve_times()
    assert not direct.reserve_times()

    assert Job.objects.scheduled().count() == 3 * len(ACCOUNTS)


def test_fast_rates_of_many_keys_share_what_is_reserved_together(claim, monkeypatch):
    wait_for_rates(claim, "abcd", 8)
    monkeypatch.setattr("django_dbqueue.engine.unblock.MOST_STARTS", 8)

    direct.reserve_times()
    assert Counter(Job.objects.scheduled().values_list("args__0", flat=True)) == Counter("abcd" * 2)

    direct.reserve_times()
    assert Counter(Job.objects.scheduled().values_list("args__0", flat=True)) == Counter("abcd" * 4)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="It locks no rows.")
def test_reservation_waits_for_no_rate_that_others_have_locked(claim):
    wait_for_rates(claim, "ab", 3)
    first = Semaphore.objects.filter(booked__isnull=False).order_by("pk")[:1]

    with held_open(lambda: list(first.select_for_update())):
        direct.reserve_times()
        assert Job.objects.scheduled().count() == 2

    direct.reserve_times()
    assert Job.objects.scheduled().count() == 4


def test_settlement_unblocks_as_many_jobs_as_it_frees_slots(claim):
    """The other slot of the limit belongs to a job that is ready, and not claimed yet."""
    charge.enqueue_many([("a", number) for number in range(6)])
    first, second = claim()
    settle(first)
    assert states_of("a").count(State.READY) == 1

    settle(second)

    assert states_of("a").count(State.READY) == 2


def test_sweep_unblocks_no_more_jobs_than_the_ready_ones_leave_slots(claim):
    charge.enqueue_many([("a", number) for number in range(6)])
    settle(*claim())
    assert states_of("a").count(State.READY) == 2

    assert direct.sweep(10) == []

    Job.objects.ready().discard()
    assert len(direct.sweep(10)) == 2


def test_sweep_unblocks_jobs_beside_one_that_stays_ready_for_long(claim, monkeypatch):
    """Such a job may have a row that a transaction of the project has locked."""
    charge.enqueue_many([("a", number) for number in range(6)])
    settle(*claim())
    ready = ReadyJobs("default")
    assert sweep("default", 10, ready) == []

    monkeypatch.setattr(ReadyJobs, "STUCK", 0.0)
    assert len(sweep("default", 10, ready)) == 2


def test_sweep_unblocks_a_job_of_a_higher_priority_beside_ready_ones(claim):
    charge.enqueue_many([("a", number) for number in range(6)])
    settle(*claim())
    urgent = charge.using(priority=9).enqueue("a", 100)
    assert states_of("a").count(State.READY) == 2
    assert Job.objects.get(pk=urgent.id).state == State.BLOCKED

    direct.sweep(10)

    assert Job.objects.get(pk=urgent.id).state == State.READY


def test_ready_job_with_unreadable_limits_stops_no_sweep(claim):
    charge.enqueue_many([("a", number) for number in range(6)])
    settle(*claim())
    Job.objects.ready().discard()
    other = charge.enqueue("b", 0)
    Job.objects.filter(pk=other.id).update(limits=[{"max_running": "many"}])

    assert len(direct.sweep(10)) == 2


@pytest.mark.skipif(connection.vendor == "sqlite", reason="It locks no rows.")
def test_sweep_waits_for_no_semaphore_that_others_have_locked(claim):
    charge.enqueue_many([(account, number) for number in range(6) for account in "ab"])
    settle(*claim())
    Job.objects.ready().discard()
    locked = Semaphore.objects.filter(pk=_key("a"))

    with held_open(lambda: list(locked.select_for_update())):
        assert direct.sweep(10) == ["default"] * 2
        assert (states_of("a").count(State.READY), states_of("b").count(State.READY)) == (0, 2)

    direct.sweep(10)
    assert states_of("a").count(State.READY) == 2


def test_first_job_of_a_key_that_is_not_served_holds_up_no_others(claim):
    Queue.objects.ensure_rows(["paused"])
    charge.enqueue_many([(account, 0) for account in "aabb"])
    jobs = claim()
    charge.using(queue_name="paused").enqueue("a", 2)
    charge.enqueue_many([("a", 3), ("a", 4), ("b", 2)])
    for account in "ab":
        Job.objects.ready().filter(args__0=account).update(
            state=State.BLOCKED, blocked_by=_key(account)
        )
    Queue.objects.filter(name="paused").pause()

    settle(*jobs)

    # The first two of account a are the paused job and the one behind it.
    for args in (["a", 3], ["a", 4], ["b", 2]):
        assert Job.objects.get(args=args).state == State.READY


def test_first_waiting_jobs_are_those_of_each_key_in_order(claim):
    keys = ["k", "K", "k ", "ḱ", "k\u0301", "100%", "%s"]
    charge.enqueue_many([(key, number) for number in range(4) for key in keys])
    with transaction.atomic():
        claim()
        Job.objects.filter(args=["K", 3]).update(priority=5)
        found = Job.objects.first_in_line(dict.fromkeys(map(_key, keys), 2))

    numbers = dict(Job.objects.values_list("pk", "args"))
    assert {key: [numbers[pk][1] for pk in ids] for key, ids in found.items()} == {
        **{_key(key): [2, 3] for key in keys},
        _key("K"): [3, 2],
    }
    assert Job.objects.first_in_line({}) == {}
    assert Job.objects.first_in_line({"unknown": 3}) == {}


def _key(account):
    return f"tests.tasks.charge account={account}"
