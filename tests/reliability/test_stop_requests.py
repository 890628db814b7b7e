"""An operator's stop belongs to the job: no earlier run continues, however the attempt ends."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_dbqueue import batch, pipeline
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Batch, Execution, Job
from django_dbqueue.models.enums import Outcome, State

from .. import direct, tasks

pytestmark = pytest.mark.django_db(transaction=True)


def settle(job, outcome, state, **rest):
    return direct.settle([AttemptResult.of(job, outcome, state, **rest)])


@pytest.mark.parametrize(
    ("outcome", "state", "wait"),
    [
        (Outcome.FAILED, State.SCHEDULED, 60.0),
        (Outcome.FAILED, State.READY, 0.0),
        (Outcome.INTERRUPTED, State.READY, 0.0),
        (Outcome.SNOOZED, State.SCHEDULED, 60.0),
        (Outcome.LOST, State.SCHEDULED, 1.0),
    ],
)
def test_stopped_job_is_discarded_instead_of_retried(claim, outcome, state, wait):
    tasks.nothing.enqueue()
    (job,) = claim()
    assert Job.objects.stop() == 1

    settle(job, outcome, state, wait=wait)

    found = Job.objects.get()
    assert (found.state, found.process_id, found.finished_at is not None) == (
        State.DISCARDED,
        None,
        True,
    )
    assert Execution.objects.get().outcome == outcome


def test_stopped_job_that_succeeds_is_successful(claim):
    tasks.nothing.enqueue()
    (job,) = claim()
    Job.objects.stop()

    settle(job, Outcome.SUCCESSFUL, State.SUCCESSFUL, result=1)

    assert (Job.objects.get().state, Job.objects.get().result) == (State.SUCCESSFUL, 1)


def test_stopped_job_is_discarded_by_release(claim):
    tasks.nothing.enqueue_many([()] * 2)
    stopped, other = claim()
    Job.objects.filter(pk=stopped.pk).stop()

    assert direct.release([stopped, other]) == {stopped.pk, other.pk}

    stopped.refresh_from_db(), other.refresh_from_db()
    assert (stopped.state, stopped.finished_at is not None) == (State.DISCARDED, True)
    assert (other.state, other.finished_at) == (State.READY, None)


def test_stopped_pipeline_does_not_enter_its_next_stage(claim):
    pipeline(tasks.grind, tasks.pour).enqueue("beans")
    (job,) = claim()
    Job.objects.stop()
    following = job.copy(job.pk)
    following.stage, following.task = 1, tasks.pour.module_path

    settled = settle(job, Outcome.SUCCESSFUL, State.READY, then=following)

    assert (Job.objects.get().state, Job.objects.get().stage) == (State.DISCARDED, 0)
    assert settled.written[0].new == []


def test_stopped_job_runs_after_operator_retry(claim):
    tasks.nothing.enqueue()
    (job,) = claim()
    Job.objects.stop()
    direct.release([job])

    assert Job.objects.retry() == 1
    (job,) = claim()
    settle(job, Outcome.FAILED, State.SCHEDULED, wait=60.0)

    assert Job.objects.get().state == State.SCHEDULED


def test_stop_discards_reruns_enqueued_before_it_only(claim):
    tasks.index_document.using(key="a").enqueue(1)
    (job,) = claim()
    tasks.index_document.using(key="a").enqueue(2)
    Job.objects.stop()
    settle(job, Outcome.FAILED, State.READY)
    assert Job.objects.get().state == State.DISCARDED

    Job.objects.retry()
    (job,) = claim()
    Job.objects.stop()
    tasks.index_document.using(key="a").enqueue(3)
    settle(job, Outcome.FAILED, State.READY)

    assert (Job.objects.get().state, Job.objects.get().args) == (State.READY, [3])
    (job,) = claim()
    settle(job, Outcome.FAILED, State.READY)
    assert Job.objects.get().state == State.READY


def test_call_after_stop_runs_after_release(claim):
    tasks.index_document.using(key="a").enqueue(1)
    (job,) = claim()
    Job.objects.stop()
    tasks.index_document.using(key="a").enqueue(2)

    assert direct.release([job]) == {job.pk}

    found = Job.objects.get()
    assert (found.state, found.args, found.stop_requested_at, found.finished_at) == (
        State.READY,
        [2],
        None,
        None,
    )
    assert claim()[0].args == [2]


class TestStopAndRetry:
    @pytest.mark.parametrize(
        ("outcome", "state", "wait"),
        [
            (Outcome.STOPPED, State.READY, 0.0),
            (Outcome.DISCARDED, State.DISCARDED, 0.0),
            (Outcome.FAILED, State.SCHEDULED, 60.0),
            (Outcome.FAILED, State.FAILED, 0.0),
            (Outcome.TIMED_OUT, State.FAILED, 0.0),
            (Outcome.INTERRUPTED, State.READY, 0.0),
            (Outcome.SNOOZED, State.SCHEDULED, 60.0),
            (Outcome.LOST, State.FAILED, 0.0),
        ],
    )
    def test_job_is_ready_with_all_its_attempts(self, claim, outcome, state, wait):
        tasks.nothing.using(expires=timedelta(seconds=1)).enqueue()
        Job.objects.update(failures=1, attempt=1)
        (job,) = claim()
        assert Job.objects.stop(then="retry") == 1

        settled = settle(job, outcome, state, wait=wait)

        found = Job.objects.get()
        assert (found.state, found.failures, found.expires_at) == (State.READY, 0, None)
        assert (found.stop_requested_at, found.retry_requested) == (None, False)
        assert (found.process_id, found.finished_at) == (None, None)
        assert Execution.objects.get().outcome == outcome
        assert settled.written[0].state == State.READY

    def test_success_that_comes_first_counts(self, claim):
        tasks.nothing.enqueue()
        (job,) = claim()
        Job.objects.stop(then="retry")

        settle(job, Outcome.SUCCESSFUL, State.SUCCESSFUL, result=1)

        found = Job.objects.get()
        assert (found.state, found.result, found.retry_requested) == (State.SUCCESSFUL, 1, False)

    def test_stage_that_succeeds_first_is_not_repeated(self, claim):
        pipeline(tasks.grind, tasks.pour).enqueue("beans")
        (job,) = claim()
        Job.objects.stop(then="retry")
        following = job.copy(job.pk)
        following.stage, following.task = 1, tasks.pour.module_path

        settle(job, Outcome.SUCCESSFUL, State.READY, then=following)

        found = Job.objects.get()
        assert (found.state, found.stage, found.stop_requested_at) == (State.READY, 1, None)

    def test_job_that_was_not_started_is_ready_after_release(self, claim):
        tasks.nothing.enqueue()
        (job,) = claim()
        Job.objects.stop(then="retry")

        assert direct.release([job]) == {job.pk}

        found = Job.objects.get()
        assert (found.state, found.stop_requested_at, found.finished_at) == (
            State.READY,
            None,
            None,
        )
        (job,) = claim()
        settle(job, Outcome.FAILED, State.SCHEDULED, wait=60.0)
        assert Job.objects.get().state == State.SCHEDULED

    def test_call_after_the_stop_replaces_the_retry(self, claim):
        tasks.index_document.using(key="a").enqueue(1)
        (job,) = claim()
        Job.objects.stop(then="retry")
        tasks.index_document.using(key="a").enqueue(2)

        settle(job, Outcome.STOPPED, State.READY)

        found = Job.objects.get()
        assert (found.state, found.args, found.retry_requested) == (State.READY, [2], False)

    @pytest.mark.parametrize(
        ("outcome", "state"),
        [(Outcome.STOPPED, State.READY), (Outcome.SUCCESSFUL, State.SUCCESSFUL)],
    )
    def test_call_before_the_stop_still_runs(self, claim, outcome, state):
        tasks.index_document.using(key="a").enqueue(1)
        (job,) = claim()
        tasks.index_document.using(key="a").enqueue(2)
        Job.objects.stop(then="retry")

        settle(job, outcome, state)

        found = Job.objects.get()
        assert (found.state, found.args, found.stop_requested_at) == (State.READY, [2], None)

    def test_slot_of_the_job_is_released(self, claim):
        for _ in range(3):
            tasks.occupy.enqueue("a", 0)
        running = claim()
        assert len(running) == 2
        Job.objects.filter(pk=running[0].pk).stop(then="retry")

        settle(running[0], Outcome.STOPPED, State.READY)

        assert len(claim()) == 1

    def test_batch_waits_for_the_retry(self, claim):
        with batch(on_success=tasks.add) as opened:
            tasks.nothing.enqueue()
        (job,) = claim()
        Job.objects.stop(then="retry")
        settle(job, Outcome.STOPPED, State.READY)
        direct.finish_batches([opened.id])
        assert Batch.objects.get().finished_at is None

        (job,) = claim()
        settle(job, Outcome.SUCCESSFUL, State.SUCCESSFUL)
        direct.finish_batches([opened.id])

        assert Batch.objects.get().finished_at is not None
        assert Job.objects.filter(task=tasks.add.module_path).exists()

    @pytest.mark.parametrize("then", ["run", None, True])
    def test_unknown_consequence_is_refused(self, claim, then):
        tasks.nothing.enqueue()
        claim()

        with pytest.raises(ValueError, match='is neither "discard" nor "retry"'):
            Job.objects.stop(then=then)

        assert Job.objects.get().stop_requested_at is None
