"""Batch membership: failed, pruned and keyed members, nested entry and abandoned batches."""

from __future__ import annotations

import logging
import threading

import pytest
from django.db import connection, connections, transaction

from django_dbqueue import FanOut, batch, pipeline
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.engine.dispatch import fetch_pending
from django_dbqueue.exceptions import BatchFinished
from django_dbqueue.models import Batch, BatchShare, Execution, Job
from django_dbqueue.models.expressions import Now, now_plus
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus
from django_dbqueue.runtime.worker.pipeline_step import after_stage
from django_dbqueue.testing import drain

from .. import direct
from ..conftest import LONG
from ..tasks import add, add_and_fail_once, brew, fail, rejoice, sort_out, sum_up
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


# Opener and other adders


def test_member_adding_jobs_does_not_seal_open_batch(claim):
    with batch(**BOTH) as opened:
        add.enqueue(1)
        settle(*claim())
        with batch.of(opened.id):
            pass
        assert finish() == []
        add.enqueue(2)
    settle(*claim())

    assert finish() == SUCCESSFUL


def test_error_in_adder_discards_only_its_own_jobs(claim):
    with batch(**BOTH) as opened:
        kept = add.enqueue(1)
        with pytest.raises(ZeroDivisionError), batch.of(opened.id):
            dropped = add.enqueue(2)
            raise ZeroDivisionError

    assert [Job.objects.get(pk=each.id).state for each in (kept, dropped)] == [
        State.READY,
        State.DISCARDED,
    ]


def test_jobs_discarded_with_failed_adder_do_not_count_as_failed():
    with batch(**BOTH) as opened:
        add_and_fail_once.enqueue()
    Job.objects.update(run_after=Now())
    drain()
    Job.objects.update(run_after=Now())
    drain()

    assert opened.progress()["successful"] == 2
    assert Batch.objects.get().finished_at is not None
    assert callbacks() == SUCCESSFUL


def test_nested_entry_seals_batch_at_outer_exit(claim):
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
    Batch.objects.update(opened_until=now_plus(-1))

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


def test_live_opener_reopens_abandoned_batch(backend):
    with batch(**BOTH) as opened:
        add.enqueue(1)
        Batch.objects.update(opened_until=now_plus(-1))
        assert direct.seal_abandoned() == [opened.id]
        add.enqueue(2)
    assert not Batch.objects.get().is_abandoned
    drain()

    assert callbacks() == SUCCESSFUL


def test_adding_jobs_renews_opener_lease():
    with batch(**BOTH):
        Batch.objects.update(opened_until=now_plus(-1))
        add.enqueue(1)

        assert direct.seal_abandoned() == []


# Members pruned or retried before the batch finishes


@pytest.mark.parametrize("state", [State.FAILED, State.DISCARDED])
def test_pruned_failed_member_still_counts_as_failed(claim, state):
    with batch(**BOTH):
        add.enqueue_many([(1,), (2,)])
    first, second = claim()
    settle(first, state=state)
    Job.objects.filter(pk=first.pk).update(finished_at=now_plus(-60))
    assert direct.prune_jobs([state], 10, 100) == 1

    settle(second)

    assert finish() == ENDED


def test_pruned_successful_member_does_not_count_as_failed(claim):
    with batch(**BOTH):
        add.enqueue_many([(1,), (2,)])
    first, second = claim()
    settle(first)
    Job.objects.filter(pk=first.pk).update(finished_at=now_plus(-60))
    direct.prune_jobs([State.SUCCESSFUL], 10, 100)
    settle(second)

    assert finish() == SUCCESSFUL


def test_retried_member_counts_with_its_final_outcome(claim):
    with batch(**BOTH):
        add.enqueue_many([(1,), (2,)])
    first, second = claim()
    settle(first, state=State.FAILED)
    Job.objects.filter(pk=first.pk).retry()
    settle(second, *claim())

    assert finish() == SUCCESSFUL


# Members with unique keys


def test_outside_enqueue_of_key_keeps_waiting_member_in_batch(claim):
    with batch(**BOTH):
        keyed.enqueue(1)
    keyed.enqueue(2)

    assert finish() == []
    settle(*claim())
    assert finish() == SUCCESSFUL


