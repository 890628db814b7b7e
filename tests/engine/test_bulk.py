"""``enqueue_many()`` of several tasks: in order, in few statements, all or none."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from functools import partial
from threading import Barrier, Thread

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_dbqueue import aenqueue_many, batch, enqueue_many, limit, pipeline, task
from django_dbqueue.compat import FrameworkTask, InvalidTask, signals, task_backends
from django_dbqueue.engine import enqueue as engine
from django_dbqueue.engine.enqueue import write
from django_dbqueue.engine.unique import upsert
from django_dbqueue.models import Batch, Job
from django_dbqueue.testing import drain

from ..conftest import BOTH, LONG
from ..tasks import add, index_document, nothing

pytestmark = pytest.mark.django_db(transaction=True, databases=BOTH)
HOUR = timedelta(hours=1)
ran: list[int] = []
other_add = add.using(backend="other")


@task
def sum_up(batch_id):
    return batch_id


@task
def run_here(number):
    ran.append(number)


def add_backend(settings, name):
    """Add one of Django's own backends to the settings."""
    framework = FrameworkTask.__module__.removesuffix(".base")
    path = f"{framework}.backends.{name.lower()}.{name}Backend"
    settings.TASKS = {**settings.TASKS, name.lower(): {"BACKEND": path, "QUEUES": []}}


def run_in_threads(*actions):
    """Run actions at the same time. Return their errors."""
    barrier, errors = Barrier(len(actions)), []

    def run(action):
        try:
            barrier.wait(LONG)
            action()
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def stored() -> list[tuple[str, list, dict]]:
    return [(job.task, job.args, job.kwargs) for job in Job.objects.order_by("pk")]


def test_calls_of_several_tasks_are_written_in_order():
    results = enqueue_many([add.prepare(1), nothing.prepare(), add.prepare(2, b=3)])

    assert stored() == [
        ("tests.tasks.add", [1], {}),
        ("tests.tasks.nothing", [], {}),
        ("tests.tasks.add", [2], {"b": 3}),
    ]
    assert [result.id for result in results] == [str(job.pk) for job in Job.objects.order_by("pk")]
    assert [result.task.func for result in results] == [add.func, nothing.func, add.func]
    assert drain() == 3
    results[2].refresh()
    assert results[2].return_value == 5


def test_settings_of_each_call_are_kept():
    at = datetime(2100, 1, 1, tzinfo=timezone.utc)
    calls = [
        add.using(priority=7, queue_name="mail", metadata={"by": "me"}).prepare(1),
        add.using(run_after=HOUR).prepare(2),
        add.using(run_after=at, expires=HOUR).prepare(3),
        add.using(run_after=HOUR).prepare(4),
        add.using(timeout=9, max_attempts=4).prepare(5),
        add.using(expires=HOUR).prepare(6),
        add.using(run_after=at, expires=HOUR).prepare(7),
        add.prepare(8),
    ]
    enqueue_many(calls)

    jobs = {job.args[0]: job for job in Job.objects.all()}
    assert (jobs[1].priority, jobs[1].queue, jobs[1].metadata) == (7, "mail", {"by": "me"})
    assert {jobs[n].run_after - jobs[n].enqueued_at for n in (2, 4)} == {HOUR}
    assert [(jobs[n].run_after, jobs[n].expires_at) for n in (3, 7)] == [(at, at + HOUR)] * 2
    assert [jobs[n].state for n in (2, 3, 4, 7, 8)] == ["scheduled"] * 4 + ["ready"]
    assert (jobs[5].timeout, jobs[5].max_attempts) == (timedelta(seconds=9), 4)
    assert jobs[6].expires_at - jobs[6].enqueued_at == HOUR
    assert (jobs[8].run_after, jobs[8].expires_at) == (jobs[8].enqueued_at, None)


