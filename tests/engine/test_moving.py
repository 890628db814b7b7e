"""Moves of jobs between the databases of two backends: complete, and once, whatever interrupts them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, DataError, OperationalError, connections, transaction
from django.test import override_settings

from django_dbqueue import Rate, batch, limit, pipeline, task
from django_dbqueue.backoff import Constant
from django_dbqueue.contrib import operations
from django_dbqueue.contrib.operations import start, undo
from django_dbqueue.engine import moving
from django_dbqueue.engine.dispatch import dispatch
from django_dbqueue.models import Execution, Failure, Job, Operation, Progress, Queue, TaskState
from django_dbqueue.models.job import JobQuerySet
from django_dbqueue.models.locking import lock_keys
from django_dbqueue.testing import advance, drain

from .. import tasks
from ..conftest import (
    LONG,
    a_process,
    address_of_the_test_database,
    skip_if_long_numbers_are_refused,
    until,
    until_a_lock_is_awaited,
)

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.timeout(240),
]
has_row_locks = pytest.mark.skipif(
    connections["default"].vendor == "sqlite", reason="SQLite has one lock"
)
MOVE = ("queue", "move", "--backend", "default", "--to", "other", "--json")


def move(*arguments: str, stays: bool = False) -> list[dict[str, Any]]:
    out = StringIO()
    try:
        call_command(*MOVE, *(arguments or ["--all"]), stdout=out)
    except SystemExit as exit:
        assert stays
        assert exit.code == 1
    else:
        assert not stays, out.getvalue()
    return json.loads(out.getvalue())


def here() -> Any:
    return Job.objects.using("default")


def there() -> Any:
    return Job.objects.using("other")


def columns(job: Job) -> dict[str, Any]:
    return {field.attname: getattr(job, field.attname) for field in Job._meta.fields}


@task(max_attempts=3, takes_context=True, backoff=Constant(delay=60, jitter=0))
def fail_once(context, number):
    context.progress(number, 10, note="half of it")
    if context.attempt == 1:
        raise ValueError("the other side is away")
    return number


@task(concurrency=limit(1, group="door"), rate=Rate(1, per=60))
def one_at_a_time(number):
    return number


@task(key=lambda order: order)
def confirm(order, text=""):
    return text


def enqueue_of_every_kind() -> None:
    tasks.add.enqueue(1, b=2)
    tasks.add.using(run_after=timedelta(hours=1), expires=timedelta(hours=2), priority=7).enqueue(3)
    tasks.add.using(queue_name="mail", metadata={"customer": 5, "text": "é😀"}).enqueue(4)
    pipeline(tasks.add, tasks.add).enqueue(5)
    confirm.using(version=4).enqueue("a", text="first")
    fail_once.enqueue(8)
    drain()
    tasks.add.enqueue(1, b=2)
    one_at_a_time.enqueue_many([(1,), (2,)])


def test_every_column_and_attempt_of_waiting_jobs_is_moved():
    enqueue_of_every_kind()
    waiting = {job.pk: columns(job) for job in here().waiting()}
    finished = set(here().exclude(pk__in=waiting).values_list("pk", flat=True))
    attempts = list(Execution.objects.filter(job__in=waiting).values("job", "traceback", "log"))
    assert len(waiting) == 5
    assert attempts

    found = move()

    assert not any(row["problem"] for row in found)
    assert sum(row["number"] for row in found) == len(waiting)
    for each in waiting.values():  # One that waits for a slot asks for one there.
        if each["state"] == "blocked":
            each |= {"state": "ready", "blocked_by": None}
    assert {job.pk: columns(job) for job in there()} == waiting
    assert set(here().values_list("pk", flat=True)) == finished
    moved = Execution.objects.using("other")
    assert list(moved.values("job", "traceback", "log")) == attempts
    assert Failure.objects.using("other").get().count == 1
    assert (
        moved.exclude(failure=None).get().failure.fingerprint == Failure.objects.get().fingerprint
    )
    assert Progress.objects.using("other").get().note == "half of it"
    assert not Execution.objects.filter(job__in=waiting)
    advance(backend="other", minutes=2)
    drain("other")
    assert there().get(task__endswith="fail_once").result == 8


def test_blocked_job_asks_for_a_slot_there():
    one_at_a_time.enqueue_many([(1,), (2,)])
    one_at_a_time.enqueue(3)
    assert here().filter(state="blocked").exists() or here().update(
        state="blocked", blocked_by="door"
    )

    move()

    assert set(there().values_list("state", "blocked_by")) == {("ready", None)}
    drain("other")
    assert there().filter(state="successful").count() == 1


@pytest.mark.parametrize("state", ["failed", "discarded", "successful"])
def test_finished_jobs_are_moved_if_they_are_named(state):
    tasks.fail.enqueue()
    tasks.add.enqueue(1)
    drain()
    tasks.add.using(run_after=timedelta(hours=1)).enqueue(2)
    here().waiting().discard()
    before = columns(here().get(state=state))

    assert move() == []
    assert [row["number"] for row in move("--state", state)] == [1]

    assert columns(there().get()) == before


def test_what_cannot_be_moved_stays_as_it_is_with_the_reason():
    with batch() as opened:
        tasks.add.enqueue(1)
        tasks.row.using(queue_name="mail").enqueue("x")
        tasks.row.enqueue("y")
    here().exclude(task=tasks.add.module_path).update(batch=None)
    Queue.objects.named("mail").pause()
    TaskState.objects.named(tasks.row.module_path).pause()
    confirm.enqueue("a")
    confirm.using(backend="other").enqueue("a")
    running = tasks.add.using(queue_name="busy").enqueue(1)
    here().filter(pk=running.id).update(state="running", process=a_process("worker@here:1:a"))
    before = [columns(job) for job in here().order_by("pk")]

    problems = {(row["queue"], row["problem"]) for row in move(stays=True)}

    assert problems == {
        ("default", f"The batch {opened.id}, which ends here, needs it."),
        ("mail", "The queue 'mail' is paused here only. Pause it there, or resume it here."),
        (
            "default",
            f"The task {tasks.row.module_path!r} is paused here only. "
            "Pause it there, or resume it here.",
        ),
        ("default", moving.EXISTS),
        ("busy", "It runs. Repeat the command when it has ended."),
    }
    assert [columns(job) for job in here().order_by("pk")] == before
    Queue.objects.using("other").named("mail").pause()
    TaskState.objects.using("other").named(tasks.row.module_path).pause()
    assert sum(not row["problem"] for row in move(stays=True)) == 2


def test_dry_run_reports_the_same_and_changes_nothing():
    enqueue_of_every_kind()
    before = [columns(job) for job in here().order_by("pk")]

    reported = move("--all", "--dry-run")

    assert [columns(job) for job in here().order_by("pk")] == before
    assert not there()
    assert not Operation.objects.all()
    assert move() == reported


class Killed(BaseException):
    pass


def interrupt(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Begin a move that holds all jobs, and moves none."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(moving, "deliver", Mock(side_effect=Killed))
        move(*arguments)


@pytest.mark.parametrize("step", ["deliver", "_arrive", "erase", "_count", "_commit"])
def test_interrupted_move_goes_on_and_runs_nothing_twice(monkeypatch, step):
    """Whatever the target does meanwhile: its jobs run, and are deleted."""
    enqueue_of_every_kind()
    waiting = set(here().waiting().values_list("pk", flat=True))

    def kill(*_args, **_kwargs):
        raise Killed

    wrapper = type(connections["default"])
    commit, count, committed = wrapper._commit, moving._count, list[str]()

    def commit_until_arrived(connection):
        """Commit the operation, the part that is held, and what arrives in the target."""
        if "other" not in committed:
            committed.append(connection.alias)
            return commit(connection)
        connection._rollback()
        raise Killed

    def count_arrived(operation, **numbers):
        count(operation, **numbers)
        if operation.verb == "move_out" and "done" in numbers:
            raise Killed

    instead = {"_commit": commit_until_arrived, "_count": count_arrived}.get(step, kill)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(wrapper if step == "_commit" else moving, step, instead)
        move()
    arrived = set(there().values_list("pk", flat=True))
    assert arrived == (waiting if step in ("erase", "_count", "_commit") else set())
    assert drain() == 0  # What is held does not run here.
    assert set(here().scheduled().values_list("pk", flat=True)) == waiting
    advance(backend="other", hours=3)
    drain("other")
    there().filter(state="successful").delete()
    left = set(there().values_list("pk", flat=True))

    move()

    assert not here().waiting()
    assert set(there().values_list("pk", flat=True)) == (left if arrived else waiting)
    assert not Operation.objects.holding()
    first = Operation.objects.using("other").get(verb="move_in")
    assert (first.total, first.changed) == (len(waiting), len(waiting))


def test_what_an_operator_does_with_a_held_job_stands(monkeypatch):
    tasks.add.enqueue_many([(1,), (2,), (3,)])
    first, second, third = here().order_by("pk")
    interrupt(monkeypatch)
    here().filter(pk=first.pk).discard()
    here().filter(pk=second.pk).run_now()
    here().filter(pk=second.pk).update(state="running", process=a_process("worker@here:1:a"))

    move(stays=True)

    assert list(here().order_by("pk").values_list("pk", "state")) == [
        (first.pk, "discarded"),
        (second.pk, "running"),
    ]
    assert there().get().pk == third.pk


def test_key_that_arrives_meanwhile_keeps_the_job_here(monkeypatch):
    confirm.using(run_after=timedelta(hours=1), expires=timedelta(hours=2)).enqueue("a", "ours")
    tasks.add.enqueue(1)
    before = columns(here().get(key__endswith=" a"))
    hold = moving.hold

    def and_enqueue(*args):
        hold(*args)
        confirm.using(backend="other").enqueue("a", "theirs")

    monkeypatch.setattr(moving, "hold", and_enqueue)

    found = move(stays=True)

    assert {row["problem"] for row in found} == {"", moving.EXISTS}
    assert columns(here().get()) == before
    assert there().count() == 2


def test_job_that_is_moved_there_and_back_runs_once():
    result = tasks.add.enqueue(1)
    for _ in range(2):
        move()
        call_command("queue", "move", "--backend=other", "--to=default", "--all", stdout=StringIO())
    assert here().get().pk == Job(pk=result.id).pk or str(here().get().pk) == result.id
    assert not there()
    assert drain() == 1


def test_interrupted_move_to_a_backend_that_is_gone_names_it(monkeypatch, settings):
    tasks.add.enqueue(1)
    interrupt(monkeypatch)
    Operation.objects.update(value="archive")

    with pytest.raises(CommandError, match="A move to 'archive' was interrupted, and TASKS has no"):
        move()

    assert here().get().run_after == moving.NEVER


def test_jobs_of_a_move_to_a_backend_that_is_gone_for_good_run_here(monkeypatch):
    tasks.add.enqueue(1)
    later = tasks.add.using(run_after=timedelta(hours=1)).enqueue(2)
    before = {job.pk: columns(job) for job in here()}
    interrupt(monkeypatch)
    Operation.objects.update(value="archive")
    abandon = ("queue", "move", "--backend", "default", "--abandon")

    with pytest.raises(CommandError, match="No interrupted move to 'other' holds jobs"):
        call_command(*abandon, "other")
    for selection in (["--queue=mail"], ["--all"], [str(later.id)]):
        with pytest.raises(CommandError, match="all interrupted moves to 'archive': give no ids"):
            call_command(*abandon, "archive", *selection)
    call_command(*abandon, "archive", "--dry-run", stdout=(out := StringIO()))
    assert out.getvalue() == "2 jobs would run here.\n"
    assert Operation.objects.holding()
    call_command(*abandon, "archive", stdout=(out := StringIO()))

    assert out.getvalue() == "2 jobs will run here.\n"
    assert {job.pk: columns(job) for job in here()} == before
    assert drain() == 1
    assert not Operation.objects.holding()
    assert [row["number"] for row in move()] == [1]
    assert str(there().get().pk) == later.id


def test_failure_of_the_target_leaves_all_held_and_nothing_there(monkeypatch):
    tasks.add.enqueue_many([(1,), (2,)])

    def fail(*_args):
        raise DatabaseError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(DatabaseError, match="disk is full"):
        patch.setattr(moving, "_copy_attempts", fail)
        move()
    assert not there()

    move()

    assert there().ready().count() == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "default", "--all"], "have the same database, 'default'"),
        (["--to", "nowhere", "--all"], "TASKS has no DatabaseBackend nowhere"),
        (["--to", "other"], "Give the ids of jobs, or filters"),
    ],
)
def test_wrong_arguments_are_named(arguments, said):
    with pytest.raises(CommandError, match=said):
        call_command("queue", "move", "--backend", "default", *arguments)


def test_unknown_queue_of_the_target_is_named():
    tasks.add.enqueue(1)
    given = {
        alias: {
            "BACKEND": "django_dbqueue.backend.DatabaseBackend",
            "QUEUES": queues,
            "OPTIONS": {"database": alias},
        }
        for alias, queues in (("default", []), ("other", ["bulk"]))
    }
    with override_settings(TASKS=given):
        found = move(stays=True)
    assert "'default' is in no QUEUES" in found[0]["problem"]


def test_job_that_another_move_holds_is_not_held_again(monkeypatch):
    """Its time would be lost: the second move would take it for a job of the year 9999."""
    tasks.add.using(run_after=timedelta(hours=1)).enqueue(1)
    before = columns(here().get())
    interrupt(monkeypatch)
    second = Operation.objects.create(verb="move_out", value="other")

    moving.hold(second, [before["id"]])

    assert not second.items.all()
    move()
    assert columns(there().get()) == before


def test_job_that_a_batch_gets_meanwhile_stays(monkeypatch):
    confirm.enqueue("a")
    hold = moving.hold

    def enqueue_and_hold(*args):
        with batch():
            confirm.enqueue("a")
        hold(*args)

    monkeypatch.setattr(moving, "hold", enqueue_and_hold)

    assert "Repeat the command" in move(stays=True)[0]["problem"]
    assert here().get().state == "ready"


def test_job_that_a_batch_waits_for_without_having_it_stays():
    """It was enqueued again, outside of the batch, while it ran."""
    with batch() as opened:
        confirm.enqueue("a")
    running = {"state": "running", "process": a_process("worker@here:1:a"), "attempt": 1}
    here().update(**running)
    confirm.enqueue("a")
    here().update(state="ready", process=None, rerun_requested=False)
    assert here().get().batch_id is None

    (found,) = move(stays=True)

    assert found["problem"] == f"The batch {opened.id}, which ends here, needs it."


def test_job_of_an_operation_stays_and_ends_it(monkeypatch, backend):
    monkeypatch.setattr(operations, "AT_ONCE", 1)
    tasks.add.using(run_after=timedelta(days=1), queue_name="later").enqueue_many([(1,), (2,)])
    operation = start(here().filter(queue="later"), "discard", "", backend)

    (found,) = move("--task", operations.run_operation.module_path, stays=True)

    assert (found["number"], found["problem"]) == (1, moving.OPERATION)
    drain()
    assert Operation.objects.get(pk=operation.pk).changed == 2


def test_callback_stays_with_its_batch():
    with batch(on_finish=tasks.sum_up) as members:
        tasks.add.using(queue_name="mail").enqueue(1)
    drain()
    callback = here().filter(task="tests.tasks.sum_up")
    ended = callback.get().finished_at
    callback.update(state="ready", finished_at=None)
    other = tasks.echo.enqueue(str(members.id))

    problems = {each["task"]: each["problem"] for each in move("--state", "ready", stays=True)}

    follows = f"It follows the batch {members.id}, stored here only."
    assert problems == {"tests.tasks.echo": "", "tests.tasks.sum_up": follows}
    assert str(there().get().pk) == other.id
    callback.update(state="successful", finished_at=ended)
    move("--task", "tests.tasks.sum_up", "--state", "successful")
    assert there().filter(task="tests.tasks.sum_up").exists()


def test_finished_jobs_stay_finished_until_they_are_moved(monkeypatch):
    """Else "run now" would run them again, and on_conflict="skip" would ignore a call."""
    confirm.enqueue("a")
    tasks.add.enqueue(1)
    drain()
    before = [columns(job) for job in here().order_by("pk")]
    interrupt(monkeypatch, "--state", "successful")

    assert [columns(job) for job in here().order_by("pk")] == before
    assert here().scheduled().run_now() == 0
    confirm.using(on_conflict="skip").enqueue("a", "again")
    move("--state", "successful")

    assert columns(there().get()) == before[1]
    assert here().get().state == "ready"


def test_queue_and_priority_that_a_held_job_gets_stand(monkeypatch):
    tasks.add.enqueue(1)
    interrupt(monkeypatch)
    here().reprioritise(9)
    here().move("mail")

    move()

    assert there().values_list("priority", "queue", "state").get() == (9, "mail", "ready")


@pytest.mark.parametrize("database", ["default", "other"])
def test_command_refuses_to_run_in_a_transaction(database):
    """A rollback would undo the half that is in this database."""
    tasks.add.enqueue(1)
    with (
        transaction.atomic(database),
        pytest.raises(CommandError, match=f"transaction is open in the database '{database}'"),
    ):
        move()
    assert here().get().state == "ready"


def test_job_that_the_target_refuses_stays_and_the_others_are_moved(monkeypatch):
    """Such as a NUL from SQLite in PostgreSQL, or a document that MariaDB finds too long."""
    tasks.add.enqueue_many([(number,) for number in range(20)])
    refused = columns(here().order_by("pk")[7])
    copy_attempts = moving._copy_attempts

    def refuse(ids, *databases):
        if refused["id"] in ids:
            raise DataError("no NUL, please")
        copy_attempts(ids, *databases)

    monkeypatch.setattr(moving, "_copy_attempts", refuse)

    found = move(stays=True)

    assert [(row["number"], row["problem"]) for row in found] == [
        (19, ""),
        (1, "The database 'other' refuses it: no NUL, please"),
    ]
    assert columns(here().get()) == refused
    assert not Operation.objects.holding()


def test_refused_job_that_has_arrived_before_does_not_run_here(monkeypatch):
    tasks.add.enqueue(1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(moving, "erase", Mock(side_effect=Killed))
        move()
    with monkeypatch.context() as patch, pytest.raises(OperationalError, match="gone away"):
        patch.setattr(moving, "_taken_keys", Mock(side_effect=OperationalError("gone away")))
        move()
    assert here().get().run_after == moving.NEVER
    move()
    assert not here()


def test_document_that_python_cannot_read_stays_with_the_reason():
    skip_if_long_numbers_are_refused()
    tasks.add.enqueue_many([(1,), (2,)])
    first = here().order_by("pk").first()
    column = Job._meta.get_field("id")
    with connections["default"].cursor() as cursor:
        values = ["[" + "1" * 5000 + "]", column.get_db_prep_value(first.pk, cursor.db)]
        cursor.execute("UPDATE dbqueue_job SET result = %s WHERE id = %s", values)

    found = move(stays=True)

    assert "is not JSON serializable" in found[1]["problem"]
    assert here().get().state == "ready"


def test_jobs_are_moved_that_are_too_long_for_one_statement():
    """Of 16 MB by default, on MariaDB."""
    tasks.add.enqueue_many([("x" * 100_000,)] * 200)
    assert move()[0]["number"] == 200


def test_key_that_is_committed_there_in_between_keeps_the_job_here(monkeypatch):
    confirm.enqueue("a")
    taken, calls = moving._taken_keys, iter("first")

    def enqueue_after(*args):
        found = taken(*args)
        if next(calls) == "i":
            with ThreadPoolExecutor(1) as threads:
                threads.submit(enqueue_there).result()
        return found

    def enqueue_there():
        confirm.using(backend="other").enqueue("a")
        connections.close_all()

    if connections["default"].vendor == "sqlite":
        pytest.skip("one writer at a time")
    monkeypatch.setattr(moving, "_taken_keys", enqueue_after)

    assert move(stays=True)[0]["problem"] == moving.EXISTS
    assert here().get().state == "ready"


@pytest.mark.skipif(
    connections["default"].vendor != "postgresql", reason="others have a timeout of their own"
)
def test_move_gives_way_to_a_transaction_in_both_databases(monkeypatch):
    """It has a key there, and waits for a job here that this move has locked."""
    confirm.enqueue("a")
    confirm.enqueue("b")
    arrive, has_key = moving._arrive, Event()

    def enqueue_in_both():
        with transaction.atomic("other"), transaction.atomic("default"):
            confirm.using(backend="other").enqueue("a")
            has_key.set()
            confirm.enqueue("b", "later")
        connections.close_all()

    with ThreadPoolExecutor(1) as threads:
        found = []

        def arrive_after(*args):
            if not found:
                found.append(threads.submit(enqueue_in_both))
                has_key.wait()
            return arrive(*args)

        monkeypatch.setattr(moving, "LOCK_SECONDS", 1)
        monkeypatch.setattr(moving, "_arrive", arrive_after)
        move(stays=True)
        found[0].result()

    assert not Operation.objects.holding()
    assert sorted(job.args[-1] for job in here()) == ["a", "later"]


@contextmanager
def elsewhere(rows):
    """Hold locks of rows in another transaction, for ten seconds at most."""
    held, end = Event(), Event()

    def hold():
        with transaction.atomic(using=rows.db):
            list(rows.select_for_update().values_list("pk"))
            held.set()
            end.wait(10)
        connections.close_all()

    with ThreadPoolExecutor(1) as threads:
        holding = threads.submit(hold)
        assert held.wait(LONG)
        try:
            yield
        finally:
            end.set()
        holding.result()


@has_row_locks
def test_move_does_not_wait_for_jobs_while_it_has_locked_others(monkeypatch):
    tasks.add.enqueue_many([(number,) for number in range(3)])
    first, *others = here().order_by("pk").values_list("pk", flat=True)
    interrupt(monkeypatch)
    operation = Operation.objects.get()

    with elsewhere(here().filter(pk=first)):
        assert list(moving.deliver(operation, "other")) == others
    assert list(moving.deliver(operation, "other")) == [first]


@has_row_locks
def test_hold_locks_its_operation_before_jobs():
    """As a delivery of the same operation does."""
    tasks.add.enqueue(1)
    operation = Operation.objects.create(verb="move_out", value="other")
    ids = list(here().values_list("pk", flat=True))

    def hold():
        moving.hold(operation, ids)
        connections.close_all()

    with ThreadPoolExecutor(1) as threads:
        with elsewhere(Operation.objects.filter(pk=operation.pk)):
            holding = threads.submit(hold)
            until_a_lock_is_awaited()
            with transaction.atomic():
                assert lock_keys(here(), ids) == ids
        holding.result()
    assert operation.items.count() == 1


def test_keys_are_inserted_there_in_their_order(monkeypatch):
    """As an upsert inserts them: both may have keys in common."""
    confirm.enqueue_many([("b",), ("a",), ("c",)])
    inserted, bulk_create = [], JobQuerySet.bulk_create

    def note(rows, jobs, **options):
        inserted.extend(job.key.rpartition(" ")[2] for job in jobs)
        return bulk_create(rows, jobs, **options)

    monkeypatch.setattr(JobQuerySet, "bulk_create", note)

    move()

    assert inserted == ["a", "b", "c"]


def test_router_that_writes_to_one_database_does_not_matter(settings):
    class OneDatabase:
        def db_for_write(self, model, **hints):
            return "default"

    settings.DATABASE_ROUTERS = [OneDatabase()]
    tasks.fail.enqueue()
    drain()
    move("--state", "failed")
    assert there().get().state == "failed"


# In parts of ten, so that it takes a while. Without a second argument, it waits for jobs.
MOVER = f"""
import pathlib, sys, time
import django
django.setup()
from django.core.management import call_command
from django_dbqueue.engine import moving
from django_dbqueue.models import Job
moving.PART = 10
pathlib.Path(sys.argv[1]).touch()
while len(sys.argv) == 2 and not Job.objects.waiting():
    time.sleep(0.005)
