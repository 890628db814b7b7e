"""When a batch finishes, and whether all of it was successful: members that fail, are pruned, share a key, or lose their opener."""

from __future__ import annotations

import logging
import threading

import pytest
from django.db import connection, connections, transaction

from django_dbqueue import batch
from django_dbqueue.engine.dispatch import fetch_pending
from django_dbqueue.exceptions import BatchFinished
from django_dbqueue.models import Batch, Job
from django_dbqueue.models.expressions import Now, after
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.testing import drain

from .. import direct
from ..conftest import LONG
from ..tasks import add, add_and_fail_once, fail, rejoice, sum_up
from .test_batches import callbacks, settle

pytestmark = pytest.mark.django_db(transaction=True)
State = Job.State
BOTH = {"on_finish": sum_up, "on_success": rejoice}
ENDED = ["tests.tasks.sum_up"]
SUCCESSFUL = ["tests.tasks.rejoice", "tests.tasks.sum_up"]
keyed = add.using(key="one")


def finish() -> list[str]:
    direct.finish_batches()
    return callbacks()


# The opener and the others.


def test_a_member_that_adds_jobs_does_not_seal_the_batch_of_its_opener(claim):
    with batch(**BOTH) as opened:
        add.enqueue(1)
        settle(*claim())
        with batch.of(opened.id):
            pass
        assert finish() == []
        add.enqueue(2)
    settle(*claim())

    assert finish() == SUCCESSFUL


def test_a_member_that_fails_while_it_adds_discards_only_what_it_added(claim):
    with batch(**BOTH) as opened:
        kept = add.enqueue(1)
        with pytest.raises(ZeroDivisionError), batch.of(opened.id):
            dropped = add.enqueue(2)
            raise ZeroDivisionError

    assert [Job.objects.get(pk=each.id).state for each in (kept, dropped)] == [
        State.READY,
        State.DISCARDED,
    ]


def test_a_job_that_was_discarded_with_its_failed_adder_does_not_count_as_a_failed_member():
    with batch(**BOTH) as opened:
        add_and_fail_once.enqueue()
    Job.objects.update(run_after=Now())
    drain()
    Job.objects.update(run_after=Now())
    drain()

    assert opened.progress()["successful"] == 2
    assert Batch.objects.get().finished_at is not None
    assert callbacks() == SUCCESSFUL


def test_a_batch_entered_twice_by_its_opener_is_sealed_at_the_outer_end(claim):
    with batch(**BOTH) as opened:
        with opened:
            add.enqueue(1)
        settle(*claim())
        assert finish() == []
        add.enqueue(2)


def test_abandoned_batch_is_sealed_by_the_dispatcher_and_logged(backend, claim, caplog):
    opened = batch(**BOTH)
    opened.__enter__()
    add.enqueue(1)
    settle(*claim())
    assert finish() == []
    Batch.objects.update(opened_until=after(-1))

    with caplog.at_level(logging.WARNING, "django_dbqueue"):
        Dispatcher(backend, backend.config, SharedStatus.private(1))._sweep(
            fetch_pending("default")
        )

    assert "abandoned" in caplog.text
    assert str(opened.id) in caplog.text
    assert Batch.objects.get().is_abandoned
    assert callbacks() == ENDED
    with pytest.raises(BatchFinished):
        add.enqueue(2)
    opened.__exit__(None, None, None)


def test_opener_that_lives_takes_an_abandoned_batch_back(backend):
    with batch(**BOTH) as opened:
        add.enqueue(1)
        Batch.objects.update(opened_until=after(-1))
        assert direct.seal_abandoned() == [opened.id]
        add.enqueue(2)
    assert not Batch.objects.get().is_abandoned
    drain()

    assert callbacks() == SUCCESSFUL


def test_opener_that_adds_jobs_renews_its_lease():
    with batch(**BOTH):
        Batch.objects.update(opened_until=after(-1))
        add.enqueue(1)

        assert direct.seal_abandoned() == []


# Outcomes that are gone before the end.


@pytest.mark.parametrize("state", [State.FAILED, State.DISCARDED])
def test_a_failed_member_that_was_pruned_still_counts(claim, state):
    with batch(**BOTH):
        add.enqueue_many([(1,), (2,)])
    first, second = claim()
    settle(first, state=state)
    Job.objects.filter(pk=first.pk).update(finished_at=after(-60))
    assert direct.prune_jobs([state], 10, 100) == 1

    settle(second)

    assert finish() == ENDED


def test_a_successful_member_that_was_pruned_or_erased_does_not_count_as_failed(claim):
    with batch(**BOTH):
        add.enqueue_many([(1,), (2,)])
    first, second = claim()
    settle(first)
    Job.objects.filter(pk=first.pk).update(finished_at=after(-60))
    direct.prune_jobs([State.SUCCESSFUL], 10, 100)
    settle(second)

    assert finish() == SUCCESSFUL


