"""Rows that are inserted many at a time are those that the ORM would insert."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import DataError, IntegrityError, connection, transaction
from django.utils import timezone

from django_dbqueue.engine import fast_sql
from django_dbqueue.engine.enqueue import COLUMNS
from django_dbqueue.models import Execution, Job, statement_size

pytestmark = pytest.mark.django_db(transaction=True)

NAMES = COLUMNS


def rows_of(**columns: list[Any]) -> list[tuple[Any, ...]]:
    number = len(next(iter(columns.values())))
    now = timezone.now()
    common = Job(task="a.task", queue="mail", args=[], run_after=now, enqueued_at=now)
    full = {name: [common.__dict__[name]] * number for name in NAMES} | columns
    full["id"] = [uuid.uuid4() for _ in range(number)]
    return list(zip(*(full[name] for name in NAMES), strict=True))


def inserted(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    fast_sql.insert(Job.objects.all(), NAMES, rows)
    found = {row[0]: row for row in Job.objects.values_list(*NAMES)}
    assert len(found) == len(rows)
    return [found[row[0]] for row in rows]


AWKWARD = [
    "",
    " trailing ",
    "100 % and %s and %(name)s",
    "'quoted' \"twice\" `thrice` \\ backslash \\' \\0",
    "naïve 漢字 😀",
    "-- comment; DROP TABLE",
    "x" * 70_000,
]


@pytest.mark.parametrize("shared", [True, False])
def test_texts_arrive_as_they_are(shared: bool) -> None:
    for text in AWKWARD:
        args = [[text]] * 3 if shared else [[text, number] for number in range(3)]
        rows = rows_of(args=args, kwargs=[{"k": text}] * 3)

        assert inserted(rows) == rows
        Job.objects.all().delete()


def test_none_and_values_of_any_length_in_one_column() -> None:
    rows = rows_of(
        timeout=[None, timedelta(seconds=1), None, timedelta(days=1000), timedelta()],
        batch_id=[None, uuid.uuid4(), None, uuid.uuid4(), None],
        task=["a", "A", "long " * 50, "😀", " "],
        source=[None, {}, None, {"command": "shell"}, None],
        args=[[], [None], ["x" * 300_000], [1.5, True], [{"deep": [1, 2]}]],
    )

    assert inserted(rows) == rows


@pytest.mark.parametrize(
    "number", [1, 2, fast_sql.FEW + 1, statement_size.MOST_ROWS, 2 * statement_size.MOST_ROWS + 1]
)
def test_any_number_of_rows_is_inserted(number: int) -> None:
    rows = rows_of(args=[[each] for each in range(number)])

    assert inserted(rows) == rows


def test_rows_that_are_too_large_for_one_statement_take_several() -> None:
    rows = rows_of(args=[["x" * (statement_size.MOST_CHARACTERS // 3)] for _ in range(8)])

    assert inserted(rows) == rows


def test_invalid_value_of_all_rows_or_of_one_is_refused_with_all_rows() -> None:
    long = "x" * 300
    for columns in ({"task": [long] * 3}, {"task": ["a", long, "b"]}):
        # SQLite has no limit of a text's length.
        if connection.vendor != "sqlite":
            with pytest.raises(DataError), transaction.atomic():
                fast_sql.insert(Job.objects.all(), NAMES, rows_of(**columns))
    row, *_ = rows_of(args=[[]])
    with pytest.raises(IntegrityError), transaction.atomic():
        fast_sql.insert(Job.objects.all(), NAMES, [row, row])
    assert not Job.objects.exists()


def test_rows_of_another_table_that_share_nothing() -> None:
    now = timezone.now()
    names = ["job_id", "attempt", "outcome", "process", "claimed_at", "started_at", "finished_at"]
    names += ["error_type", "message", "traceback", "log"]
    values = []
    for number, outcome in enumerate(["successful", "failed"]):
        times = [now.replace(year=2000 + number, microsecond=micro) for micro in range(3)]
        values.append(
            (
                uuid.uuid4(),
                number,
                outcome,
                f"p{number}",
                *times,
                *map(str, range(number, number + 4)),
            )
        )

    fast_sql.insert(Execution.objects.all(), names, values)

    assert sorted(Execution.objects.values_list(*names), key=lambda row: row[1]) == values
