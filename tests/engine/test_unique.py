"""Unique jobs: one row per key, and no enqueue is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier, Thread

import pytest
from django.db import IntegrityError, connection, connections, transaction

from django_dbqueue import batch, pipeline, task
from django_dbqueue.compat import InvalidTask
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.models import Batch, BatchShare, Execution, Job
from django_dbqueue.testing import drain

from .. import direct
from ..conftest import BOTH, LONG
from ..tasks import add, add_newest, index_document, leave_no_trace

pytestmark = pytest.mark.django_db(transaction=True, databases=BOTH)
State = Job.State


def keyed(key="a", **settings):
    return add.using(key=key, **settings)


def settle(job, outcome=Execution.Outcome.SUCCESSFUL, state=State.SUCCESSFUL, **rest):
    return direct.settle([AttemptResult.of(job, outcome, state, **rest)])


def the_job() -> Job:
    return Job.objects.get()


def test_same_key_merges_into_one_row():
    first, second = keyed().enqueue(1), keyed().enqueue(2)

    assert (first.enqueued, second.enqueued) == ("created", "merged")
    assert first.id == second.id
    assert (the_job().state, the_job().args) == (State.READY, [2])


def test_database_refuses_second_row_for_key():
    keyed().enqueue(1)

    with pytest.raises(IntegrityError), transaction.atomic():
        Job.objects.create(task="tests.tasks.add", queue="default", key=the_job().key)


def test_jobs_with_other_key_or_task_are_separate():
    for each in (add, add, keyed("a"), keyed("b"), index_document.using(key="a")):
        each.enqueue(1)

    assert Job.objects.count() == 5


def test_running_job_reruns_once_after_several_enqueues(claim):
    keyed().enqueue(1)
    (running,) = claim()

    fates = [keyed().enqueue(number).enqueued for number in (2, 3, 4)]

    assert fates == ["merged"] * 3
    assert the_job().state == State.RUNNING
    settle(running, result=1)
    assert (the_job().state, the_job().args, the_job().failures) == (State.READY, [4], 0)
    (running,) = claim()
    settle(running, result=4)
    assert (the_job().state, the_job().result) == (State.SUCCESSFUL, 4)


@pytest.mark.parametrize("end", [State.FAILED, State.DISCARDED])
def test_failed_or_discarded_job_reruns_if_reenqueued_meanwhile(claim, end):
    keyed().enqueue(1)
    (running,) = claim()
    keyed().enqueue(2)

    settle(running, Execution.Outcome.FAILED, end)

    assert (the_job().state, the_job().args, the_job().failures, the_job().finished_at) == (
        State.READY,
        [2],
        0,
        None,
    )


def test_reenqueued_job_is_not_deleted_on_success(claim):
    keyed().enqueue(1)
    (running,) = claim()
    keyed().enqueue(2)

    settle(running, erase=True)

    assert the_job().state == State.READY


def test_finished_job_reruns_with_fresh_attempts(claim):
    first = keyed().enqueue(1)
    (job,) = claim()
    settle(job, Execution.Outcome.FAILED, State.FAILED)

    again = keyed().enqueue(2)

    assert (again.id, again.enqueued) == (first.id, "created")
    assert (the_job().state, the_job().failures, the_job().finished_at) == (State.READY, 0, None)
    result = add.get_result(again.id)
    assert (result.errors, result.worker_ids, result.started_at) == ([], [], None)


def test_running_attempt_does_not_overwrite_reenqueued_metadata(claim):
    keyed(metadata={"by": "first"}).enqueue(1)
    (running,) = claim()
    running.metadata["page"] = 7
    assert direct.save_metadata(running)
    keyed(metadata={"by": "second"}).enqueue(2)
    running.metadata["page"] = 8

    assert direct.save_metadata(running)

    assert the_job().metadata == {"by": "second"}


def test_retry_of_lost_attempt_uses_latest_arguments(claim):
    keyed().enqueue(1)
    (running,) = claim()
    keyed().enqueue(2)

    settle(running, Execution.Outcome.LOST, State.SCHEDULED, wait=-1.0)
    direct.dispatch()
    (job,) = claim()

    assert job.args == [2]
    settle(job)
    assert the_job().state == State.SUCCESSFUL


def test_only_newest_executions_of_earlier_runs_are_kept(claim, monkeypatch):
    monkeypatch.setattr("django_dbqueue.engine.settle.KEPT", 5)
    for number in range(23):
        keyed().enqueue(number)
        settle(*claim())

    assert list(Execution.objects.order_by("attempt").values_list("attempt", flat=True)) == list(
        range(16, 24)
    )


def test_reenqueue_during_failed_attempt_resets_attempts(claim):
    keyed().enqueue(1)
    (running,) = claim()
    keyed().enqueue(2)
    settle(running, Execution.Outcome.FAILED, State.READY)

    (job,) = claim()

    assert (job.args, job.failures, job.attempts_before) == ([2], 0, 1)
    assert (the_job().failures, the_job().attempts_before, the_job().rerun_requested) == (
        0,
        1,
        False,
    )


# Versions


@pytest.mark.parametrize("settled", [False, True])
def test_stale_version_is_ignored(claim, settled):
    keyed(version=5).enqueue(5)
    if settled:
        settle(*claim())

    assert keyed(version=4).enqueue(4).enqueued == "ignored"

    assert (the_job().args, the_job().version) == ([5], 5)
    assert the_job().state == (State.SUCCESSFUL if settled else State.READY)


def test_same_version_reruns_finished_job(claim):
    keyed(version=5).enqueue(5)
    settle(*claim())

    assert keyed(version=5).enqueue(5).enqueued == "created"


def test_enqueue_without_version_keeps_newest_version():
    keyed(version=5).enqueue(5)
    keyed().enqueue(6)

    assert (the_job().args, the_job().version) == ([6], 5)


def test_enqueue_many_computes_version_of_each_call():
    add_newest.enqueue_many([(1, 7), (2, 3)])

    fates = [each.enqueued for each in add_newest.enqueue_many([(1, 6), (2, 4), (3, None)])]

    assert fates == ["ignored", "merged", "created"]
    assert list(Job.objects.order_by("key").values_list("args", "version")) == [
        ([1, 7], 7),
        ([2, 4], 4),
        ([3, None], None),
    ]


# On conflict


def test_skip_ignores_enqueue_of_unfinished_job(claim):
    skipping = keyed(on_conflict="skip")
    skipping.enqueue(1)
    assert skipping.enqueue(2).enqueued == "ignored"
    (job,) = claim()
    assert skipping.enqueue(3).enqueued == "ignored"
    settle(job)

    assert (the_job().state, the_job().args) == (State.SUCCESSFUL, [1])
    assert skipping.enqueue(4).enqueued == "created"
    assert (the_job().state, the_job().args) == (State.READY, [4])


@pytest.mark.parametrize("end", [State.SUCCESSFUL, State.FAILED, State.DISCARDED])
def test_once_ignores_enqueue_in_every_state(claim, end):
    once = keyed(on_conflict="once", version=5)
    first = once.enqueue(1)

    def is_ignored():
        before = Job.objects.values().get()
        later = keyed(
            on_conflict="once",
            version=9,
            queue_name="mail",
            run_after=timedelta(hours=1),
            expires=timedelta(hours=2),
            metadata={"by": "later"},
        )
        again = later.enqueue(2)
        assert (again.id, again.enqueued) == (first.id, "ignored")
        return before == Job.objects.values().get()

    assert first.enqueued == "created"
    assert is_ignored()
    (job,) = claim()
    assert is_ignored()
    settle(job, Execution.Outcome.FAILED, end)
    assert is_ignored()
    assert the_job().state == end


def test_once_ignores_enqueue_of_scheduled_job():
    keyed(on_conflict="once", run_after=timedelta(hours=1)).enqueue(1)

    assert keyed(on_conflict="once").enqueue(2).enqueued == "ignored"

    assert (the_job().state, the_job().args) == (State.SCHEDULED, [1])


def test_once_runs_again_after_its_job_was_pruned(claim):
    once = keyed(on_conflict="once")
    first = once.enqueue(1)
    settle(*claim())
    Job.objects.update(finished_at=the_job().finished_at - timedelta(seconds=60))
    assert direct.prune_jobs([State.SUCCESSFUL], 10, 100) == 1

    again = once.enqueue(2)

    assert again.enqueued == "created"
    assert again.id != first.id


def test_once_ignores_job_that_another_policy_enqueued(claim):
    keyed().enqueue(1)
    settle(*claim())

    assert keyed(on_conflict="once").enqueue(2).enqueued == "ignored"
    assert keyed().enqueue(3).enqueued == "created"


@pytest.mark.parametrize("on_conflict", ["once", "skip", "replace"])
def test_policy_without_a_key_is_refused(on_conflict):
    """Its jobs would not be deduplicated, without an error."""
    called = add.using(on_conflict=on_conflict)

    for call in (lambda: called.enqueue(1), lambda: called.enqueue_many([(1,)])):
        with pytest.raises(InvalidTask, match=rf"on_conflict='{on_conflict}' .* needs a key"):
            call()
    assert called.using(key="a").enqueue(1).enqueued == "created"
    assert Job.objects.count() == 1


def test_once_keeps_first_of_two_calls_in_one_bulk():
    once = index_document.using(on_conflict="once")
    once.enqueue(1, "old")

    results = once.enqueue_many([(1, "new"), (2, "first"), (2, "second"), (None, "free")])

    assert [each.enqueued for each in results] == ["ignored", "created", "ignored", "created"]
    assert results[1].id == results[2].id
    assert sorted(job.args[1] for job in Job.objects.all()) == ["first", "free", "old"]


@pytest.mark.parametrize("settled", [False, True])
def test_ignored_once_adds_nothing_to_its_batch(claim, settled):
    once = keyed(on_conflict="once")
    with batch() as first:
        once.enqueue(1)
    if settled:
        settle(*claim())

    with batch() as second:
        assert once.enqueue(2).enqueued == "ignored"

    assert str(the_job().batch_id) == str(first.id)
    assert not BatchShare.objects.exists()
    direct.finish_batches()
    assert Batch.objects.get(pk=second.id).finished_at
    assert bool(Batch.objects.get(pk=first.id).finished_at) == settled


def test_ignored_once_pipeline_keeps_its_job():
    once = pipeline(add, index_document).using(key="a", on_conflict="once")
    first = once.enqueue(1)
    drain()
    before = Job.objects.values().get()

    again = once.enqueue(2)

    assert (again.id, again.enqueued) == (first.id, "ignored")
    assert before == Job.objects.values().get()


def test_rolled_back_once_does_not_count():
    once = keyed(on_conflict="once")
    with transaction.atomic():
        once.enqueue(1)
        assert once.enqueue(2).enqueued == "ignored"
        transaction.set_rollback(True)

    assert once.enqueue(3).enqueued == "created"
    assert the_job().args == [3]


def test_deferred_once_gets_id_of_existing_job_on_commit():
    once = index_document.using(backend="other", on_conflict="once")
    first = once.enqueue(1)
    with transaction.atomic():
        second = once.enqueue(1)

    assert (second.id, second.enqueued) == (first.id, "ignored")


def test_concurrent_once_calls_create_one_job():
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")
    start = Barrier(4)

    def caller(number):
        try:
            start.wait(LONG)
            return keyed(on_conflict="once").enqueue(number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(caller, range(4)))

    assert sorted(each.enqueued for each in results) == ["created"] + ["ignored"] * 3
    assert {each.id for each in results} == {str(the_job().pk)}


def test_once_waits_for_uncommitted_job_and_runs_if_it_is_rolled_back():
    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")

    def caller():
        try:
            return keyed(on_conflict="once").enqueue(2)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as thread:
        with transaction.atomic():
            keyed(on_conflict="once").enqueue(1)
            waiting = thread.submit(caller)
            transaction.set_rollback(True)
        assert waiting.result(LONG).enqueued == "created"

    assert the_job().args == [2]


def test_once_with_delete_on_success_is_refused():
    with pytest.raises(InvalidTask, match=r"on_conflict='once' .* delete_on_success"):
        task(key="a", on_conflict="once", delete_on_success=True)(add.func)
    with pytest.raises(InvalidTask, match=r"on_conflict='once' .* delete_on_success"):
        leave_no_trace.using(key="a", on_conflict="once")


def test_once_in_queue_that_deletes_on_success_is_refused(backend, monkeypatch):
    config = backend.config.changed(per_queue={"noise": {"delete_on_success": True}})
    monkeypatch.setitem(vars(backend), "config", config)
    monkeypatch.setitem(vars(backend), "options_of", config.of)
    once = keyed(on_conflict="once")

    with pytest.raises(InvalidTask, match=r"queue 'noise'.*delete_on_success=False"):
        once.using(queue_name="noise")

    task(key="a", on_conflict="once", queue_name="noise", delete_on_success=False)(add.func)
    keyed(on_conflict="skip", queue_name="noise")
    assert once.enqueue(1).enqueued == "created"


def test_reenqueue_never_delays_a_job():
    keyed().enqueue(1)
    before = the_job().run_after

    keyed(run_after=timedelta(hours=1)).enqueue(2)

    assert (the_job().state, the_job().run_after) == (State.READY, before)


def test_reenqueue_without_run_after_makes_scheduled_job_ready():
    keyed(run_after=timedelta(hours=1)).enqueue(1)

    keyed().enqueue(2)

    assert the_job().state == State.READY


def test_replace_delays_job_up_to_max_wait():
    replacing = keyed(
        on_conflict="replace", run_after=timedelta(minutes=5), max_wait=timedelta(minutes=8)
    )
    replacing.enqueue(1)
    first = the_job()
    Job.objects.update(
        run_after=first.run_after - timedelta(minutes=4),
        enqueued_at=first.enqueued_at - timedelta(minutes=4),
    )
    began = the_job().enqueued_at

    replacing.enqueue(2)

    assert (the_job().args, the_job().state) == ([2], State.SCHEDULED)
    assert the_job().run_after == began + timedelta(minutes=8)


def test_replace_during_run_schedules_rerun(claim):
    keyed().enqueue(1)
    (running,) = claim()
    keyed(on_conflict="replace", run_after=timedelta(minutes=5)).enqueue(2)

    settle(running)

    assert (the_job().state, the_job().args) == (State.SCHEDULED, [2])


def test_delayed_call_does_not_postpone_requested_rerun(claim):
    keyed().enqueue(1)
    (running,) = claim()
    keyed().enqueue(2)

    keyed(run_after=timedelta(hours=1)).enqueue(3)

    settle(running)
    assert (the_job().state, the_job().args) == (State.READY, [3])


def test_replace_postpones_requested_rerun(claim):
    keyed().enqueue(1)
    (running,) = claim()
    keyed().enqueue(2)

    keyed(on_conflict="replace", run_after=timedelta(hours=1)).enqueue(3)

    settle(running)
    assert (the_job().state, the_job().args) == (State.SCHEDULED, [3])


@pytest.mark.parametrize(
    ("outcome", "state", "wait"),
    [
        ("interrupted", State.READY, 0.0),
        ("failed", State.READY, 0.0),
        ("failed", State.SCHEDULED, 2.0),
        ("snoozed", State.READY, 0.0),
    ],
)
def test_replace_during_run_keeps_run_after_for_every_outcome(claim, outcome, state, wait):
    keyed().enqueue(1)
    (running,) = claim()
    keyed(on_conflict="replace", run_after=timedelta(minutes=5)).enqueue(2)
    wanted = the_job().run_after

    direct.settle([AttemptResult.of(running, Execution.Outcome(outcome), state, wait=wait)])

    assert (the_job().state, the_job().args, the_job().run_after) == (State.SCHEDULED, [2], wanted)
    assert (the_job().rerun_requested, the_job().failures, the_job().attempts_before) == (
        False,
        0,
        1,
    )


def test_replace_keeps_run_after_of_released_job(claim):
    keyed().enqueue(1)
    (claimed,) = claim()
    keyed(on_conflict="replace", run_after=timedelta(minutes=5)).enqueue(2)
    wanted = the_job().run_after

    assert direct.release([claimed]) == {claimed.pk}

    assert (the_job().state, the_job().args, the_job().run_after) == (State.SCHEDULED, [2], wanted)
    assert not the_job().rerun_requested


def test_reenqueue_during_failed_attempt_waits_for_retry_delay(claim):
    keyed().enqueue(1)
    (running,) = claim()
    keyed().enqueue(2)

    direct.settle([AttemptResult.of(running, Execution.Outcome.FAILED, State.SCHEDULED, wait=60.0)])

    assert (the_job().state, the_job().args) == (State.SCHEDULED, [2])
    assert the_job().run_after - the_job().enqueued_at > timedelta(seconds=59)


# Key functions, enqueue_many and transactions


def test_enqueue_many_with_keys_keeps_last_call_per_key(
    django_assert_max_num_queries,
):
    index_document.enqueue_many([(n, "old") for n in range(0, 300, 2)])

    with django_assert_max_num_queries(30):
        results = index_document.enqueue_many([*((n, "new") for n in range(300)), (7, "newest")])

    assert Job.objects.count() == 300
    assert [result.enqueued for result in results[:3]] == ["merged", "created", "merged"]
    assert Job.objects.get(key="tests.tasks.index_document 7").args == [7, "newest"]
    assert {job.args[1] for job in Job.objects.exclude(key__endswith=" 7")} == {"new"}


def test_key_function_gets_the_arguments_it_names():
    index_document.enqueue(5)
    index_document.enqueue(number=5, text="again")

    assert the_job().key == "tests.tasks.index_document 5"


def test_key_none_creates_separate_jobs():
    index_document.enqueue(None)
    index_document.enqueue(None)

    assert list(Job.objects.values_list("key", flat=True)) == [None, None]


def test_worker_reruns_reenqueued_job(monkeypatch):
    keyed().enqueue(1)
    keyed().enqueue(2)

    assert drain() == 1
    keyed().enqueue(3)
    assert drain() == 1
    assert the_job().result == 3


def test_rollback_restores_earlier_arguments():
    keyed().enqueue(1)
    with transaction.atomic():
        assert keyed().enqueue(2).enqueued == "merged"
        transaction.set_rollback(True)

    assert the_job().args == [1]


def test_deferred_result_gets_id_of_merged_job_on_commit():
    first = index_document.using(backend="other").enqueue(1)
    with transaction.atomic():
        second = index_document.using(backend="other").enqueue(1)
        assert second.enqueued_at is None

    assert (second.id, second.enqueued) == (first.id, "merged")


# Bad input


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"key": lambda page: page},
            "key takes 'page', which is not an argument of add(): it has a, b.",
        ),
        ({"key": 5}, "key must be a function of the task's arguments, or text, not 5."),
        ({"key": ""}, "key must be text of 1 to 200 characters"),
        ({"key": "x" * 201}, "key must be text of 1 to 200 characters"),
        ({"key": "a\x00"}, "NUL"),
        ({"version": 5}, "version needs a key. Add key=..., or leave version out."),
        (
            {"key": "a", "version": 1.5},
            "version must be a whole number of at most 63 bits, not 1.5.",
        ),
        (
            {"key": "a", "version": lambda page: page},
            "version takes 'page', which is not an argument of add(): it has a, b.",
        ),
        (
            {"key": "a", "on_conflict": "merge"},
            "on_conflict must be one of 'rerun', 'skip', 'once', 'replace', not 'merge'.",
        ),
        (
            {"key": "a", "max_wait": timedelta(minutes=1)},
            "max_wait needs on_conflict='replace'.",
        ),
        (
            {"key": "a", "max_wait": timedelta(-1), "on_conflict": "replace"},
            "max_wait must be a timedelta above 0",
        ),
    ],
)
def test_invalid_unique_option_is_refused_at_declaration(settings, said):
    with pytest.raises(InvalidTask) as caught:
        task(**settings)(add.func)

    assert said in str(caught.value)


@pytest.mark.parametrize("value", [1.5, True, [1], ""])
def test_invalid_key_is_refused_at_enqueue(value):
    with pytest.raises(
        ValueError,
        match=r"index_document: the return value of key must be text of 1 to 200 characters",
    ):
        index_document.enqueue(value)

    assert not Job.objects.exists()


@pytest.mark.parametrize("value", [1.5, True, "1", 2**63])
def test_invalid_version_is_refused_at_enqueue(value):
    with pytest.raises(
        ValueError,
        match=r"add_newest: the return value of version must be a whole number of at most 63 bits",
    ):
        add_newest.enqueue(1, value)

    assert not Job.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "mysql", reason="Its snapshots show no later rows.")
def test_key_that_an_old_snapshot_does_not_show_is_found():
    keyed = add.using(key="k")

    def enqueue_in_another_transaction():
        keyed.enqueue(1)
        connection.close()

    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    try:
        with transaction.atomic():
            assert not Job.objects.exists()
            other = Thread(target=enqueue_in_another_transaction)
            other.start()
            other.join()
            assert not Job.objects.exists()

            assert keyed.enqueue(2).enqueued == "merged"
    finally:
        connection.close()

    assert Job.objects.get().args == [2]