@pytest.mark.parametrize(
    ("state", "follows"), [(State.SUCCESSFUL, SUCCESSFUL), (State.FAILED, ENDED)]
)
def test_outside_enqueue_of_key_keeps_running_member_until_it_ends(claim, state, follows):
    with batch(**BOTH):
        keyed.enqueue(1)
    (job,) = claim()
    keyed.enqueue(2)

    assert finish() == []
    settle(job, state=state)
    assert Job.objects.get(pk=job.pk).state == State.READY
    assert finish() == follows


@pytest.mark.parametrize("state", [State.FAILED, State.DISCARDED])
def test_outside_enqueue_of_key_keeps_failure_of_member(claim, state):
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
def test_two_batches_with_one_waiting_key_share_its_run(claim, state):
    for number in (1, 2):
        with batch(**BOTH):
            keyed.enqueue(number)
    assert finish() == []
    settle(*claim(), state=state)

    assert finish() == sorted(2 * (SUCCESSFUL if state == State.SUCCESSFUL else ENDED))


def test_run_belongs_to_first_batch_and_rerun_to_second(claim):
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


def test_retried_and_reenqueued_member_keeps_batch_open(claim):
    with batch(**BOTH):
        keyed.enqueue(1)
    (job,) = claim()
    keyed.enqueue(2)
    settle(job, state=State.READY)
    assert finish() == []
    settle(*claim(), state=State.FAILED)
    keyed.enqueue(3)

    assert finish() == ENDED


def test_discard_of_batch_takes_back_requested_rerun(claim):
    with batch(**BOTH) as discarded:
        keyed.enqueue(1)
    (job,) = claim()
    with batch.of(discarded.id):
        keyed.enqueue(2)

    assert discarded.discard() == 1
    settle(job)

    assert Job.objects.get().state == State.SUCCESSFUL
    assert finish() == ENDED


def test_discard_of_batch_leaves_rerun_of_another_batch(claim):
    with batch(**BOTH) as first:
        keyed.enqueue(1)
    (job,) = claim()
    with batch(**BOTH):
        keyed.enqueue(2)

    assert first.discard() == 0
    settle(job)

    assert Job.objects.get().state == State.READY
    assert finish() == SUCCESSFUL


def test_discarded_rerun_counts_as_failed_for_each_batch_that_waits_for_it(claim):
    keyed.enqueue(1)
    (job,) = claim()
    for number in (2, 3):
        with batch(**BOTH) as last:
            keyed.enqueue(number)

    assert last.discard() == 1
    settle(job)

    assert finish() == [*ENDED, *ENDED]


@pytest.mark.parametrize("then", ["discard", "retry"])
@pytest.mark.parametrize("state", [State.SUCCESSFUL, State.DISCARDED])
def test_rerun_taken_back_by_a_stop_counts_as_failed_for_each_batch(claim, then, state):
    keyed.enqueue(1)
    (job,) = claim()
    for number in (2, 3):
        with batch(**BOTH):
            keyed.enqueue(number)

    assert Job.objects.stop(then) == 1
    settle(job, state=state)

    if then == "discard":
        assert finish() == [*ENDED, *ENDED]
    else:
        assert finish() == []
        settle(*claim())
        assert finish() == sorted(2 * SUCCESSFUL)


def test_stop_counts_for_batch_of_the_run_once_it_has_ended(claim):
    with batch(**BOTH):
        keyed.enqueue(1)
    (job,) = claim()
    keyed.enqueue(2)

    assert Job.objects.stop() == 1
    settle(job)

    assert finish() == SUCCESSFUL


# Callbacks and transactions


def test_invalid_callback_does_not_block_other_batches(claim, caplog):
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


def test_error_in_transaction_rolls_back_batch_and_jobs():
    with pytest.raises(ZeroDivisionError), transaction.atomic(), batch(**BOTH):
        fail.enqueue()
        raise ZeroDivisionError

    assert (Batch.objects.count(), Job.objects.count()) == (0, 0)
    assert connection.in_atomic_block is False


def test_settle_of_shared_member_does_not_wait_for_open_transaction(claim):
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


def test_transaction_goes_on_after_batch_finished():
    with batch() as done:
        pass
    with transaction.atomic():
        with pytest.raises(BatchFinished), batch.of(done.id):
            add.enqueue(1)
        add.enqueue(2)

    assert Job.objects.get().args == [2]


# An opener that fails


def test_failed_opener_leaves_job_that_waited_before():
    keyed.enqueue(1)
    with pytest.raises(LookupError), batch(**BOTH):
        keyed.enqueue(2)
        keyed.enqueue(3)
        raise LookupError

    job = Job.objects.get()
    assert (job.state, job.args, job.batch_id) == (State.READY, [3], None)