def test_results_have_the_times_of_their_rows():
    calls = [
        add.using(run_after=timedelta(minutes=number % 3)).prepare(number) for number in range(9)
    ]
    results = enqueue_many(calls)

    assert {result.id: result.enqueued_at for result in results} == {
        str(pk): at for pk, at in Job.objects.values_list("pk", "enqueued_at")
    }


@pytest.mark.parametrize("distinct", [1, 300])
def test_many_calls_take_few_statements(distinct):
    calls = [
        (add if number % 2 else nothing)
        .using(run_after=timedelta(minutes=number % distinct))
        .prepare(*[number] * (number % 2))
        for number in range(600)
    ]
    with CaptureQueriesContext(connection) as queries:
        enqueue_many(calls)

    assert Job.objects.count() == 600
    # SQLite and MariaDB count each row of an executemany, and SQLite inserts few rows at a time.
    statements = {query["sql"].split(" VALUES")[0][:60] for query in queries}
    assert len(statements) <= 8
    if connection.vendor == "postgresql":
        assert len(queries) <= 10


def test_keyed_calls_are_merged_by_their_own_policies():
    index_document.using(key="kept").enqueue("old")
    index_document.using(key="merged").enqueue("old")

    results = enqueue_many(
        [
            add.prepare(1),
            index_document.using(key="kept", on_conflict="skip").prepare("new"),
            index_document.using(key="merged").prepare("new"),
            index_document.using(key="created").prepare("new"),
            index_document.using(key="created", on_conflict="once").prepare("newer"),
            add.using(key="created").prepare(2),
        ]
    )

    assert [result.enqueued for result in results] == [
        *("created", "ignored", "merged", "created", "ignored", "created"),
    ]
    assert {job.key: job.args for job in Job.objects.all()} == {
        None: [1],
        "tests.tasks.index_document kept": ["old"],
        "tests.tasks.index_document merged": ["new"],
        "tests.tasks.index_document created": ["new"],
        "tests.tasks.add created": [2],
    }


def test_concurrent_bulks_with_keys_in_common_do_not_deadlock():
    keys = [str(number) for number in range(20)]
    once = index_document.using(on_conflict="once")
    for turn in range(5):

        def run(order, turn=turn):
            calls = [
                (once if place % 2 else index_document).using(key=f"{turn} {key}").prepare(key)
                for place, key in enumerate(order)
            ]
            enqueue_many([*calls, add.prepare(1)])

        assert run_in_threads(partial(run, keys), partial(run, keys[::-1])) == []

    assert Job.objects.count() == 5 * (len(keys) + 2)


