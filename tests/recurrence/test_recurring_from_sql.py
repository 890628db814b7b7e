"""Recurring tasks from SQL: ``dbqueue_repeat()`` on PostgreSQL, and plain INSERTs on all databases."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from django.db import DatabaseError, DataError, IntegrityError, connection, transaction

from django_dbqueue import recurring
from django_dbqueue.models import Job, RecurringExecution, RecurringTask
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.runtime.scheduler import Scheduler

from .. import tasks
from ..conftest import skip_if_long_numbers_are_refused

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
VENDOR = connection.vendor
needs_postgresql = pytest.mark.skipif(
    VENDOR != "postgresql", reason="PostgreSQL alone has the function"
)
# Django writes an interval as a number of microseconds where the database has no such type.
EVERY = "INTERVAL '1 hour'" if VENDOR == "postgresql" else "3600000000"
DOCUMENTS = ("args", "kwargs")


@pytest.fixture
def scheduler(backend):
    scheduler = Scheduler(backend)
    scheduler.SCAN = 0.0
    return scheduler


def turn(scheduler: Scheduler) -> None:
    scheduler._scan_at = scheduler._declare_at = 0.0
    scheduler._aside.clear()
    scheduler.turn(waiting=True)


def run_due(scheduler: Scheduler) -> None:
    """Plan new rows, and run all of them as if their next time had come."""
    turn(scheduler)
    RecurringTask.objects.exclude(next_run_at=None).update(next_run_at=now_plus(-1))
    turn(scheduler)


def execute(sql: str, values: object = None) -> object:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchone()[0] if cursor.description else None


def insert(**columns: str) -> None:
    """Insert a row with these columns alone; the values are SQL."""
    execute(
        f"INSERT INTO dbqueue_recurringtask ({', '.join(columns)}) "
        f"VALUES ({', '.join(columns.values())})"
    )


def repeat(task: object = "tests.tasks.nothing", **given: object) -> int:
    named = {
        name: json.dumps(value) if name in DOCUMENTS else value for name, value in given.items()
    }
    extra = "".join(
        f", {name} => %({name})s{'::jsonb' * (name in DOCUMENTS)}"
        f"{'::text::timestamptz' * name.endswith('_at')}"
        for name in named
    )
    return execute(f"SELECT dbqueue_repeat(%(task)s{extra})", {"task": task, **named})


# Plain INSERT


@pytest.mark.parametrize("schedule", [{"every": EVERY}, {"cron": "'* * * * *'"}])
def test_insert_with_name_task_and_schedule_is_sufficient(scheduler, schedule):
    insert(name="'by hand'", task="'tests.tasks.nothing'", **schedule)
    row, python = RecurringTask.objects.get(), RecurringTask(name="python")

    turn(scheduler)
    minute = datetime.now(timezone.utc).replace(second=0, microsecond=0)
    RecurringTask.objects.update(next_run_at=minute, missed="one")
    turn(scheduler)

    assert Job.objects.get().task == "tests.tasks.nothing"
    assert RecurringExecution.objects.get().task == row
    names = {field.name for field in RecurringTask._meta.concrete_fields}
    names -= {"id", "name", "task", *schedule}
    assert {name: getattr(row, name) for name in names} == {
        name: getattr(python, name) for name in names
    }


def test_row_by_orm_with_defaults_is_unchanged():
    row = RecurringTask.objects.create(name="a", task="tests.tasks.nothing", every=HOUR)

    assert (row.args, row.kwargs, row.jitter, row.problem) == ([], {}, timedelta(), "")


def test_farthest_end_is_accepted(scheduler):
    end = datetime.max.replace(tzinfo=timezone.utc)
    recurring(every=HOUR, ends_at=end)(tasks.nothing)

    run_due(scheduler)

    row = RecurringTask.objects.get()
    assert (row.ends_at, row.problem, Job.objects.count()) == (end, "", 1)


def quoted(value: str) -> str:
    return "'{}'".format(value.replace("'", "''"))


WRONG = [
    ({"cron": "'every day at 9'"}, "cron expression"),
    ({"cron": "'61 * * * *'"}, "cron expression"),
    ({"cron": "'0 0 31 2 *'"}, "never matches"),
    ({"cron": "'0 9 * * *'", "timezone": "'Europe/Berlim'"}, "not a time zone"),
    ({"every": EVERY, "timezone": "'Europe/Berlin'"}, "no effect on every"),
    ({"every": "INTERVAL '0'" if VENDOR == "postgresql" else "0"}, "every must be from"),
    ({"every": "INTERVAL '-1 day'" if VENDOR == "postgresql" else "-1"}, "every must be from"),
    ({"every": EVERY, "missed": "'none'"}, "missed"),
    ({"every": EVERY, "most_missed": "0"}, "most_missed"),
    ({"every": EVERY, "args": quoted('["x", "y"]')}, "nothing"),
    ({"every": EVERY, "args": quoted('{"a": 1}')}, "must be a list and a dict"),
    ({"every": EVERY, "kwargs": quoted('"ab"')}, "must be a list and a dict"),
    ({"every": EVERY, "args": quoted(f"[{'9' * 5000}]")}, "must be a list and a dict"),
    ({"every": EVERY, "queue": "'a,b'"}, "queue"),
    ({"every": EVERY, "priority": "500"}, "priority"),
    ({"every": EVERY, "drift": "true", "task": "'tests.tasks.add'"}, "add"),
]


@pytest.mark.parametrize(("columns", "said"), WRONG)
def test_wrong_row_shows_its_problem_and_harms_no_other(scheduler, admin_client, columns, said):
    if "9" * 5000 in columns.get("args", ""):
        skip_if_long_numbers_are_refused()
    insert(**{"name": "'a wrong row'", "task": "'tests.tasks.nothing'", **columns})
    insert(name="'right'", task="'tests.tasks.nothing'", every=EVERY)

    run_due(scheduler)

    wrong, right = RecurringTask.objects.order_by("name")
    assert said in wrong.problem
    assert right.problem == ""
    assert Job.objects.count() == RecurringExecution.objects.filter(task=right).count() == 1
    for page in ("", f"{wrong.pk}/change/"):
        assert (
            admin_client.get(f"/admin/dbqueue/recurringtask/{page}?backend=default").status_code
            == 200
        )


REFUSED = [
    {"every": EVERY, "cron": "'0 9 * * *'"},
    {"task": "''", "every": EVERY},
    {},
    *{
        "postgresql": [
            {"every": EVERY, "ends_at": "'infinity'"},
            {"every": EVERY, "starts_at": "'-infinity'"},
            {"every": EVERY, "next_run_at": "'20000-01-01'"},
            {"every": "INTERVAL '100000000 years'"},
            {"every": EVERY, "jitter": "INTERVAL '100000000 years'"},
        ],
        "sqlite": [
            {"every": EVERY, "ends_at": "'never'"},
            {"every": EVERY, "next_run_at": "''"},
            {"every": "'5 minutes'"},
            {"every": str(10**18)},
            {"every": EVERY, "is_enabled": "'yes'"},
            {"every": EVERY, "args": "'no json'"},
        ],
        "mysql": [{"every": str(10**18)}, {"every": EVERY, "args": "'no json'"}],
    }[VENDOR],
]


@pytest.mark.parametrize("columns", REFUSED)
def test_unreadable_row_is_refused(columns):
    with pytest.raises((IntegrityError, DatabaseError)), transaction.atomic():
        insert(**{"name": "'a'", "task": "'tests.tasks.nothing'", **columns})


def test_name_that_the_code_declares_is_reported(scheduler, caplog):
    insert(name="'tests.tasks.nothing'", task="'tests.tasks.add'", every=EVERY)
    recurring(every=HOUR)(tasks.nothing)

    turn(scheduler)

    assert "also made in the admin or by SQL" in caplog.text


# The function


@needs_postgresql
def test_only_task_and_schedule_are_required(scheduler):
    pk = repeat(every=HOUR)

    row = RecurringTask.objects.get()
    assert (row.pk, row.name, row.task, row.every) == (pk, row.task, "tests.tasks.nothing", HOUR)
    run_due(scheduler)
    assert Job.objects.count() == 1
    nulls = ", NULL" * 9
    assert pk == execute(f"SELECT dbqueue_repeat('tests.tasks.nothing', NULL, '@monthly'{nulls})")


@needs_postgresql
def test_all_arguments_reach_the_row_and_its_jobs(scheduler):
    start, end = (datetime(2090, 1, day, tzinfo=timezone.utc) for day in (1, 2))
    given = {
        "every": timedelta(minutes=90),
        "drift": True,
        "args": [1],
        "kwargs": {"b": 2},
        "starts_at": start,
        "ends_at": end,
        "name": "sums",
        "queue": "mail",
        "priority": -5,
    }
    repeat("tests.tasks.add", **given)
    repeat("tests.tasks.add", cron="  0 9 * * MON-fri ", timezone="Europe/Berlin", args=[1])

    row, by_cron = RecurringTask.objects.order_by("pk")
    assert {name: getattr(row, name) for name in given} == given
    assert (by_cron.cron, by_cron.timezone) == ("0 9 * * MON-fri", "Europe/Berlin")
    RecurringTask.objects.update(starts_at=None, is_over=False, next_run_at=now_plus(-1))
    turn(scheduler)
    job = Job.objects.get(queue="mail")
    assert (job.args, job.kwargs, job.priority) == ([1], {"b": 2}, -5)
    row.refresh_from_db()
    assert row.waits_for == job.pk


@needs_postgresql
def test_repeated_call_keeps_id_and_next_time(scheduler):
    pk = repeat(every=HOUR)
    turn(scheduler)
    planned = RecurringTask.objects.get().next_run_at
    RecurringTask.objects.all().update(problem="It could not be enqueued.")

    assert repeat(every=HOUR, priority=3) == pk

    row = RecurringTask.objects.get()
    assert (row.next_run_at, row.priority, row.problem) == (planned, 3, "")
    assert planned is not None


@needs_postgresql
def test_same_call_again_keeps_the_problem(scheduler):
    repeat(every=HOUR)
    RecurringTask.objects.all().update(problem="It could not be enqueued.")

    repeat(every=HOUR)

    assert RecurringTask.objects.get().problem == "It could not be enqueued."


@needs_postgresql
def test_changed_schedule_is_planned_anew(scheduler):
    pk = repeat(every=HOUR)
    turn(scheduler)

    assert repeat(cron="0 9 * * *") == pk

    row = RecurringTask.objects.get()
    assert (row.next_run_at, row.every, row.is_over) == (None, None, False)
    turn(scheduler)
    assert RecurringTask.objects.get().next_run_at is not None


@needs_postgresql
def test_changed_interval_with_drift_waits_for_the_unfinished_job(scheduler):
    repeat(every=HOUR, drift=True)
    run_due(scheduler)

    repeat(every=2 * HOUR, drift=True)

    turn(scheduler)
    row = RecurringTask.objects.get()
    assert (row.next_run_at, row.waits_for) == (None, Job.objects.get().pk)


@needs_postgresql
def test_disabled_task_stays_disabled():
    repeat(every=HOUR)
    RecurringTask.objects.all().disable()

    repeat(every=2 * HOUR)

    row = RecurringTask.objects.get()
    assert (row.is_enabled, row.every) == (False, 2 * HOUR)


@needs_postgresql
def test_command_of_that_name_is_replaced():
    RecurringTask.objects.create(name="tests.tasks.nothing", command="check", every=HOUR)

    repeat(every=HOUR)

    assert RecurringTask.objects.get().command == ""


@needs_postgresql
def test_task_of_the_code_is_not_replaced(scheduler):
    recurring(every=HOUR)(tasks.nothing)
    turn(scheduler)
    before = RecurringTask.objects.values().get()

    with pytest.raises(DataError, match="in code") as refused, transaction.atomic():
        repeat(every=2 * HOUR)

    assert refused.value.__cause__.diag.message_hint
    assert RecurringTask.objects.values().get() == before
    assert repeat(every=2 * HOUR, name="another") != before["id"]


BAD = [
    ({}, "give either every or cron, not NULL and NULL"),
    ({"every": HOUR, "cron": "0 9 * * *"}, "not '01:00:00' and '0 9"),
    ({"every": HOUR, "cron": ""}, "not '01:00:00' and ''"),
    ({"every": timedelta()}, "every must be from one second to 3,650 days, not 00:00:00"),
    ({"every": -HOUR}, "every must be from"),
    ({"every": timedelta(days=3651)}, "not 3651 days"),
    ({"every": "1 month"}, "every must be an interval of equal length, not 1 mon"),
    ({"every": "1 year"}, "not 1 year"),
    ({"cron": ""}, "cron '' is not a cron expression"),
    ({"cron": "every day at 9am please"}, "is not a cron expression"),
    ({"cron": "0 9 * *"}, "cron '0 9 \\* \\*' is not"),
    ({"cron": "0 0 9 * * * *"}, "is not a cron expression"),
    ({"cron": "0 9 * * mon Europe/Berlin"}, "is not a cron expression"),
    ({"cron": "@reboot"}, "is not a cron expression"),
    ({"cron": "@0thly x"}, "is not a cron expression"),
    ({"cron": "0 9 * * " + "1," * 60 + "2"}, "is not a cron expression"),
    ({"cron": "0 9 * * *", "drift": True}, "drift counts from the end"),
    ({"cron": "0 9 * * *", "timezone": "Europe/Berlim"}, "timezone 'Europe/Berlim' is not"),
    ({"cron": "0 9 * * *", "timezone": "XYZ5"}, "timezone 'XYZ5' is not"),
    ({"every": HOUR, "timezone": "Europe/Berlin"}, "has no effect on every"),
    ({"every": HOUR, "starts_at": "infinity"}, "starts_at must be .*, not infinity"),
    ({"every": HOUR, "starts_at": "-infinity"}, "starts_at must be .*, not -infinity"),
    ({"every": HOUR, "ends_at": "infinity"}, "ends_at must be .*, not infinity"),
    ({"every": HOUR, "ends_at": "2020-01-01 00:00Z"}, "ends_at must be a time after now"),
    (
        {"every": HOUR, "starts_at": "2090-01-02 00:00Z", "ends_at": "2090-01-02 00:00Z"},
        "after starts_at",
    ),
    ({"every": HOUR, "name": ""}, "name must be text of 1 to 255 characters, not '', which has 0"),
    ({"every": HOUR, "name": "x" * 256}, "which has 256"),
    ({"every": HOUR, "task": None}, "task NULL is not the path"),
    ({"every": HOUR, "task": "nothing"}, "task 'nothing' is not the path"),
    ({"every": HOUR, "args": {}}, "args must be a JSON array, not {}"),
    ({"every": HOUR, "args": [10**4001]}, "numbers of over 4,000 digits"),
    ({"every": HOUR, "kwargs": [1]}, "kwargs must be a JSON object"),
    ({"every": HOUR, "queue": "a,b"}, "queue 'a,b' is not the name"),
    ({"every": HOUR, "queue": ""}, "queue '' is not the name"),
    ({"every": HOUR, "priority": 101}, "priority must be a whole number"),
]


@needs_postgresql
@pytest.mark.parametrize(("given", "said"), BAD)
def test_invalid_argument_is_refused_with_a_hint(given, said):
    with pytest.raises(DataError, match=said) as refused, transaction.atomic():
        repeat(**given)

    cause = refused.value.__cause__
    assert cause.sqlstate == "22023"
    assert str(cause).startswith("dbqueue_repeat: ")
    assert cause.diag.message_hint
    assert not RecurringTask.objects.exists()


# Expressions that the function accepts, and their verdict by the worker.
EXPRESSIONS = [
    ("*/5 * * * *", True),
    ("0 0 9 * * mon-fri", True),
    ("H(0-29) 3 * * *", True),
    ("H 3 L * ?", True),
    ("0 9 15W jan,dec *", True),
    ("0 9 * * FRI#2", True),
    ("0 9 * * fril", False),
    ("@daily", True),
    ("@Monthly", True),
    ("@annually", True),
    ("61 * * * *", False),
    ("0 0 31 2 *", False),
    ("5/15 * * * *", False),
]


@needs_postgresql
@pytest.mark.parametrize(("cron", "is_valid"), EXPRESSIONS)
def test_expression_in_shape_is_judged_by_the_scheduler(scheduler, cron, is_valid):
    repeat(cron=cron)

    turn(scheduler)

    row = RecurringTask.objects.get()
    assert (row.problem == "") is (row.next_run_at is not None) is is_valid


@needs_postgresql
def test_unknown_task_shows_its_problem(scheduler):
    repeat("shop.tasks.gone", every=HOUR)
    turn(scheduler)
    RecurringTask.objects.all().update(next_run_at=now_plus(-90))

    turn(scheduler)

    assert "'shop.tasks.gone' is not known here" in RecurringTask.objects.get().problem


@needs_postgresql
@pytest.mark.parametrize("is_there", [False, True])
def test_documented_privileges_are_sufficient(is_there):
    if is_there:
        repeat(every=HOUR)
    execute("CREATE ROLE dbqueue_repeater")
    execute("GRANT INSERT, SELECT, UPDATE ON dbqueue_recurringtask TO dbqueue_repeater")
    execute("SET LOCAL ROLE dbqueue_repeater")
    execute("SET LOCAL search_path = pg_catalog")
    try:
        pk = execute(
            "SELECT public.dbqueue_repeat('tests.tasks.nothing', cron => '0 9 * * *', "
            "timezone => 'Europe/Berlin')"
        )
    finally:
        execute("RESET ROLE")
        execute("RESET search_path")

    assert RecurringTask.objects.get().pk == pk


@needs_postgresql
def test_call_without_privileges_is_refused():
    execute("CREATE ROLE dbqueue_nobody")
    with pytest.raises(DatabaseError, match="permission denied"), transaction.atomic():
        execute("SET LOCAL ROLE dbqueue_nobody")
        repeat(every=HOUR)
