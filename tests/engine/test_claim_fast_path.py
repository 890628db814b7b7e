"""Fast path of a claim: an idle worker claims from the lane of a notification without a scan."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, connections
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext

from django_dbqueue.core.notify import parse_payload
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.engine.claim_fast_path import FastClaim, LockingClaim
from django_dbqueue.models import Job, Process, Queue, TaskState
from django_dbqueue.models.enums import Lane
from django_dbqueue.models.expressions import Now
from django_dbqueue.runtime.connections import close_connections, prepare
from django_dbqueue.runtime.worker import executor
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.lane_cursors import LaneCursors
from django_dbqueue.runtime.worker.task_call import ThreadCall

from .. import direct, tasks
from ..conftest import LONG, a_process, all_claimed, until

pytestmark = pytest.mark.django_db

IS_POSTGRESQL = connection.vendor == "postgresql"
ONLY_POSTGRESQL = pytest.mark.skipif(not IS_POSTGRESQL, reason="It is PostgreSQL's way alone.")
# The statements of a claim on the fast path.
FAST = ["UPDATE"] if IS_POSTGRESQL else ["SELECT", "UPDATE"]


@pytest.fixture
def claimer(process, monkeypatch):
    """Return an idle claimer, whose last scan found no jobs."""
    monkeypatch.setattr(LaneCursors, "LONG", float("inf"))  # On a busy machine a scan may be slow.
    claimer = idle(Claimer("default", process, QueueSelector(("*",))))
    claimer._ensure_rows({"default"})
    return claimer


def idle(claimer: Claimer) -> Claimer:
    assert all_claimed(claimer, 10) == []
    return claimer


def claim_after_notify(
    claimer: Claimer, lane: str = "default,0", limit: int = 10
) -> tuple[list[Job], list[str]]:
    """Claim after a NOTIFY of ``lane``; return the jobs and the kinds of statements."""
    claimer.on_notify(lane)
    with CaptureQueriesContext(connection) as seen:
        jobs = all_claimed(claimer, limit)
    return jobs, [query["sql"].split()[0] for query in seen]


@pytest.mark.parametrize("is_fast", [True, False])
def test_clock_of_claim_includes_waits_for_its_locks_and_commit(
    process, claimer, monkeypatch, is_fast
):
    """Otherwise a job that expires starts as much too late."""
    tasks.add.enqueue(1)
    execute, wait = CursorWrapper.execute, 0.2

    def execute_slowly(self, *args):
        answer = execute(self, *args)
        time.sleep(wait)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "execute", execute_slowly)
        (job,) = claim_after_notify(claimer)[0] if is_fast else all_claimed(claimer, 10)
        patch.undo()
    now = Process.objects.values_list(Now(), flat=True)[0]

    assert abs((job.now() - now).total_seconds()) < wait


@pytest.mark.parametrize("selector", ["*", "mail"])
def test_warm_up_claims_nothing_and_caches_the_statement(process, selector):
    claimer = Claimer("default", process, QueueSelector((selector,)))
    queue = "mail" if selector == "mail" else "default"
    tasks.add.using(queue_name=queue).enqueue(1)
    claimer.warm_up()
    assert Job.objects.get().state == Job.State.READY

    claimer._known, claimer.idle = {queue}, True
    jobs, statements = claim_after_notify(claimer, lane=f"{queue},0")
    assert (len(jobs), statements, claimer._at_once.cache_info().misses) == (1, FAST, 1)


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(IS_POSTGRESQL, reason="There the claim is one statement, and repeats itself.")
def test_claim_that_another_transaction_overtakes_falls_back_to_a_scan(claimer, monkeypatch):
    """Idle workers look at the same moment; an error would make this one drop its connection."""
    overtaken = []

    def own(*args):
        overtaken.append(args)
        raise OperationalError from RuntimeError(1213, "Deadlock found when trying to get lock")

    monkeypatch.setattr(LockingClaim, "_own", own)
    tasks.add.enqueue(1)

    jobs, _statements = claim_after_notify(claimer)

    assert (len(overtaken), len(jobs)) == (1, 1)
    assert Job.objects.get().attempt == 1


def test_notified_lane_is_claimed_without_a_scan(claimer, process):
    tasks.add.enqueue_many([(number,) for number in range(5)])

    jobs, statements = claim_after_notify(claimer, limit=4)

    assert statements == FAST
    assert [job.args for job in jobs] == [[0], [1], [2], [3]]
    assert [(job.state, job.attempt, job.process_id) for job in jobs] == [
        ("running", 1, process.pk)
    ] * 4
    assert list(Job.objects.running().order_by("id").values_list("pk", "attempt")) == [
        (job.pk, 1) for job in jobs
    ]


def test_dead_process_claims_nothing(claimer):
    tasks.add.enqueue(1)
    Process.objects.all().erase()

    jobs, statements = claim_after_notify(claimer)

    assert (jobs, statements[0]) == ([], FAST[0])
    assert Job.objects.get().state == "ready"


def test_fast_path_job_equals_ordinary_claim(claimer, claim, backend):
    tasks.add.using(metadata={"who": "me"}).enqueue(1, b=2)
    ((job,), _statements) = claim_after_notify(claimer)
    direct.release([job])

    (other,) = claim()

    differing = ("clock", "claimed_at", "started_at", "_state", "process_id", "db_now", "attempt")
    assert {k: v for k, v in vars(job).items() if k not in differing} == {
        k: v for k, v in vars(other).items() if k not in differing
    }
    assert job.claimed_at == job.started_at
    direct.settle([executor.run(ThreadCall(other), backend)])
    assert Job.objects.get().result == 3


def test_statement_is_composed_once(claimer, monkeypatch):
    compose, composed = FastClaim.__init__, []
    monkeypatch.setattr(
        FastClaim, "__init__", lambda *args: composed.append(args) or compose(*args)
    )
    for limit in (1, 2, 3):
        tasks.add.enqueue_many([(1,), (2,)])
        assert len(claim_after_notify(claimer, limit=limit)[0]) == min(2, limit)
        Job.objects.filter(state="ready").delete()
        idle(claimer)

    assert len(composed) == 1


@ONLY_POSTGRESQL
@pytest.mark.parametrize(("pooled", "planned"), [(False, 1), (True, 0)])
def test_statement_is_prepared_unless_connection_is_pooled(process, monkeypatch, pooled, planned):
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


@ONLY_POSTGRESQL
@pytest.mark.django_db(databases=["default", "other"])
def test_statement_uses_quoting_of_its_own_database(process, monkeypatch):
    """The default database may be of another vendor."""
    monkeypatch.setattr(connections["default"].ops, "quote_name", lambda name: f"`{name}`")
    claimer = Claimer("other", process, QueueSelector(("*",)))

    assert "`" not in claimer._at_once(Lane("default", 0))._sql


def test_claim_creates_row_of_new_queue(process):
    claimer = idle(Claimer("default", process, QueueSelector(("*",))))
    Job.objects.create(task="t", queue="seldom")

    assert len(claim_after_notify(claimer, "seldom,0")[0]) == 1
    assert Queue.objects.filter(name="seldom").exists()


def test_higher_priority_lane_is_claimed_first(claimer):
    tasks.add.using(priority=-5).enqueue(1)
    tasks.add.using(priority=5).enqueue(2)
    claimer.on_notify("default,-5")

    assert [job.args for job in claim_after_notify(claimer, "default,5", limit=1)[0]] == [[2]]


def test_claimed_job_is_not_claimed_twice(claimer):
    tasks.add.enqueue(1)
    other = another_idle_claimer(claimer)

    assert len(claim_after_notify(claimer)[0]) == 1
    assert claim_after_notify(other)[0] == []


def another_idle_claimer(claimer: Claimer) -> Claimer:
    other = Claimer("default", a_process("another"), QueueSelector(("*",)))
    other.idle = True
    return other


@pytest.mark.parametrize("until", [None, timedelta(hours=1)])
def test_claim_skips_paused_queue(claimer, until):
    tasks.add.enqueue(1)
    Queue.objects.named("default").pause(until)

    assert claim_after_notify(claimer)[0] == []


def test_claim_skips_paused_task(claimer):
    tasks.add.enqueue(1)
    tasks.fail.enqueue("x")
    TaskState.objects.named(tasks.add.module_path).pause()

    jobs, _statements = claim_after_notify(claimer)

    assert [job.task for job in jobs] == [tasks.fail.module_path]


def test_queue_limit_counts_running_jobs(claimer):
    Queue.objects.named("default").restrict(1)
    tasks.add.enqueue_many([(1,), (2,)])

    jobs, statements = claim_after_notify(claimer)

    assert (len(jobs), statements.count("SELECT") > 2) == (1, True)


def test_queue_limit_from_settings_applies(process):
    claimer = idle(Claimer("default", process, QueueSelector(("*",)), Options(limit=1)))
    tasks.add.enqueue_many([(1,), (2,)])

    assert len(claim_after_notify(claimer)[0]) == 1


def test_limited_jobs_fall_back_to_ordinary_claim(claimer):
    tasks.one_at_a_time.enqueue_many([(), ()])

    jobs, statements = claim_after_notify(claimer)

    assert len(jobs) == 1
    assert statements[0] == FAST[0]
    assert sorted(Job.objects.values_list("state", flat=True)) == ["blocked", "running"]


def test_busy_claimer_claims_lanes_in_priority_order(claimer):
    tasks.add.enqueue(1)
    Queue.objects.named("default").pause()
    assert claim_after_notify(claimer)[0] == []  # Not idle any more: the paused queue has a job.
    tasks.add.using(priority=-5).enqueue(2)
    tasks.add.using(priority=5).enqueue(3)
    Queue.objects.named("default").resume()
    claimer._read_at = float("-inf")

    assert [job.args for job in claim_after_notify(claimer, "default,-5", limit=1)[0]] == [[3]]


def test_notify_for_other_queue_is_ignored(process):
    claimer = Claimer("default", process, QueueSelector(("mail",)))

    assert not claimer.on_notify("default,0")
    assert claimer.on_notify("mail,0")
    assert claimer.on_notify("mail")


def test_payload_accepts_queue_name_with_space_and_number():
    assert parse_payload("a queue 5") == ("a queue 5", None)
    assert parse_payload("a queue,-5") == ("a queue", -5)


@ONLY_POSTGRESQL
def test_job_enqueued_from_sql_is_claimed_in_one_statement(claimer):
    with connection.cursor() as cursor:
        cursor.execute("SELECT dbqueue_enqueue('tests.tasks.add', '[1]'::jsonb, priority => 7)")
    jobs, statements = claim_after_notify(claimer, "default,7")

    assert (len(jobs), statements) == (1, FAST)


@ONLY_POSTGRESQL
@pytest.mark.django_db(transaction=True)
def test_idle_worker_does_not_rescan_after_each_notify(worker, monkeypatch):
    claim, claims = Claimer.claim, []
    monkeypatch.setattr(Claimer, "claim", lambda *args: claims.append(args) or claim(*args))
    worker()
    until(lambda: claims and claims[-1][0].idle)
    time.sleep(0.2)
    before = len(claims)

    tasks.nothing.enqueue().wait(timeout=LONG)
    time.sleep(0.3)

    # One scan on the NOTIFY, one right after it, one after the NOTIFY throttle, and one poll.
    # Under load the second is late and doubles as the third.
    assert 2 <= len(claims) - before <= 6