class TestGroups:
    """A bulk whose calls differ in their backend, or in the time at which they are written."""

    @pytest.fixture(params=["on_commit", "second", "other"])
    def elsewhere(self, request, settings):
        """A variant of a task whose calls are in a group of their own."""
        settings.TASKS = {**settings.TASKS, "second": settings.TASKS["default"]}
        if request.param == "on_commit":
            return lambda task: task.using(enqueue="on_commit")
        return lambda task: task.using(backend=request.param)

    @pytest.mark.parametrize("in_a_transaction", [False, True])
    def test_groups_in_opposite_orders_do_not_deadlock(self, elsewhere, in_a_transaction):
        keyed = index_document.using(enqueue="on_commit" if in_a_transaction else None)
        database = task_backends[elsewhere(add).backend].database
        number = 300 if connection.vendor != "sqlite" else 20
        for turn in range(3):

            def run(is_first, turn=turn):
                here = [keyed.using(key=f"{turn} {n}").prepare(n) for n in range(number)]
                there = [
                    elsewhere(keyed).using(key=f"{turn} other {n}").prepare(n)
                    for n in range(number)
                ]
                with transaction.atomic() if in_a_transaction else nullcontext():
                    enqueue_many(here + there if is_first else there + here)

            assert run_in_threads(partial(run, False), partial(run, True)) == []

        jobs = Job.objects.count() + (database != "default") * Job.objects.using(database).count()
        assert jobs == 3 * 2 * number

    def test_locks_are_taken_by_database_and_all_keys_of_one_together(self, elsewhere, monkeypatch):
        seen = []

        def note(database, calls):
            seen.append((database, sorted(job.key[-1] for job, _policy in calls)))
            return upsert(database, calls)

        monkeypatch.setattr(engine, "upsert", note)
        calls = [
            index_document.using(key="2").prepare("here"),
            elsewhere(index_document).using(key="1").prepare("there"),
        ]
        enqueue_many(calls)
        enqueue_many(calls[::-1])

        database = task_backends[calls[1].task.backend].database
        once = [("default", ["1", "2"])] if database == "default" else []
        assert seen == (once or [("default", ["2"]), ("other", ["1"])]) * 2

    def test_latest_call_of_a_key_wins_whatever_its_group(self, elsewhere):
        one = index_document.using(key="one")
        if task_backends[elsewhere(one).backend].database == "other":
            pytest.skip("The row of a key is in each database.")
        results = enqueue_many(
            [(elsewhere(one) if n % 2 else one).prepare(str(n)) for n in range(5)]
        )

        assert Job.objects.get().args == ["4"]
        assert [result.enqueued for result in results] == ["created", *["merged"] * 4]
        assert len({result.id for result in results}) == 1

    @pytest.mark.parametrize("in_a_transaction", [False, True])
    def test_deadlock_is_repeated_and_every_job_written_and_reported_once(
        self, elsewhere, monkeypatch, in_a_transaction
    ):
        later = add.using(enqueue="on_commit")
        there = elsewhere(later)
        attempts, sent = [], []

        def fail(database, jobs):
            write(database, jobs)
            attempts.append(database)
            if len(attempts) < 4:
                raise a_deadlock()

        def note(sender, task_result, **kwargs):
            sent.append(task_result.args)

        monkeypatch.setattr(engine, "write", fail)
        signals.task_enqueued.connect(note)
        try:
            with transaction.atomic() if in_a_transaction else nullcontext():
                results = enqueue_many(
                    [
                        *(later.prepare(1), later.using(key="a").prepare(2)),
                        *(there.prepare(3), there.using(key="b").prepare(4)),
                    ]
                )
        finally:
            signals.task_enqueued.disconnect(note)

        stored = [*Job.objects.all(), *Job.objects.using("other").all()]
        assert sorted(job.args for job in stored) == sorted(sent) == [[1], [2], [3], [4]]
        assert {result.id for result in results} == {str(job.pk) for job in stored}

    def test_deadlock_in_the_transaction_of_the_caller_is_raised(self, elsewhere, monkeypatch):
        attempts = []

        def fail(*args):
            attempts.append(args)
            raise a_deadlock()

        monkeypatch.setattr(engine, "upsert", fail)
        with pytest.raises(OperationalError), transaction.atomic():
            enqueue_many([index_document.using(key="1").prepare("1"), elsewhere(add).prepare(2)])

        assert len(attempts) == 1
        assert Job.objects.count() == Job.objects.using("other").count() == 0

    def test_endless_conflict_is_raised_and_nothing_written(self, elsewhere, monkeypatch):
        def fail(*args):
            raise a_deadlock()

        monkeypatch.setattr(engine, "upsert", fail)
        with pytest.raises(OperationalError):
            enqueue_many([elsewhere(add).prepare(2), index_document.using(key="1").prepare("1")])

        assert Job.objects.count() == Job.objects.using("other").count() == 0


def a_deadlock():
    error = OperationalError("deadlock detected")
    error.__cause__ = Exception(1213)
    return error


def test_limits_apply_across_the_calls():
    limited = add.using(concurrency=limit(1, group="one"))

    enqueue_many([limited.prepare(1), nothing.prepare(), limited.using(run_after=HOUR).prepare(2)])
    enqueue_many([add.prepare(3), limited.prepare(4), limited.prepare(5)])

    states = {tuple(job.args): job.state for job in Job.objects.all()}
    assert states[(1,)] == states[()] == states[(3,)] == "ready"
    assert states[(2,)] == "scheduled"
    assert sorted((states[(4,)], states[(5,)])) == ["blocked", "ready"]