def test_failed_opener_leaves_run_that_another_batch_waits_for(claim):
    with batch(**BOTH):
        keyed.enqueue(1)
    with pytest.raises(LookupError), batch():
        keyed.enqueue(2)
        raise LookupError
    assert finish() == []
    settle(*claim())

    assert finish() == SUCCESSFUL


def test_failed_opener_discards_run_that_it_has_enqueued():
    with pytest.raises(LookupError), batch():
        keyed.enqueue(1)
        keyed.enqueue(2)
        raise LookupError

    assert Job.objects.get().state == State.DISCARDED


def test_failed_opener_takes_back_rerun_that_it_has_requested(claim):
    keyed.enqueue(1)
    (job,) = claim()
    with pytest.raises(LookupError), batch(**BOTH):
        keyed.enqueue(2)
        keyed.enqueue(3)
        raise LookupError
    settle(job)

    assert Job.objects.get().state == State.SUCCESSFUL
    assert finish() == []


def test_failed_opener_leaves_rerun_that_was_requested_before(claim):
    keyed.enqueue(1)
    (job,) = claim()
    keyed.enqueue(2)
    with pytest.raises(LookupError), batch(**BOTH):
        keyed.enqueue(3)
        raise LookupError
    settle(job)

    job = Job.objects.get()
    assert (job.state, job.args, job.batch_id) == (State.READY, [3], None)


# Pipelines with a key


def end_stage(job, value, backend):
    """Settle a stage that has returned a value."""
    direct.settle(
        [AttemptResult.of(job, Execution.Outcome.SUCCESSFUL, **after_stage(job, value, backend))]
    )


@pytest.mark.parametrize("value", ["ground", FanOut(["a", "b"])])
def test_batch_waits_for_run_that_replaces_one_cut_off_between_stages(claim, backend, value):
    line = pipeline(sort_out, brew).using(key="line")
    with batch(**BOTH):
        line.enqueue("a")
    (job,) = claim()
    line.enqueue("b")
    end_stage(job, value, backend)
    assert finish() == []
    for value in ("ground", "brewed"):
        end_stage(*claim(), value, backend)

    assert finish() == SUCCESSFUL


def test_both_batches_of_a_run_wait_for_the_jobs_that_it_fans_out_to(claim, backend):
    line = pipeline(sort_out, brew).using(key="line")
    for _ in range(2):
        with batch(**BOTH):
            line.enqueue("fan out")
    end_stage(*claim(), FanOut(["a", "b"]), backend)
    assert finish() == []
    settle(*claim(), state=State.FAILED)

    assert finish() == [*ENDED, *ENDED]


# Retention


def test_shares_are_pruned_with_their_batch(claim):
    with batch(**BOTH):
        fail.enqueue()
    settle(*claim(), state=State.FAILED)
    finish()
    settle(*claim())
    Job.objects.filter(task=fail.module_path).update(finished_at=now_plus(-100))
    Batch.objects.update(finished_at=now_plus(-100))

    direct.prune_jobs([State.FAILED], 10, 100)
    direct.prune_batches(10)

    assert not Batch.objects.exists()
    assert not BatchShare.objects.exists()


@pytest.fixture(params=["on_finish", "on_success"])
def finished(request, claim) -> batch:
    """A batch without jobs whose callback waits."""
    with batch(**{request.param: BOTH[request.param]}) as opened:
        add.enqueue(1)
    settle(*claim())
    finish()
    Job.objects.filter(task=add.module_path).delete()
    Batch.objects.update(finished_at=now_plus(-100))
    return opened


def is_kept() -> bool:
    direct.prune_batches(10)
    return Batch.objects.exists()


def test_batch_is_kept_until_its_callback_was_successful(finished, claim):
    assert is_kept(), "ready"
    (callback,) = claim()
    assert is_kept(), "running"
    settle(callback, state=State.FAILED)
    assert is_kept(), "failed"
    Job.objects.failed().retry()
    assert is_kept(), "retried"
    settle(*claim())

    assert not is_kept()


def test_batch_is_kept_until_its_failed_callback_is_pruned(finished, claim):
    settle(*claim(), state=State.FAILED)
    assert is_kept()
    Job.objects.update(finished_at=now_plus(-100))
    direct.prune_jobs([State.FAILED], 10, 100)

    assert not is_kept()