call_command(*{MOVE!r}, "--all")
"""


def test_queue_moves_while_both_sides_work_and_movers_are_killed(runqueue, tmp_path):
    """Real workers on both sides, producers, and movers that are killed at any moment."""
    path, log, ready = (tmp_path / name for name in ("lines", "movers", "ready"))
    env = {**os.environ, **address_of_the_test_database(), "DBQUEUE_WITHOUT_ADMIN": "1"}
    runqueue("--backend", "all", "--embedded", "--threads", "2")
    enqueued, number, held = set(), random.Random(4711), 0

    def mover(*arguments: str) -> subprocess.Popen[bytes]:
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-c", MOVER, str(ready), *arguments]
        with log.open("ab") as file:
            return subprocess.Popen(command, env=env, stdout=file, stderr=file)

    for _ in range(8):
        child, before = mover(), Operation.objects.count()
        until(ready.exists)
        jobs = [(str(path), "", 0.05)] * 30
        # On a busy machine, workers may run the first half before the mover sees any.
        later = tasks.leave_line.using(run_after=timedelta(hours=1))
        results = [*tasks.leave_line.enqueue_many(jobs), *later.enqueue_many(jobs)]
        enqueued |= {result.id for result in results}
        until(lambda before=before: Operation.objects.count() > before)
        time.sleep(number.uniform(0, 0.1))
        child.kill()
        child.wait()
        held += Operation.objects.holding().count()

    until(lambda: mover("at once").wait() == 0 and not Operation.objects.holding())
    for jobs in (here(), there()):
        jobs.scheduled().run_now()
    until(
        lambda: (
            not {*here().values_list("state"), *there().values_list("state")} - {("successful",)}
        )
    )
    lines = Counter(line.split()[0] for line in path.read_text().splitlines())
    assert set(lines) == enqueued
    assert set(lines.values()) == {1}
    assert here().count() + there().count() == len(enqueued)
    assert there()
    assert held, log.read_text()  # Some were killed between two steps.
    assert "Traceback" not in log.read_text()


def test_held_job_that_was_discarded_can_be_retried_after_the_move(monkeypatch):
    tasks.add.enqueue(1)
    before = columns(here().get())
    interrupt(monkeypatch)
    here().discard()
    move()

    here().retry()

    job = here().get()
    assert (job.state, job.expires_at) == ("ready", before["expires_at"])


@pytest.mark.parametrize("order", [("move", "undo"), ("undo", "move")])
def test_undo_of_a_discard_of_a_held_job_keeps_its_expiry(monkeypatch, order):
    tasks.add.using(expires=timedelta(hours=1)).enqueue(1)
    (before,) = map(columns, here().all())
    interrupt(monkeypatch)
    operation = start(here().all(), "discard", "", None)

    for step in order:
        if step == "move":
            move()
        else:
            undo(operation, None)

    (job,) = [*here().all(), *there().all()]
    assert (job.run_after, job.expires_at) == (before["run_after"], before["expires_at"])


def test_undo_of_a_discard_of_a_held_job_lets_it_run(monkeypatch):
    tasks.add.enqueue(1)
    interrupt(monkeypatch)
    operation = start(here().all(), "discard", "", None)
    move()

    undo(operation, None)
    dispatch("default")

    assert here().get().state == "ready"