def test_pipelines_and_tasks_are_written_together():
    enqueue_many([pipeline(add, add).prepare(1, b=2), add.prepare(3), pipeline(add).prepare(4)])

    assert [len(job.pipeline or []) for job in Job.objects.order_by("pk")] == [2, 0, 1]
    assert drain() == 4


def test_jobs_belong_to_the_open_batch():
    with batch(on_finish=sum_up) as members:
        enqueue_many([add.prepare(1), nothing.prepare(), other_add.prepare(2)])

    assert members.progress() == {"ready": 2}
    drain()
    assert Batch.objects.get().finished_at


def test_async_version_and_generator_are_accepted():
    results = async_to_sync(aenqueue_many)(add.prepare(number) for number in range(3))

    assert [result.args for result in results] == [[0], [1], [2]]
    assert Job.objects.count() == 3


@pytest.mark.parametrize("calls", [[], (), iter([])])
def test_no_calls_enqueue_nothing(calls, django_assert_num_queries):
    with django_assert_num_queries(0):
        assert len(enqueue_many(calls)) == 0


def test_signal_is_sent_for_each_job():
    seen = []

    def note(sender, task_result, **kwargs):
        seen.append((task_result.task.func, task_result.args))

    signals.task_enqueued.connect(note)
    try:
        enqueue_many([add.prepare(1), nothing.prepare(), other_add.prepare(2)])
    finally:
        signals.task_enqueued.disconnect(note)
    assert seen == [(add.func, [1]), (nothing.func, []), (add.func, [2])]


class TestBadInput:
    @pytest.mark.parametrize(
        "value", [None, (1,), {"a": 1}, add, 5, "add", add.call, [add.prepare(1)]]
    )
    def test_value_that_is_no_call_is_named_with_its_place(self, value):
        with pytest.raises(TypeError, match=r"calls\[1\]: .* is not a call\. Give .*prepare"):
            enqueue_many([add.prepare(1), value])

        assert not Job.objects.exists()

    @pytest.mark.parametrize("calls", [None, 5, add.prepare(1), add])
    def test_value_that_is_no_list_is_refused(self, calls):
        with pytest.raises(TypeError, match="is not a list of calls"):
            enqueue_many(calls)
        with pytest.raises(TypeError, match="is not a list of calls"):
            add.enqueue_many(calls)

    @pytest.mark.parametrize(
        ("bad", "error", "message"),
        [
            (add.prepare(object()), TypeError, "argument 'a': Unsupported type"),
            (add.prepare(), TypeError, "missing a required argument: 'a'"),
            (add.prepare("\0"), ValueError, "NUL character"),
            (nothing.prepare(1), TypeError, "too many positional arguments"),
        ],
    )
    def test_bad_call_among_many_is_named_and_nothing_enqueued(self, bad, error, message):
        calls = [(add if number % 2 else other_add).prepare(number) for number in range(600)]
        calls[499] = bad

        with pytest.raises(error, match=rf"calls\[499\]: .*{message}"):
            enqueue_many(calls)
        assert Job.objects.count() == Job.objects.using("other").count() == 0

    def test_bad_call_of_one_task_is_named(self):
        calls = [(number,) for number in range(600)]
        calls[499] = (object(),)

        for given in (add, add.using(concurrency=limit(2)), pipeline(add, add)):
            with pytest.raises(TypeError, match=r"calls\[499\]: .*'a': Unsupported type"):
                given.enqueue_many(calls)
        assert not Job.objects.exists()

    def test_error_of_a_key_function_keeps_its_type(self):
        keyed = task(key=lambda a: {}[a])(add.func)

        with pytest.raises(KeyError, match=r"calls\[0\]"):
            enqueue_many([keyed.prepare(1)])

    def test_error_of_a_generator_enqueues_nothing(self):
        def calls():
            yield add.prepare(1)
            raise LookupError("no such row")

        with pytest.raises(LookupError, match=r"calls\[1\]: no such row"):
            enqueue_many(calls())
        assert not Job.objects.exists()

    def test_task_that_the_backend_refuses_is_named(self, settings):
        settings.TASKS = {
            **settings.TASKS,
            "default": {**settings.TASKS["default"], "QUEUES": ["mail"]},
        }

        with pytest.raises(InvalidTask, match=r"calls\[0\]: Queue 'default' is not valid"):
            enqueue_many([add.prepare(1)])


