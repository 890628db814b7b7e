"""Limits of jobs that were enqueued by SQL: their first claim decides them."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_dbqueue import Rate, limit
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.models import Execution, Job, Slot
from django_dbqueue.registry import unlimited_tasks
from django_dbqueue.runtime.worker import executor
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.task_call import ThreadCall
from django_dbqueue.testing import drain

from .. import direct, tasks
from ..conftest import all_claimed

pytestmark = pytest.mark.django_db
State = Job.State
ONE = {"key": "tests.tasks.add", "max_running": 1, "discard": False}
SLOW = {"key": "rate tests.tasks.add", "interval": 600.0, "burst": 1}


def by_sql(task, *args, **columns) -> Job:
    """Insert a row as SQL does: without the policy and the limits of its task."""
    path = f"tests.tasks.{task}"
    given = {"queue": "default", "args": list(args), "max_attempts": 0, **columns}
    return Job.objects.create(task=path, **given)


@pytest.fixture
def claimer(process) -> Claimer:
    return a_claimer(process)


def a_claimer(process) -> Claimer:
    """Return a claimer without cursors, which finds all ready jobs."""
    return Claimer("default", process, QueueSelector(("*",)))


def states() -> list[str]:
    return list(Job.objects.order_by("pk").values_list("state", flat=True))


def test_limit_of_the_task_holds(claimer):
    jobs = [by_sql("charge", 17) for _ in range(4)]

    claimed = all_claimed(claimer, 10)

    assert [job.pk for job in claimed] == [job.pk for job in jobs[:2]]
    assert states() == ["running", "running", "blocked", "blocked"]
    assert Slot.objects.taken().count() == 2
    python = tasks.charge.enqueue(17)
    want = Job.objects.get(pk=python.id).limits
    assert [job.limits for job in Job.objects.all()] == [want] * 5


def test_python_and_sql_share_the_slots_of_a_key(claimer, backend):
    tasks.charge.enqueue(17)
    by_sql("charge", kwargs={"account": 17})
    tasks.charge.enqueue(17)
    by_sql("charge", 18)

    claimed = all_claimed(claimer, 10)

    assert states() == ["running", "running", "blocked", "running"]
    direct.settle([executor.run(ThreadCall(job), backend) for job in claimed])
    again = all_claimed(a_claimer(claimer._process), 10)
    assert [job.pk for job in again] == [Job.objects.order_by("pk")[2].pk]


def test_blocked_job_runs_with_the_policy_of_its_task():
    for _ in range(3):
        by_sql("one_at_a_time", kwargs={"seconds": 0})

    drain()

    assert states() == ["successful"] * 3
    assert set(Job.objects.values_list("max_attempts", flat=True)) == {1}


def test_rate_of_the_task_holds(claimer):
    for number in range(3):
        by_sql("call_service", number)

    assert len(all_claimed(claimer, 10)) == 1
    assert states()[0] == "running"
    assert set(states()[1:]) <= {"blocked", "scheduled"}


def test_limit_that_discards_holds(claimer, backend):
    by_sql("scan")
    by_sql("scan")

    claimed = all_claimed(claimer, 10)
    direct.settle([executor.run(ThreadCall(job), backend) for job in claimed])

    assert states() == ["successful", "discarded"]


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"concurrency": [ONE]}, [ONE, {"key": "rate tests.tasks.add", "burst": 1}]),
        ({"rate": [SLOW]}, [{"key": "tests.tasks.add", "max_running": 5}, SLOW]),
        ({"concurrency": []}, [{"key": "rate tests.tasks.add", "burst": 1}]),
        ({"rate": []}, [{"key": "tests.tasks.add", "max_running": 5}]),
        ({"concurrency": [ONE], "rate": []}, [ONE]),
        ({"concurrency": [], "rate": []}, None),
        ({"timeout": 5}, [{"max_running": 5}, {"burst": 1}]),
        (None, [{"max_running": 5}, {"burst": 1}]),
    ],
)
def test_limits_of_the_call_replace_those_of_their_kind(claimer, monkeypatch, options, limits):
    limited = tasks.add.using(concurrency=limit(5), rate=Rate(100))
    monkeypatch.setattr(tasks, "add", limited)
    by_sql("add", 1, options=options)

    (job,) = all_claimed(claimer, 10)

    stored = Job.objects.get().limits
    assert stored == job.limits
    assert (
        stored is limits is None
        or [
            {name: found[name] for name in want} for found, want in zip(stored, limits, strict=True)
        ]
        == limits
    )


def test_lifted_limits_stay_lifted_after_a_release(claimer):
    by_sql("one_at_a_time", options={"concurrency": []})
    by_sql("one_at_a_time", options={"concurrency": []})
    direct.release(all_claimed(claimer, 10))

    assert len(all_claimed(a_claimer(claimer._process), 10)) == 2


def test_limits_in_the_row_stand():
    by_sql("one_at_a_time", limits=[ONE])

    drain()

    assert Job.objects.get().limits == [ONE]


def test_options_with_limits_do_not_disturb_the_run():
    by_sql("fail", options={"concurrency": [ONE], "rate": [], "max_attempts": 3})

    drain()

    job = Job.objects.get()
    assert (job.max_attempts, job.limits) == (3, [ONE])


@pytest.mark.parametrize(
    ("task", "columns", "said"),
    [
        ("charge", {"args": []}, "missing a required argument"),
        ("charge", {"args": [[1, 2]]}, "must be text of 1 to 200 characters"),
        ("charge", {"args": 7}, "TypeError"),
        ("charge", {"args": [1], "kwargs": {"no_such": 1}}, "no_such"),
        ("add", {"args": [1], "options": {"concurrency": 5}}, "TypeError"),
        ("add", {"args": [1], "options": {"rate": None}}, "TypeError"),
    ],
)
def test_job_whose_limits_cannot_be_computed_fails_with_the_reason(task, columns, said):
    job = by_sql(task, **columns)
    behind = by_sql("add", 1)

    drain()

    job.refresh_from_db()
    assert job.state == "failed"
    assert said in Execution.objects.get(job=job).message
    behind.refresh_from_db()
    assert behind.state == "successful"


@pytest.mark.parametrize("limits", ["ab", [1], [{"key": "a"}], [{"max_running": 1}]])
def test_job_with_unreadable_limits_is_discarded(limits):
    job = by_sql("add", 1, options={"concurrency": limits})
    behind = by_sql("add", 1)

    drain()

    job.refresh_from_db()
    behind.refresh_from_db()
    assert (job.state, behind.state) == ("discarded", "successful")


def test_key_function_may_fail_in_a_query_without_harm_to_the_claim(monkeypatch):
    def by_query(account):
        Job.objects.extra(where=["no_such_column = 1"]).exists()

    broken = tasks.charge.using(concurrency=limit(1, key=by_query))
    monkeypatch.setattr(tasks, "charge", broken)
    job = by_sql("charge", 1)
    behind = by_sql("add", 1)

    drain()

    job.refresh_from_db()
    behind.refresh_from_db()
    assert (job.state, behind.state) == ("failed", "successful")
    assert "OperationalError" in (text := Execution.objects.get(job=job).message) or (
        "ProgrammingError" in text
    )


def test_key_function_may_exit_without_harm_to_the_worker(monkeypatch):
    broken = tasks.charge.using(concurrency=limit(1, key=lambda account: exit(account)))
    monkeypatch.setattr(tasks, "charge", broken)
    job = by_sql("charge", 1)

    drain()

    job.refresh_from_db()
    assert job.state == "failed"


def test_job_of_an_unknown_task_is_left_to_other_workers():
    by_sql("no_such_task")

    drain()

    job = Job.objects.get()
    assert (job.state, job.max_attempts, job.limits) == ("scheduled", 0, None)


def test_retry_keeps_the_limits_of_the_first_claim(claimer, monkeypatch):
    monkeypatch.setattr(tasks, "fail", tasks.fail.using(concurrency=limit(3), max_attempts=2))
    by_sql("fail")
    drain()
    first = Job.objects.get().limits
    monkeypatch.setattr(tasks, "fail", tasks.fail.using(concurrency=limit(7)))
    Job.objects.update(state="ready")

    (job,) = all_claimed(claimer, 10)

    assert job.limits == first and first[0]["max_running"] == 3


def test_claim_of_python_jobs_runs_no_statement_for_limits(claimer):
    tasks.add.enqueue_many([(number,) for number in range(5)])
    claimer._ensure_rows({"default"})
    with CaptureQueriesContext(connection) as seen:
        assert len(all_claimed(claimer, 10)) == 5
    before = len(seen)
    for number in range(5):
        by_sql("add", number)
    again = a_claimer(claimer._process)
    again._ensure_rows({"default"})

    with CaptureQueriesContext(connection) as seen:
        assert len(all_claimed(again, 10)) == 5

    assert len(seen) == before


# The fast path


@pytest.mark.parametrize(
    ("task", "columns", "is_fast"),
    [
        ("add", {}, True),
        ("charge", {}, False),
        ("call_service", {}, False),
        ("no_such_task", {}, False),
        ("add", {"options": {"concurrency": [ONE]}}, False),
        ("add", {"options": {"timeout": 5}}, False),
        ("charge", {"max_attempts": 1}, True),
    ],
)
def test_fast_path_takes_no_job_whose_limits_are_undecided(claimer, task, columns, is_fast):
    claimer._ensure_rows({"default"})
    assert all_claimed(claimer, 10) == []
    by_sql(task, 1, **columns)
    claimer.on_notify("default,0")

    with CaptureQueriesContext(connection) as seen:
        (job,) = all_claimed(claimer, 10)

    assert (len(seen) == (1 if connection.vendor == "postgresql" else 2)) is is_fast
    is_limited = task in ("charge", "call_service") or "concurrency" in columns.get("options", {})
    assert bool(job.limits) is (is_limited and not is_fast)


def test_variant_of_a_limited_task_does_not_make_it_unlimited(monkeypatch):
    monkeypatch.setattr(tasks, "free", tasks.charge.using(concurrency=()), raising=False)

    found = unlimited_tasks(Options().task_modules)

    assert "tests.tasks.add" in found
    assert "tests.tasks.charge" not in found
