"""A worker that has nothing to do claims what it is told of with one statement."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from django_dbqueue.core.notify import parse_payload
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.engine.claim_fast_path import SingleStatementClaim
from django_dbqueue.models import Job, Process, Queue, TaskState
from django_dbqueue.models.enums import Lane
from django_dbqueue.runtime.connections import close_connections, prepare
from django_dbqueue.runtime.worker import executor
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.task_call import ThreadCall

from .. import direct, tasks
from ..conftest import LONG, a_process, all_claimed, until

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif(
        connection.vendor != "postgresql", reason="Nobody is told of jobs elsewhere"
    ),
]


@pytest.fixture
def claimer(process):
    """Idle: it has looked, and there was nothing."""
    claimer = idle(Claimer("default", process, QueueSelector(("*",))))
    claimer._know({"default"})
    return claimer


def idle(claimer: Claimer) -> Claimer:
    assert all_claimed(claimer, 10) == []
    return claimer


def told(claimer: Claimer, lane: str = "default,0", limit: int = 10) -> tuple[list[Job], list[str]]:
    """What it claims when it is told of a lane, and the statements that that takes."""
    claimer.on_notify(lane)
    with CaptureQueriesContext(connection) as seen:
        jobs = all_claimed(claimer, limit)
    return jobs, [query["sql"].split()[0] for query in seen]


@pytest.mark.parametrize("selector", ["*", "mail"])
def test_to_warm_up_claims_nothing_and_composes_the_claim_that_follows(process, selector):
    claimer = Claimer("default", process, QueueSelector((selector,)))
    queue = "mail" if selector == "mail" else "default"
    tasks.add.using(queue_name=queue).enqueue(1)
    claimer.warm_up()
    assert Job.objects.get().state == Job.State.READY

    claimer._known, claimer.idle = {queue}, True
    jobs, statements = told(claimer, lane=f"{queue},0")
    assert (len(jobs), statements, claimer._at_once.cache_info().misses) == (1, ["UPDATE"], 1)


def test_one_statement_claims_what_it_is_told_of(claimer, process):
    tasks.add.enqueue_many([(number,) for number in range(5)])

    jobs, statements = told(claimer, limit=3)

    assert statements == ["UPDATE"]
    assert [job.args for job in jobs] == [[0], [1], [2]]
    assert [(job.state, job.attempt, job.process_id) for job in jobs] == [
        ("running", 1, process.pk)
    ] * 3
    assert list(Job.objects.running().order_by("id").values_list("pk", "attempt")) == [
        (job.pk, 1) for job in jobs
    ]


def test_a_process_that_was_declared_dead_claims_nothing_though_it_does_not_know_it(claimer):
    tasks.add.enqueue(1)
    Process.objects.all().erase()

    jobs, statements = told(claimer)

    assert (jobs, statements[0]) == ([], "UPDATE")
    assert Job.objects.get().state == "ready"


def test_a_job_that_was_claimed_so_is_like_any_other(claimer, claim, backend):
    tasks.add.using(metadata={"who": "me"}).enqueue(1, b=2)
    ((job,), _statements) = told(claimer)
    direct.release([job])

    (other,) = claim()

    differing = ("clock", "claimed_at", "started_at", "_state", "process_id", "db_now", "attempt")
    assert {k: v for k, v in vars(job).items() if k not in differing} == {
        k: v for k, v in vars(other).items() if k not in differing
    }
    assert job.claimed_at == job.started_at
    direct.settle([executor.run(ThreadCall(other), backend)])
    assert Job.objects.get().result == 3


def test_its_statement_is_composed_once(claimer, monkeypatch):
    compose, composed = SingleStatementClaim.__init__, []
    monkeypatch.setattr(
        SingleStatementClaim, "__init__", lambda *args: composed.append(args) or compose(*args)
    )
    for limit in (1, 2, 3):
        tasks.add.enqueue_many([(1,), (2,)])
        assert len(told(claimer, limit=limit)[0]) == min(2, limit)
        Job.objects.filter(state="ready").delete()
        idle(claimer)

    assert len(composed) == 1


@pytest.mark.parametrize(("pooled", "planned"), [(False, 1), (True, 0)])
def test_its_statement_is_planned_once_unless_a_pool_may_give_the_connection_to_others(
    process, monkeypatch, pooled, planned
):
    monkeypatch.setitem(connections.settings["default"], "DISABLE_SERVER_SIDE_CURSORS", pooled)

    def claim():
        prepare("default", 10)
        try:
            at_once = Claimer("default", process, QueueSelector(("*",)))._at_once(
                Lane("default", 0)
            )
            assert [at_once(limit) for limit in (1, 2, 3)] == [[], [], []]
            with connections["default"].cursor() as cursor:
                cursor.execute("SELECT count(*) FROM pg_prepared_statements")
                return cursor.fetchone()[0]
        finally:
            close_connections()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(claim).result() == planned


@pytest.mark.django_db(databases=["default", "other"])
def test_it_is_composed_as_the_queues_own_database_speaks(process, monkeypatch):
    """The default one may be of another kind."""
    monkeypatch.setattr(connections["default"].ops, "quote_name", lambda name: f"`{name}`")
    claimer = Claimer("other", process, QueueSelector(("*",)))

    assert "`" not in claimer._at_once(Lane("default", 0))._sql


def test_its_queue_is_made_known_to_operators(process):
    claimer = idle(Claimer("default", process, QueueSelector(("*",))))
    Job.objects.create(task="t", queue="seldom")

    assert len(told(claimer, "seldom,0")[0]) == 1
    assert Queue.objects.filter(name="seldom").exists()


def test_of_two_lanes_the_higher_goes_first(claimer):
    tasks.add.using(priority=-5).enqueue(1)
    tasks.add.using(priority=5).enqueue(2)
    claimer.on_notify("default,-5")

    assert [job.args for job in told(claimer, "default,5", limit=1)[0]] == [[2]]


def test_nobody_else_gets_it(claimer):
    tasks.add.enqueue(1)
    other = idle_beside(claimer)

    assert len(told(claimer)[0]) == 1
    assert told(other)[0] == []


def idle_beside(claimer: Claimer) -> Claimer:
    other = Claimer("default", a_process("another"), QueueSelector(("*",)))
    other.idle = True
    return other


@pytest.mark.parametrize("until", [None, timedelta(hours=1)])
def test_a_queue_that_was_just_paused_is_left_alone(claimer, until):
    tasks.add.enqueue(1)
    Queue.objects.named("default").pause(until)

    assert told(claimer)[0] == []


def test_a_task_that_was_just_paused_is_left_alone(claimer):
    tasks.add.enqueue(1)
    tasks.fail.enqueue("x")
    TaskState.objects.named(tasks.add.module_path).pause()

    jobs, _statements = told(claimer)

    assert [job.task for job in jobs] == [tasks.fail.module_path]


def test_where_only_so_many_may_run_they_are_counted(claimer):
    Queue.objects.named("default").restrict(1)
    tasks.add.enqueue_many([(1,), (2,)])

    jobs, statements = told(claimer)

    assert (len(jobs), statements.count("SELECT") > 2) == (1, True)


def test_the_settings_limit_of_a_queue_counts_too(process):
    claimer = idle(Claimer("default", process, QueueSelector(("*",)), Options(limit=1)))
    tasks.add.enqueue_many([(1,), (2,)])

    assert len(told(claimer)[0]) == 1


def test_jobs_with_limits_are_claimed_by_the_claim_that_gives_slots(claimer):
    tasks.one_at_a_time.enqueue_many([(), ()])

    jobs, statements = told(claimer)

    assert len(jobs) == 1
    assert statements[0] == "UPDATE"
    assert sorted(Job.objects.values_list("state", flat=True)) == ["blocked", "running"]


def test_while_any_lane_has_jobs_the_order_of_lanes_counts(claimer):
    tasks.add.enqueue(1)
    Queue.objects.named("default").pause()
    assert told(claimer)[0] == []  # It is not idle any more: what is paused is there.
    tasks.add.using(priority=-5).enqueue(2)
    tasks.add.using(priority=5).enqueue(3)
    Queue.objects.named("default").resume()
    claimer._read_at = float("-inf")

    assert [job.args for job in told(claimer, "default,-5", limit=1)[0]] == [[3]]


def test_what_is_not_its_own_does_not_wake_it(process):
    claimer = Claimer("default", process, QueueSelector(("mail",)))

    assert not claimer.on_notify("default,0")
    assert claimer.on_notify("mail,0")
    assert claimer.on_notify("mail")


def test_a_queue_may_look_like_a_queue_and_a_priority():
    assert parse_payload("a queue 5") == ("a queue 5", None)
    assert parse_payload("a queue,-5") == ("a queue", -5)


def test_sql_tells_of_the_lane_too(claimer):
    with connection.cursor() as cursor:
        cursor.execute("SELECT dbqueue_enqueue('tests.tasks.add', '[1]'::jsonb, priority => 7)")
    jobs, statements = told(claimer, "default,7")

    assert (len(jobs), statements) == (1, ["UPDATE"])


@pytest.mark.django_db(transaction=True)
def test_a_worker_that_is_told_of_jobs_does_not_look_for_more_after_each(worker, monkeypatch):
    claim, looks = Claimer.claim, []
    monkeypatch.setattr(Claimer, "claim", lambda *args: looks.append(args) or claim(*args))
    worker()
    until(lambda: looks and looks[-1][0].idle)
    time.sleep(0.2)
    before = len(looks)

    tasks.nothing.enqueue().wait(timeout=LONG)
    time.sleep(0.3)

    # When it is told, right after that, when it would be told again, and once as it polls, which is ten times less often. On a
    # full machine, what is right after that is late, and serves as the next.
    assert 2 <= len(looks) - before <= 6