class TestAllOrNone:
    def test_failed_write_leaves_no_keyed_job(self, monkeypatch):
        def fail(*args):
            raise DatabaseError("refused")

        monkeypatch.setattr(engine, "insert", fail)
        with pytest.raises(DatabaseError, match="refused"):
            enqueue_many([add.using(key="a").prepare(1), add.prepare(2), add.prepare(3)])

        assert not Job.objects.exists()

    def test_failed_write_of_one_task_leaves_no_keyed_job(self, monkeypatch):
        def fail(*args):
            raise DatabaseError("refused")

        some_keyed = task(key=lambda a: a or None)(add.func)
        monkeypatch.setattr(engine, "insert", fail)
        with pytest.raises(DatabaseError, match="refused"):
            some_keyed.enqueue_many([(1,), (0,), (0,)])

        assert not Job.objects.exists()

    def test_failed_write_in_one_database_leaves_none_in_the_other(self, monkeypatch):
        insert = engine.insert

        def fail(rows, *args):
            if rows.db == "other":
                raise DatabaseError("refused")
            insert(rows, *args)

        monkeypatch.setattr(engine, "insert", fail)
        with pytest.raises(DatabaseError, match="refused"):
            enqueue_many([each.prepare(1) for each in (add, other_add) * 2])

        assert Job.objects.count() == Job.objects.using("other").count() == 0

    def test_rollback_removes_jobs_of_all_databases(self):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            enqueue_many([add.prepare(1), other_add.prepare(2), nothing.prepare()])
            assert (Job.objects.count(), Job.objects.using("other").count()) == (2, 0)
            raise ZeroDivisionError

        assert Job.objects.count() == Job.objects.using("other").count() == 0

    def test_results_of_several_backends_are_in_order(self):
        results = enqueue_many([add.prepare(1), other_add.prepare(2), nothing.prepare()])

        assert [(result.backend, result.args) for result in results] == [
            ("default", [1]),
            ("other", [2]),
            ("default", []),
        ]
        assert all(result.enqueued_at for result in results)


def test_backend_of_another_kind_enqueues_its_calls(settings):
    add_backend(settings, "Dummy")
    elsewhere = add.using(backend="dummy")

    results = enqueue_many([elsewhere.prepare(1), add.prepare(2), elsewhere.prepare(3)])

    assert [result.args for result in results] == [[1], [2], [3]]
    assert Job.objects.count() == 1
    with pytest.raises(TypeError, match="A pipeline needs a DatabaseBackend"):
        pipeline(elsewhere).prepare(1)


def test_immediate_backend_runs_nothing_if_the_jobs_cannot_be_written(settings, monkeypatch):
    def fail(*args):
        raise DatabaseError("refused")

    add_backend(settings, "Immediate")
    here = run_here.using(backend="immediate")
    ran.clear()
    with monkeypatch.context() as patch, pytest.raises(DatabaseError, match="refused"):
        patch.setattr(engine, "write", fail)
        enqueue_many([here.prepare(1), add.prepare(2)])
    assert ran == []

    results = enqueue_many([here.prepare(1), add.prepare(2), here.prepare(3)])
    assert ran == [1, 3]
    assert [result.args for result in results] == [[1], [2], [3]]
