"""Operations: changes of very many jobs in parts, cut off at any point, stopped and undone."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from django_dbqueue.engine import operations, retention
from django_dbqueue.models import Job, Operation, OperationJob
from django_dbqueue.models.operation import STORED

from ..conftest import a_process
from ..reliability.conftest import held_open
from ..tasks import add

pytestmark = pytest.mark.django_db

Verb = Operation.Verb


def a_job(state="ready", **values):
    now = timezone.now()
    if state in ("failed", "discarded", "successful"):
        given = {"started_at": now, "finished_at": now, "attempt": 1}
        values = {**given, "failures": int(state == "failed"), **values}
    return Job.objects.create(task="tests.tasks.nothing", queue="default", state=state, **values)


def run(operation, size=operations.PART):
    while not operation.finished_at:
        operation = operations.run_part("default", operation.pk, size)
    return operation


def do(verb, value="", jobs=None, **columns):
    rows = Job.objects.all() if jobs is None else jobs
    return run(operations.create(rows, verb, value, **columns))


def undo(operation):
    return run(operations.create_undo(operation))


def rows():
    return list(Job.objects.order_by("pk").values_list("pk", *STORED, "blocked_by"))


def far(hours=5.0):
    return timezone.now() + timedelta(hours=hours)


def some_jobs():
    """One job in each state that an operator changes."""
    return [
        a_job(priority=3),
        a_job("scheduled", run_after=far(), expires_at=far(9)),
        a_job("scheduled", run_after=far(0.5), attempt=1, failures=1),
        a_job("failed"),
        a_job("discarded"),
        a_job("discarded", run_after=far(), expires_at=far(7), attempt=0, started_at=None),
    ]


@pytest.mark.parametrize(
    ("verb", "value", "number"),
    [
        (Verb.DISCARD, "", 4),
        (Verb.RETRY, "", 3),
        (Verb.RETRY_NOW, "", 5),
        (Verb.RUN_NOW, "", 2),
        (Verb.RESCHEDULE, far(1), 3),
        (Verb.MOVE, "slow", 3),
        (Verb.REPRIORITISE, -7, 3),
    ],
)
def test_undo_restores_all_that_an_operation_changed(verb, value, number):
    some_jobs()
    before = rows()

    done = do(verb, value)
    changed = rows()
    undone = undo(done)

    assert (done.total, done.done, done.changed) == (number,) * 3
    assert len(set(before) - set(changed)) == number
    assert (undone.total, undone.changed) == (number, number)
    assert rows() == before


@pytest.mark.parametrize("verb", [Verb.STOP, Verb.STOP_AND_RETRY])
def test_stop_of_running_jobs_cannot_be_undone(verb):
    a_job("running", process=a_process("a worker"), attempt=1)

    operation = do(verb)

    assert operation.changed == 1
    assert not Operation.objects.undoable().exists()


def test_blocked_job_asks_for_its_slot_again_after_an_undo():
    a_job("blocked", blocked_by="bank", limits=[])

    undo(do(Verb.DISCARD))

    assert Job.objects.values_list("state", "blocked_by").get() == ("ready", None)


def test_undo_of_retry_leaves_jobs_that_have_started():
    started, waits = a_job("failed"), a_job("failed")
    operation = do(Verb.RETRY)
    Job.objects.filter(pk=started.pk).update(
        state="running", process=a_process("a worker"), attempt=2
    )

    undone = undo(operation)

    assert (undone.total, undone.changed) == (2, 1)
    started.refresh_from_db()
    waits.refresh_from_db()
    assert (started.state, waits.state, waits.failures) == ("running", "failed", 1)


def test_undo_leaves_jobs_that_ran_again_and_were_discarded_again():
    job = a_job()
    operation = do(Verb.DISCARD)
    Job.objects.update(attempt=1)

    assert undo(operation).changed == 0
    assert Job.objects.get(pk=job.pk).state == "discarded"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((Verb.RUN_NOW,), (Verb.RESCHEDULE, far(9))),
        ((Verb.RESCHEDULE, far(1)), (Verb.RESCHEDULE, far(9))),
        ((Verb.RETRY,), (Verb.RESCHEDULE, far(9))),
    ],
)
def test_undo_leaves_jobs_that_a_later_operation_has_changed(first, second):
    """An undo took back the later change of another operator, too, and its own undo did nothing."""
    a_job("failed" if first == (Verb.RETRY,) else "scheduled", run_after=far(5))
    before = rows()
    one = do(*first)
    between = rows()
    other = do(*second)
    after = rows()

    assert undo(one).changed == 0
    assert rows() == after
    assert undo(other).changed == 1
    assert rows() == between != before


def test_undo_restores_jobs_whose_later_change_was_undone_or_is_of_another_column():
    a_job("scheduled", run_after=far(5))
    before = rows()
    one = do(Verb.RUN_NOW)
    undo(do(Verb.DISCARD))
    do(Verb.REPRIORITISE, 7)

    assert undo(one).changed == 1
    Job.objects.update(priority=0)
    assert rows() == before


def test_undo_of_move_leaves_jobs_that_were_moved_on():
    a_job()
    operation = do(Verb.MOVE, "slow")
    Job.objects.all().move("slower")

    assert undo(operation).changed == 0
    assert Job.objects.get().queue == "slower"


def test_jobs_deleted_meanwhile_are_left_out():
    a_job()
    a_job()
    operation = operations.create(Job.objects.all(), Verb.DISCARD)
    Job.objects.order_by("pk").first().delete()

    operation = run(operation)
    assert (operation.total, operation.done, operation.changed) == (2, 2, 1)
    Job.objects.all().delete()
    assert undo(operation).changed == 0


def test_only_jobs_that_existed_at_the_start_are_changed():
    a_job()
    operation = operations.create(Job.objects.all(), Verb.DISCARD)
    later = a_job()

    assert run(operation).changed == 1
    later.refresh_from_db()
    assert later.state == "ready"


def test_state_before_is_that_of_the_change_and_not_of_the_start():
    job = a_job()
    operation = operations.create(Job.objects.all(), Verb.DISCARD)
    now = timezone.now()
    Job.objects.update(state="failed", attempt=1, failures=1, finished_at=now, started_at=now)

    undo(run(operation))

    job.refresh_from_db()
    assert (job.state, job.attempt) == ("failed", 1)


def test_operation_cut_off_between_parts_goes_on_where_it_was():
    for _ in range(7):
        a_job()
    operation = operations.create(Job.objects.all(), Verb.DISCARD)

    sizes = []
    while not operation.finished_at:
        operation = operations.run_part("default", operation.pk, 3)
        sizes.append(operation.done)

    assert sizes == [3, 6, 7, 7]
    assert Job.objects.filter(state="discarded").count() == 7


def test_part_that_fails_changes_and_counts_nothing(monkeypatch):
    a_job()
    operation = operations.create(Job.objects.all(), Verb.DISCARD)

    def discard_and_fail(jobs, _value):
        raise RuntimeError(jobs.discard())

    verb = operations.Verb(lambda jobs, _value: jobs.discardable(), discard_and_fail)
    monkeypatch.setitem(operations.VERBS, Verb.DISCARD, verb)

    with pytest.raises(RuntimeError, match="1"):
        operations.run_part("default", operation.pk)

    operation.refresh_from_db()
    assert (operation.done, operation.position) == (0, 0)
    assert Job.objects.get().state == "ready"
    assert OperationJob.objects.get().changed is None


def test_stopped_operation_keeps_what_it_did_and_can_be_undone():
    for _ in range(5):
        a_job()
    operation = operations.create(Job.objects.all(), Verb.DISCARD)
    operations.run_part("default", operation.pk, 2)

    assert Operation.objects.all().stop() == 1
    operation = run(operation)

    assert (operation.done, operation.changed) == (2, 2)
    assert undo(operation).changed == 2
    assert set(Job.objects.values_list("state", flat=True)) == {"ready"}


def test_operation_is_undone_once():
    a_job()
    operation = do(Verb.DISCARD)
    undo(operation)

    assert not Operation.objects.undoable().exists()
    with pytest.raises(IntegrityError), transaction.atomic():
        operations.create_undo(operation)


def test_undo_without_an_effect_leaves_the_operation_undoable():
    job = a_job()
    operation = do(Verb.DISCARD)
    Job.objects.update(state="ready", finished_at=None)

    assert undo(operation).changed == 0

    assert list(Operation.objects.undoable()) == [operation]
    Job.objects.filter(pk=job.pk).discard()
    assert undo(operation).changed == 1
    assert not Operation.objects.undoable().exists()


def test_operation_of_no_jobs_ends_at_once():
    operation = do(Verb.DISCARD)

    assert (operation.total, operation.changed) == (0, 0)
    assert operation.finished_at


def test_invalid_value_is_refused_and_writes_nothing():
    a_job()

    with pytest.raises(ValueError, match="invalid literal"):
        operations.create(Job.objects.all(), Verb.REPRIORITISE, "high")

    assert not Operation.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite locks the whole database, and no single rows."
)
def test_jobs_that_others_hold_are_changed_last():
    jobs = [a_job() for _ in range(3)]
    operation = operations.create(Job.objects.all(), Verb.DISCARD)

    first = Job.objects.filter(pk=jobs[0].pk)
    with held_open(lambda: list(first.select_for_update())):
        operation = operations.run_part("default", operation.pk)
        assert (operation.done, operation.changed) == (2, 2)
        assert not operation.finished_at

    operation = run(operation)
    assert (operation.done, operation.changed) == (3, 3)


def trial(number=1000, limit=10):
    for _ in range(number):
        a_job("failed")
    jobs = Job.objects.all()
    return operations.create(jobs, Verb.RETRY, stop_above=limit)


def step(operation):
    size = operations.next_step(operation)
    return operations.run_part("default", operation.pk, size)


def end(state):
    now = timezone.now()
    done = {"state": state, "finished_at": now, "started_at": now, "attempt": 2}
    Job.objects.filter(state="ready").update(failures=int(state == "failed"), **done)


def test_trial_run_retries_three_then_a_percent_then_the_rest():
    operation = step(trial(400))
    assert operation.done == 3
    assert not operations.may_go_on(operation)
    end("successful")
    assert operations.may_go_on(operation)

    operation = step(operation)
    assert operation.done == 7
    assert not operations.may_go_on(operation)
    Job.objects.filter(state="ready").delete()  # With delete_on_success.
    assert operations.may_go_on(operation)

    assert step(operation).done == 400


def test_trial_run_knows_the_failures_of_jobs_that_waited_for_their_retry():
    for _ in range(9):
        a_job("scheduled", run_after=far(), attempt=1, failures=1)
    operation = step(operations.create(Job.objects.all(), Verb.RETRY_NOW, stop_above=10))
    assert not operations.may_go_on(operation)

    ran = Job.objects.filter(state="ready")
    assert ran.update(state="scheduled", attempt=2, failures=2) == 3

    assert operations.may_go_on(operation)
    assert run(operation).problem == "3 of 3 jobs failed again, more than 10 %."


@pytest.mark.parametrize("failed", ["failed", "waiting for its retry"])
def test_trial_run_stops_if_its_jobs_fail_again(failed):
    operation = step(trial(100))
    if failed == "failed":
        end("failed")
    else:
        Job.objects.filter(state="ready").update(state="scheduled", failures=1, attempt=2)

    assert operations.may_go_on(operation)
    operation = run(operation)

    assert (operation.done, operation.problem) == (3, "3 of 3 jobs failed again, more than 10 %.")
    assert Job.objects.filter(state="failed", attempt=1).count() == 97


def test_old_operations_are_pruned_with_their_jobs_in_parts():
    for _ in range(5):
        a_job()
    undo(do(Verb.DISCARD))
    kept = operations.create(Job.objects.all(), Verb.DISCARD)
    Operation.objects.exclude(pk=kept.pk).update(finished_at=timezone.now() - timedelta(days=99))

    sizes = [retention.prune_operations("default", 90 * 86400.0, 4) for _ in range(5)]

    assert sizes == [4, 4, 2, 2, 0]
    assert list(Operation.objects.all()) == [kept]
    assert OperationJob.objects.count() == 5


@pytest.mark.parametrize(
    ("verb", "value"), [(Verb.RETRY, ""), (Verb.RUN_NOW, ""), (Verb.RESCHEDULE, far(48))]
)
def test_undo_leaves_jobs_that_a_call_has_merged_with(verb, value):
    key = "tests.tasks.add one"
    if verb == Verb.RETRY:
        a_job("failed", key=key)
    else:
        a_job("scheduled", key=key, run_after=far(24))
    operation = do(verb, value)
    assert add.using(key="one").enqueue(2).enqueued == "merged"

    assert undo(operation).changed == 0

    assert Job.objects.values_list("state", "args").get() == ("ready", [2])


def test_undo_restores_failed_job_of_a_key():
    a_job("failed", key="tests.tasks.add one")

    assert undo(do(Verb.RETRY)).changed == 1

    assert Job.objects.get().state == "failed"


def test_undo_of_discard_leaves_next_run_of_a_key():
    keyed = add.using(key="one")
    keyed.enqueue(1)
    Job.objects.update(enqueued_at=far(-1))
    operation = do(Verb.DISCARD)
    Operation.objects.update(created_at=far(-0.5))
    assert keyed.enqueue(2).enqueued == "created"
    Job.objects.all().discard()

    assert undo(Operation.objects.get(pk=operation.pk)).changed == 0

    assert Job.objects.get().state == "discarded"