def test_a_failed_member_that_an_operator_retries_in_time_counts_as_it_ends(claim):
    with batch(**BOTH):
        add.enqueue_many([(1,), (2,)])
    first, second = claim()
    settle(first, state=State.FAILED)
    Job.objects.filter(pk=first.pk).retry()
    settle(second, *claim())

    assert finish() == SUCCESSFUL


# Keys that others ask for.


def test_keyed_call_from_outside_leaves_a_waiting_member_in_its_batch(claim):
    with batch(**BOTH):
        keyed.enqueue(1)
    keyed.enqueue(2)

    assert finish() == []
    settle(*claim())
    assert finish() == SUCCESSFUL


@pytest.mark.parametrize(
    ("state", "follows"), [(State.SUCCESSFUL, SUCCESSFUL), (State.FAILED, ENDED)]
)
def test_keyed_call_from_outside_leaves_a_running_member_in_its_batch_until_it_has_ended(
    claim, state, follows
):
    with batch(**BOTH):
        keyed.enqueue(1)
    (job,) = claim()
    keyed.enqueue(2)

    assert finish() == []
    settle(job, state=state)
    assert Job.objects.get(pk=job.pk).state == State.READY
    assert finish() == follows


@pytest.mark.parametrize("state", [State.FAILED, State.DISCARDED])
def test_keyed_call_from_outside_does_not_undo_the_failure_of_a_member(claim, state):
    with batch(**BOTH):
        keyed.enqueue(1)
        add.enqueue(2)
    jobs = {job.key: job for job in claim()}
    settle(jobs.pop(f"{add.module_path} one"), state=state)
    keyed.enqueue(2)
    settle(*claim())
    assert finish() == []
    settle(*jobs.values())

    assert finish() == ENDED


@pytest.mark.parametrize("state", [State.SUCCESSFUL, State.FAILED])
def test_two_batches_that_ask_for_one_waiting_key_both_wait_for_its_run(claim, state):
    for number in (1, 2):
        with batch(**BOTH):
            keyed.enqueue(number)
    assert finish() == []
    settle(*claim(), state=state)

    assert finish() == sorted(2 * (SUCCESSFUL if state == State.SUCCESSFUL else ENDED))


def test_of_two_batches_the_run_belongs_to_the_first_and_the_rerun_to_the_second(claim):
    with batch(**BOTH) as first:
        keyed.enqueue(1)
    (job,) = claim()
    with batch(**BOTH) as second:
        keyed.enqueue(2)
    assert finish() == []
    settle(job, state=State.FAILED)

    assert finish() == ENDED
    assert Batch.objects.get(pk=first.id).finished_at
    assert not Batch.objects.get(pk=second.id).finished_at
    settle(*claim())
    assert finish() == sorted([*ENDED, *SUCCESSFUL])


def test_member_whose_run_is_tried_again_holds_both_batches_until_it_has_ended(claim):
    with batch(**BOTH):
        keyed.enqueue(1)
    (job,) = claim()
    keyed.enqueue(2)
    settle(job, state=State.READY)
    assert finish() == []
    settle(*claim(), state=State.FAILED)
    keyed.enqueue(3)

    assert finish() == ENDED


# What follows.


def test_refused_callback_does_not_hold_up_other_batches(claim, caplog):
    for _ in range(2):
        with batch(on_finish=sum_up):
            add.enqueue(1)
    bad = Batch.objects.order_by("pk").first()
    bad.on_finish["priority"] = 1000
    bad.save()
    settle(*claim())

    assert finish() == ENDED
    assert f"batch {bad.pk}" in caplog.text
    assert Batch.objects.get(pk=bad.pk).finished_at is None
    bad.on_finish["priority"] = 0
    bad.save()
    assert finish() == [*ENDED, *ENDED]


def test_error_of_the_opener_in_a_transaction_leaves_nothing():
    with pytest.raises(ZeroDivisionError), transaction.atomic(), batch(**BOTH):
        fail.enqueue()
        raise ZeroDivisionError

    assert (Batch.objects.count(), Job.objects.count()) == (0, 0)
    assert connection.in_atomic_block is False


def test_settling_a_member_that_others_share_does_not_wait_for_an_open_enqueuer(claim):
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")
    with batch(**BOTH) as opened:
        keyed.enqueue(1)
    (job,) = claim()
    keyed.enqueue(2)
    added, go_on = threading.Event(), threading.Event()

    def adder():
        with transaction.atomic(), batch.of(opened.id):
            add.enqueue(3)
            added.set()
            go_on.wait(LONG)
        connections.close_all()

    thread = threading.Thread(target=adder)
    thread.start()
    assert added.wait(LONG)
    written = settle(job, state=State.FAILED).written
    go_on.set()
    thread.join()

    assert len(written) == 1
    settle(*claim())
    assert finish() == ENDED
