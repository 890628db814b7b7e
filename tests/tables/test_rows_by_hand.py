"""Rows inserted by hand, with values that the package never writes."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from django.db import IntegrityError, connection, transaction

from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.models import Job
from django_dbqueue.models.document import Unreadable
from django_dbqueue.models.enums import Lane
from django_dbqueue.models.job import TIMES_OF_A_JOB
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.runtime.worker.executor import run
from django_dbqueue.runtime.worker.task_call import ThreadCall
from django_dbqueue.testing import drain

from .. import direct, tasks
from ..conftest import a_process, is_mysql_itself, skip_if_long_numbers_are_refused

pytestmark = pytest.mark.django_db


def assert_both_jobs_end(by_hand, behind, admin_client):
    behind.refresh()
    assert behind.return_value == 1
    by_hand.refresh_from_db()
    assert by_hand.state in ("failed", "successful", "discarded")
    assert (
        admin_client.get(f"/admin/dbqueue/job/{by_hand.pk}/change/?backend=default").status_code
        == 200
    )


@pytest.mark.parametrize(
    "values",
    [
        {"args": {"a": 1}},
        {"args": "ab"},
        {"args": 7},
        {"kwargs": [1]},
        {"kwargs": "b"},
        {"kwargs": 7},
        {"pipeline": "x", "stage": 0},
        {"pipeline": [], "stage": 3},
        {"metadata": [1]},
        {"limits": "x"},
        {"limits": {"key": "a"}},
        {"limits": [1]},
        {"limits": [{}]},
        {"limits": [{"key": 1, "max_running": 1}]},
        {"limits": [{"key": "", "max_running": 1}]},
        {"limits": [{"key": "a", "max_running": "1"}]},
        {"limits": [{"key": "a", "interval": 0}]},
        {"limits": [{"key": "a", "interval": 1, "burst": None}]},
    ],
    ids=str,
)
def test_job_with_malformed_documents_does_not_block_its_lane(values, admin_client):
    by_hand = Job.objects.create(task="tests.tasks.add", queue="default", **{"args": [1], **values})
    behind = tasks.add.enqueue(1)

    drain()

    assert_both_jobs_end(by_hand, behind, admin_client)


@pytest.mark.parametrize("limits", [{"a": 1}, [{"max_running": 1}], [{"key": 5}], [5], 5, "a"])
def test_job_with_odd_limits_has_a_page_before_and_after_it_is_discarded(limits, admin_client):
    by_hand = Job.objects.create(task="tests.tasks.add", queue="default", args=[1], limits=limits)
    page = f"/admin/dbqueue/job/{by_hand.pk}/change/?backend=default"

    assert admin_client.get(page).status_code == 200
    drain()

    by_hand.refresh_from_db()
    assert by_hand.state == "discarded"
    assert b"Its limits cannot be read." in admin_client.get(page).content


MANY_DIGITS = "9" * 5000
DEEP = {"sqlite": 990, "postgresql": 5000, "mysql": 30}[connection.vendor]
UNDECODABLE = {
    "args": [f"[{MANY_DIGITS}]", "[" * DEEP + "]" * DEEP],
    "kwargs": [f'{{"b": {MANY_DIGITS}}}'],
    "metadata": [f'{{"b": {MANY_DIGITS}}}'],
    "limits": [
        f'[{{"key": "a", "max_running": {MANY_DIGITS}}}]',
        f'[{{"key": "a", "interval": {MANY_DIGITS}}}]',
    ],
    "pipeline": [f"[[{MANY_DIGITS}]]"],
    "result": [MANY_DIGITS],
}


def test_mysql_refuses_numbers_that_python_cannot_read():
    if not is_mysql_itself():
        pytest.skip("MySQL only")
    Job.objects.create(task="tests.tasks.add", queue="default", args=[2**1000, 10**18, 2**64 + 1])
    with connection.cursor() as cursor, pytest.raises(IntegrityError):
        cursor.execute("UPDATE dbqueue_job SET result = %s", [MANY_DIGITS])

    assert Job.objects.get().args == [2**1000, 10**18, 2**64 + 1]


@pytest.mark.parametrize("claim_it", [drain, "at once"], ids=["drain", "at once"])
@pytest.mark.parametrize(
    ("column", "document"),
    [(name, each) for name, documents in UNDECODABLE.items() for each in documents],
)
def test_job_with_undecodable_json_does_not_block_its_lane(
    claim_it, column, document, backend, admin_client
):
    if MANY_DIGITS in document:
        skip_if_long_numbers_are_refused()
    by_hand = Job.objects.create(
        task="tests.tasks.add", queue="default", args=[1], stage=0 if column == "pipeline" else None
    )
    with connection.cursor() as cursor:
        json = "%s::jsonb" if connection.vendor == "postgresql" else "%s"
        cursor.execute(f"UPDATE dbqueue_job SET {column} = {json}", [document])
    behind = tasks.add.enqueue(1)
    if claim_it == "at once":
        if connection.vendor != "postgresql":
            pytest.skip("PostgreSQL only")
        claimed = Claimer("default", a_process("another"), QueueSelector(["*"]))._at_once(
            Lane("default", 0)
        )(10)
        direct.settle([run(ThreadCall(job), backend) for job in claimed])
    drain()

    assert_both_jobs_end(by_hand, behind, admin_client)
    if isinstance(getattr(by_hand, column), Unreadable):
        assert by_hand.state == "failed" or column not in ("args", "kwargs")
        assert backend.get_result(str(by_hand.pk)).is_finished


# finished_at has its own constraint: an unfinished job has none.
COLUMNS = [name for name in TIMES_OF_A_JOB if name != "finished_at"]
UNREADABLE = {
    "postgresql": [
        *[
            (column, value)
            for column in COLUMNS
            for value in ("-infinity", "infinity", "20000-01-01")
        ],
        ("run_after", "0044-03-15 BC"),
        ("timeout", "100000000 years"),
        ("timeout", "-1 second"),
    ],
    "sqlite": [
        *[(column, value) for column in COLUMNS for value in ("never", "", "+20000-01-01")],
        ("timeout", 10**17),
        ("timeout", -1),
    ],
    "mysql": [
        *[
            (column, value)
            for column in COLUMNS
            for value in ("0500-01-01", "0999-12-31 23:59:59.999999", "9999-12-31 00:00:00.000001")
        ],
        ("timeout", 10**17),
        ("timeout", -1),
    ],
}[connection.vendor]


@pytest.mark.parametrize(("column", "value"), UNREADABLE)
def test_job_with_unreadable_time_is_refused(column, value):
    tasks.add.enqueue(1)

    with (
        pytest.raises(IntegrityError, match="dbqueue_job_times"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(f"UPDATE dbqueue_job SET {column} = %s", [value])

    drain()
    assert Job.objects.get().state == "successful"


OF_ANOTHER_TYPE = [
    *[
        ("id", value)
        for value in (
            "x",
            "",
            "0" * 31,
            "ABCDEF" + "0" * 26,
            "018c2d3e-4f5a-7b8c-9d0e-1f2a3b4c5d6e",
            5,
        )
    ],
    ("batch_id", "x"),
    *[
        ("run_after", f"2026-{rest}")
        for rest in (
            "13-45 00:00:00",
            "02-31 00:00:00",
            "02-01 00:00:00.x",
            "02-01T00:00:00",
            "02-01",
        )
    ],
    ("priority", 1.5),
    ("attempt", "x"),
    ("stage", "x"),
    ("version", "x"),
    ("has_begun", "x"),
    ("queue", b"\xff\xfe"),
    ("task", b"\xff\xfe"),
    ("args", b"[1]"),
]


@pytest.mark.parametrize("microsecond", [0, 1, 999_499, 999_500, 999_999])
def test_run_after_keeps_microseconds(microsecond):
    moment = datetime(2026, 12, 31, 23, 59, 59, microsecond, tzinfo=timezone.utc)
    result = tasks.add.using(run_after=moment).enqueue(1)

    assert Job.objects.get(pk=result.id).run_after == moment


@pytest.mark.skipif(
    connection.vendor != "sqlite", reason="Only SQLite stores a value of any type in a column."
)
@pytest.mark.parametrize(("column", "value"), OF_ANOTHER_TYPE, ids=str)
def test_job_with_value_of_wrong_type_is_refused(column, value):
    tasks.add.enqueue(1)

    with (
        pytest.raises(IntegrityError, match="CHECK constraint failed"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute(f"UPDATE dbqueue_job SET {column} = %s", [value])

    drain()
    assert Job.objects.get().state == "successful"
