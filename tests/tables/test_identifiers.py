"""Identifiers are equal only if Python compares them as equal, with any collation of the database."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection

from django_dbqueue import recurring
from django_dbqueue.compat import task_backends
from django_dbqueue.core.error_reports import ErrorReport
from django_dbqueue.core.options import Options
from django_dbqueue.core.queue_selector import QueueSelector
from django_dbqueue.models import (
    Execution,
    Failure,
    Job,
    Process,
    Queue,
    RecurringTask,
    Semaphore,
    TaskState,
)
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.models.identifier import IdentifierField
from django_dbqueue.runtime.scheduler import Scheduler
from django_dbqueue.runtime.worker.claimer import Claimer
from django_dbqueue.testing import drain

from .. import tasks
from ..conftest import all_claimed

pytestmark = pytest.mark.django_db(transaction=True)

# They differ by case, accents, a trailing space, normal form (composed and decomposed), width, ß, and characters beyond the BMP.
ALIKE = [
    *("mail", "Mail", "MAIL", "mäil", "mail ", "ma\u0308il", "ｍail", "maıl"),
    *("strasse", "straße", "mail😀", "mail😁", "mail𝒜", "mail\u200b"),
]


def test_similar_keys_are_distinct():
    task = tasks.index_document
    for text in ALIKE:
        task.using(key=text).enqueue(1)
    task.enqueue_many([(1,), (2,)])

    assert sorted(
        Job.objects.filter(key__startswith=f"{task.module_path} ").values_list("key", flat=True)
    ) == sorted(
        [f"{task.module_path} {text}" for text in ALIKE]
        + [f"{task.module_path} {number}" for number in (1, 2)]
    )


def test_keys_are_sorted_as_in_python():
    task = tasks.index_document
    for text in ALIKE:
        task.using(key=text).enqueue(1)

    keys = list(Job.objects.order_by("key").values_list("key", flat=True))

    assert keys == sorted(keys)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite compares bytes by default.")
def test_identifiers_have_a_binary_collation():
    fields = [
        (model._meta.db_table, field.column)
        for model in apps.get_app_config("dbqueue").get_models()
        for field in model._meta.local_fields
        if isinstance(field, IdentifierField)
    ]
    if connection.vendor == "postgresql":
        schema, collation = "current_schema()", "C"
    else:
        schema = "database()"
        collation = "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, column_name FROM information_schema.columns"
            f" WHERE table_schema = {schema} AND collation_name = %s",
            [collation],
        )
        found = set(cursor.fetchall())

    assert len(fields) > 10
    assert set(fields) <= found


def test_similar_limit_keys_do_not_limit_each_other():
    tasks.charge.enqueue_many([(text,) for text in ALIKE])

    assert drain() == len(ALIKE)

    assert Semaphore.objects.count() == len(ALIKE)
    assert Job.objects.filter(state="successful").count() == len(ALIKE)


def test_pause_does_not_affect_similar_queues(process):
    for text in ALIKE:
        tasks.nothing.using(queue_name=text).enqueue()
    Queue.objects.named("mail").pause()
    claimer = Claimer("default", process, QueueSelector(("*",)))

    assert sorted(job.queue for job in all_claimed(claimer, 100)) == sorted(ALIKE[1:])
    assert sorted(Queue.objects.values_list("name", flat=True)) == sorted(ALIKE)


def test_worker_does_not_serve_similar_queues(process):
    for text in ALIKE:
        tasks.nothing.using(queue_name=text).enqueue()

    jobs = all_claimed(Claimer("default", process, QueueSelector(("mail",)), Options()), 100)

    assert [job.queue for job in jobs] == ["mail"]


def test_similar_recurring_tasks_have_separate_rows():
    for text in ALIKE:
        recurring(every=timedelta(hours=1), name=text)(tasks.nothing)

    Scheduler(task_backends["default"]).turn(True)

    assert sorted(RecurringTask.objects.values_list("name", flat=True)) == sorted(ALIKE)


def test_pause_does_not_affect_similar_tasks():
    TaskState.objects.named("shop.tasks.mail").pause()

    assert not TaskState.objects.filter(name="shop.tasks.Mail").exists()
    assert (
        Job.objects.exclude(task__in=TaskState.objects.names_of_paused())
        .filter(task="shop.tasks.Mail")
        .count()
        == 0
    )


@pytest.mark.parametrize(
    ("model", "field", "values"),
    [
        (Failure, "fingerprint", {"error_type": "E", "message": "", "location": ""}),
        (Failure, "error_type", {"message": "", "location": ""}),
        (Failure, "location", {"error_type": "E", "message": ""}),
        (
            Process,
            "name",
            {"kind": "worker", "hostname": "h", "pid": 1, "expires_at": now_plus(60)},
        ),
        (
            Execution,
            "process",
            {
                "claimed_at": now_plus(0),
                "started_at": now_plus(0),
                "finished_at": now_plus(0),
                "outcome": "failed",
            },
        ),
    ],
)
def test_lookup_distinguishes_similar_identifiers(model, field, values):
    job = Job.objects.create(task="t", queue="q")
    for number, text in enumerate(ALIKE):
        more = {"job": job, "attempt": number} if model is Execution else {}
        if model is Failure:
            more = {"fingerprint": str(number)}
        model.objects.create(**{**values, **more, field: text})

    assert [model.objects.filter(**{field: text}).count() for text in ALIKE] == [1] * len(ALIKE)


def test_number_of_groups_is_bounded_for_each_of_two_similar_locations(monkeypatch):
    monkeypatch.setattr("django_dbqueue.models.failure.MOST_ALIKE", 3)
    for location in ("shop/tasks.py:send", "shop/tasks.py:Send"):
        for number in range(6):
            report = ErrorReport(
                type="E", message="", traceback="", location=location, pattern=str(number)
            )
            Failure.objects.identify({report.fingerprint: (report, "")})

    locations = Counter(Failure.objects.values_list("location", flat=True))
    assert locations == {"shop/tasks.py:send": 4, "shop/tasks.py:Send": 4}


@pytest.mark.parametrize("text", ["MAIL", "mail", "s/Ma"])
def test_search_without_regard_to_case_finds_identifiers(text):
    """As the search of the admin's lists is."""
    Queue.objects.create(name="orders/Mail")
    Queue.objects.create(name="100% other_one")

    assert [row.name for row in Queue.objects.filter(name__icontains=text)] == ["orders/Mail"]
    assert not Queue.objects.filter(name__icontains="s_M").exists()


def test_system_checks_accept_long_unique_text(capsys):
    call_command("check", databases=[connection.alias])

    assert "W003" not in "".join(capsys.readouterr())
