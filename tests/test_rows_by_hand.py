"""Rows that were inserted by hand, with what the package itself would never write."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection, transaction

from django_dbqueue.models import Job
from django_dbqueue.models.job import TIMES_OF_A_JOB
from django_dbqueue.testing import drain

from . import tasks

pytestmark = pytest.mark.django_db


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
        {"limits": [{"key": 1, "most": 1}]},
        {"limits": [{"key": "", "most": 1}]},
        {"limits": [{"key": "a", "most": "1"}]},
        {"limits": [{"key": "a", "every": 0}]},
        {"limits": [{"key": "a", "every": 1, "burst": None}]},
    ],
    ids=str,
)
def test_job_whose_documents_have_another_shape_does_not_stop_its_lane(values):
    by_hand = Job.objects.create(task="tests.tasks.add", queue="default", **{"args": [1], **values})
    behind = tasks.add.enqueue(1)

    drain()

    behind.refresh()
    assert behind.return_value == 1
    by_hand.refresh_from_db()
    assert by_hand.state in ("failed", "successful", "discarded")


# That a job which is not finished has no finished_at is another constraint.
COLUMNS = [name for name in TIMES_OF_A_JOB if name != "finished_at"]
UNREADABLE = {
    "postgresql": [
        *[(column, value) for column in COLUMNS for value in ("-infinity", "infinity", "20000-01-01")],
        ("run_after", "0044-03-15 BC"),
        ("timeout", "100000000 years"),
        ("timeout", "-1 second"),
    ],
    "sqlite": [
        *[(column, value) for column in COLUMNS for value in ("never", "", "+20000-01-01")],
        ("timeout", 10**17),
        ("timeout", -1),
    ],
    "mysql": [("run_after", "0500-01-01"), ("timeout", 10**17), ("timeout", -1)],
}[connection.vendor]


@pytest.mark.parametrize(("column", "value"), UNREADABLE)
def test_job_with_a_time_that_no_claim_can_read_is_refused(column, value):
    tasks.add.enqueue(1)

    with pytest.raises(IntegrityError, match="dbqueue_job_times"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"UPDATE dbqueue_job SET {column} = %s", [value])

    drain()
    assert Job.objects.get().state == "successful"


OF_ANOTHER_TYPE = [
    *[("id", value) for value in ("x", "", "0" * 31, "ABCDEF" + "0" * 26, "018c2d3e-4f5a-7b8c-9d0e-1f2a3b4c5d6e", 5)],
    ("batch_id", "x"),
    *[
        ("run_after", f"2026-{rest}")
        for rest in ("13-45 00:00:00", "02-31 00:00:00", "02-01 00:00:00.x", "02-01T00:00:00", "02-01")
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


@pytest.mark.skipif(connection.vendor != "sqlite", reason="Elsewhere a column has a type")
@pytest.mark.parametrize(("column", "value"), OF_ANOTHER_TYPE, ids=str)
def test_job_with_a_value_of_another_type_is_refused(column, value):
    tasks.add.enqueue(1)

    with pytest.raises(IntegrityError, match="CHECK constraint failed"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"UPDATE dbqueue_job SET {column} = %s", [value])

    drain()
    assert Job.objects.get().state == "successful"
