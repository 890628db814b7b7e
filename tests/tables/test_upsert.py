"""Rows that are written many at a time are those that the ORM would write."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone

import pytest
from django.db import connection, transaction

from django_dbqueue.models import Job, Slot, StackTrace

pytestmark = pytest.mark.django_db

AT = datetime(2026, 3, 29, 0, 59, 59, 123456, tzinfo=timezone.utc)
TEXTS = [
    " trailing ",
    "100 % and %s and %(name)s",
    "'quoted' \"twice\" `thrice` \\ backslash \\' \\0 \\u0041",
    "naïve 漢字 😀",
    "line\nbreak\ttab",
    '{"a": 1}',
    "null",
]
DOCUMENTS = [[], [None], {}, {"": [1.5, True, None, {"deep": "\\"}]}, "null", 0, ["x" * 70_000]]
TIMES = [
    AT,
    AT.replace(microsecond=0),
    datetime(1970, 1, 1, tzinfo=timezone.utc),
    datetime(9999, 12, 31, tzinfo=timezone.utc),
    AT.astimezone(timezone(timedelta(hours=5, minutes=45))),
]
DURATIONS = [None, timedelta(), timedelta(microseconds=1), timedelta(days=1000, seconds=1.5)]
VALUES = {
    "task": TEXTS,
    "metadata": [*DOCUMENTS, *([text] for text in TEXTS)],
    "run_after": TIMES,
    "expires_at": [None, *TIMES],
    "timeout": DURATIONS,
    "max_attempts": [0, 1, 2**15 - 1],
    "version": [None, -(2**63), 2**63 - 1],
    "batch_id": [None, uuid.UUID(int=0), uuid.uuid4()],
    "has_begun": [True, False],
}


def new_job(**values):
    return Job(task="t", queue="q", args=[1], run_after=AT, enqueued_at=AT, **values)


def columns(job):
    return {field.attname: getattr(job, field.attname) for field in Job._meta.concrete_fields}


@pytest.mark.parametrize("name", VALUES)
def test_values_arrive_as_they_are(name):
    jobs = [new_job(attempt=0, has_begun=False) for _ in VALUES[name]]
    Job.objects.bulk_create(jobs)
    for job, value in zip(jobs, VALUES[name], strict=True):
        setattr(job, name, value)

    Job.objects.save_locked(jobs, [name])

    written = Job.objects.in_bulk()
    assert [columns(written[job.pk]) for job in jobs] == [columns(job) for job in jobs]


def test_only_named_fields_of_existing_rows_change():
    Job.objects.bulk_create([job := new_job()])
    job.task, job.queue, job.priority = "another", "other", 7

    Job.objects.save_locked([job], ["task", "priority"])

    job.refresh_from_db()
    assert (job.task, job.queue, job.priority) == ("another", "q", 7)


def test_a_row_is_found_by_its_key():
    names = ("semaphore", "job", "attempt", "slot_group", "max_running")
    key, fields, job = names[:2], names[2:], uuid.uuid4()
    rows = Slot.objects.all()

    rows.upsert(names, [("a", job, 1, job, 3), ("A", job, 1, job, 3)], key=key, fields=fields)
    rows.upsert(names, [("a", job, 2, job, 4)], key=key, fields=fields)

    found = rows.order_by("attempt").values_list(*names)
    assert list(found) == [("A", job, 1, job, 3), ("a", job, 2, job, 4)]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="a statement costs no round trip")
def test_many_rows_are_few_statements(django_assert_num_queries):
    jobs = Job.objects.bulk_create([new_job(version=number) for number in range(401)])
    for job in jobs:
        job.version = -job.version

    with django_assert_num_queries(1):
        Job.objects.save_locked(jobs, ["version"])

    jobs[0].metadata = jobs[-1].metadata = {"large": "x" * 300_000}
    with django_assert_num_queries(1 if connection.vendor == "postgresql" else 3):
        Job.objects.save_locked(jobs, ["metadata"])

    written = Job.objects.in_bulk()
    assert [columns(written[job.pk]) for job in jobs] == [columns(job) for job in jobs]


def test_nothing_is_written_of_no_rows(django_assert_num_queries):
    with django_assert_num_queries(0):
        Job.objects.save_locked([], ["task"])


def test_a_field_without_a_value_gets_its_default_again():
    Job.objects.bulk_create([job := new_job(attempt=1)])
    for text in ("first", "second"):
        StackTrace.objects.record(job, text, {"default": 7})
        StackTrace.objects.filter(text="first").update(taken_at=AT)

    trace = StackTrace.objects.get()
    assert (trace.text, trace.sessions) == ("second", {"default": 7})
    assert trace.taken_at > AT + timedelta(days=1)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="sent as JSON on PostgreSQL")
@pytest.mark.parametrize("value", [b"bytes", object(), {1}])
def test_value_of_unknown_type_is_refused(value):
    Job.objects.bulk_create([job := new_job()])
    job.task = value

    with pytest.raises(TypeError, match="cannot be sent to the database"), transaction.atomic():
        Job.objects.save_locked([job], ["task"])

    job.refresh_from_db()
    assert job.task == "t"
