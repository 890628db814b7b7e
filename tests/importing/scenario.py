"""``python -m tests.importing.scenario``: enqueue by the other queue, move, and run here."""

from __future__ import annotations

import io
import json
import threading
import uuid
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any
from unittest.mock import patch

import django

django.setup()

from django.conf import settings  # noqa: E402 - After the setup.
from django.core.management import call_command  # noqa: E402
from django.db import connection, connections, transaction  # noqa: E402

from django_dbqueue.command_line.sources import SOURCES  # noqa: E402
from django_dbqueue.compat import signals  # noqa: E402
from django_dbqueue.models import Job, RecurringTask  # noqa: E402
from django_dbqueue.testing import drain  # noqa: E402
from tests.importing import tasks, theirs  # noqa: E402

LATER = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(hours=2)
OURS, THEIRS = (f"tests.importing.{module}.send" for module in ("tasks", "theirs"))
TAGS = ["a", {"k": 1}]
HAS_PRIORITY = settings.SOURCE in ("django-tasks-db", "dj-queue", "django-ox", "procrastinate")
QUEUE = "queue" if "queue" in settings.DATABASES else "default"
# A time of a schedule "every five minutes, a minute later".
LAST_RUN = LATER.replace(minute=1, second=0) - timedelta(hours=4)
# A time of a schedule "each day at 3:00, in UTC", one to three days ago.
MISSED_RUN = (LATER - timedelta(days=2)).replace(hour=3, minute=0, second=0)


def enqueue() -> None:
    """Enqueue a job, a delayed one, and one of a task that is not here."""
    if settings.SOURCE == "django-q2":
        from django_q.models import Schedule
        from django_q.tasks import async_task, schedule

        async_task(THEIRS, 7, template="hello", tags=TAGS)
        async_task(theirs.gone)
        async_task(THEIRS, 9, hook="tests.importing.theirs.gone")
        async_task(partial(theirs.send, 9))
        hooked = {"hook": "tests.importing.theirs.gone", "next_run": LATER}
        schedule(THEIRS, 9, schedule_type="O", **hooked)
        schedule(THEIRS, 9, schedule_type="O", q_options={"chain": [1]}, next_run=LATER)
        schedule(THEIRS, 8, template="x", schedule_type="O", next_run=LATER)
        at = datetime(2027, 5, 5, 7, 30, tzinfo=timezone.utc)
        schedule(THEIRS, 1, template="x", name="daily", schedule_type=Schedule.DAILY, next_run=at)
        schedule(THEIRS, 1, name="often", schedule_type="I", minutes=5, next_run=LATER)
        schedule(THEIRS, 1, name="cron", schedule_type="C", cron="5 4 * * *", next_run=LATER)
        schedule(THEIRS, 1, name="seconds", schedule_type="C", cron="*/5 4 * * * 30")
        schedule(THEIRS, 1, name="both days", schedule_type="C", cron="0 0 */2 * 1")
        schedule(THEIRS, 1, name="other syntax", schedule_type="C", cron="5/15 * * * *")
        schedule(THEIRS, 1, 2, 3, 4, name="wrong call", schedule_type="H", next_run=LATER)
        schedule(THEIRS, 1, name="quarter", schedule_type="Q", next_run=at)
        schedule(THEIRS, 1, name="ends", schedule_type="H", repeats=3, next_run=LATER)
        for name, minutes in {"no minutes": None, "zero minutes": 0}.items():
            schedule(THEIRS, 1, name=name, schedule_type="I", minutes=minutes, next_run=LATER)
        # schedule() refuses a name that is there already, the table and its admin do not.
        hourly = {"func": THEIRS, "args": "1", "schedule_type": "H", "next_run": LATER}
        for values in (
            {"name": "report"},
            {"name": "report", "next_run": LATER + timedelta(minutes=30)},
            {"name": "report", "args": "2"},
            {"name": "taken"},
            {"name": "self", "func": f"{tasks.__name__}.note", "args": "", "kwargs": "{'self': 3}"},
        ):
            Schedule.objects.create(**{**hourly, **values})
        RecurringTask.objects.using(QUEUE).create(
            name="taken", task=OURS, args=[1], priority=0, every=timedelta(hours=1)
        )
        return
    if settings.SOURCE == "procrastinate":
        first = theirs.send.configure(queue="mail", priority=5)
        first.defer(user_id=7, template="hello", tags=TAGS)
        later = theirs.send.configure(schedule_at=LATER, lock="account-8", queueing_lock="once-8")
        later.defer(user_id=8)
        theirs.gone.defer()
        return
    first = theirs.send.using(queue_name="mail", **({"priority": 5} if HAS_PRIORITY else {}))
    first.enqueue(7, template="hello", tags=TAGS)
    theirs.send.using(run_after=LATER).enqueue(8)
    theirs.gone.enqueue()
    if settings.SOURCE == "dj-queue":
        from dj_queue.models import RecurringTask as Theirs

        for key, cron in {
            "nightly": "0 3 * * *",
            "mondays": "0 3 1-31 * 1",
            "both days": "0 3 */2 * 1",
        }.items():
            Theirs.objects.create(
                key=key,
                backend_alias="old",
                task_path=THEIRS,
                payload={"args": [1], "kwargs": {"template": "n"}},
                schedule=cron,
                queue_name="mail",
                priority=2,
                static=False,
                next_run_at=MISSED_RUN,
            )
    if settings.SOURCE == "steady-queue":
        schedule_in_steady_queue()
    if settings.SOURCE == "django-ox":
        schedule_in_ox()


def schedule_in_steady_queue() -> None:
    from steady_queue.arguments import Arguments
    from steady_queue.models import RecurringTask as Theirs

    call = {"arguments": Arguments.serialize_args_and_kwargs([1], {"template": "n"})}
    for key, values in {
        "nightly": {"schedule": "0 3 * * *"},
        "year": {"schedule": "0 3 ? * mon *"},
        "seconds": {"schedule": "30 0 3 * * * *"},
        "declared": {"schedule": "0 3 * * *", "static": True},
        "one year": {"schedule": "0 3 * * * 2030"},
        "both days": {"schedule": "0 3 1 * mon"},
        "other syntax": {"schedule": "0 3 Z2 * *"},
        "invalid": {"schedule": "0 3 * * mon#1"},
        "command": {"schedule": "0 3 * * *", "command": "print()"},
        "moment": {
            "schedule": "0 3 * * *",
            "arguments": {"arguments": Arguments.serialize_args_and_kwargs([LATER], {})},
        },
        "no arguments": {"schedule": "0 3 * * *", "arguments": {}},
    }.items():
        values = {"arguments": call, "queue_name": "mail", "priority": 2, **values}
        Theirs.objects.create(key=key, class_name=THEIRS, **values)


def schedule_in_ox() -> None:
    from django_ox.models import OxSchedule, OxScheduleTick
    from django_ox.registry import schedulable
    from django_ox.stored import create_schedule

    schedulable("send")(theirs.send.using(queue_name="mail", priority=2))
    start = LATER - timedelta(days=20)
    for name, values in {
        "nightly": {"cron": "0 3 * * *"},
        "ended": {"cron": "0 3 * * *", "end_time": start + timedelta(days=2)},
        "ends": {"cron": "0 3 * * *", "end_time": LATER + timedelta(days=9)},
        "disabled": {"cron": "0 3 * * *", "enabled": False},
        "deadline": {"cron": "0 3 * * *", "starting_deadline_seconds": 30},
        "other syntax": {"cron": "5/15 * * * *"},
        "both days": {"cron": "0 3 */10 * mon"},
        "wrong call": {"cron": "0 3 * * *", "arguments": {"nope": 1}},
        "often": {"every_seconds": 300, "phase_seconds": 60},
        "half days": {"every_seconds": 43200, "phase_seconds": 3 * 3600 + 300},
        "week": {"every_seconds": 604800, "phase_seconds": 86400},
        "odd": {"every_seconds": 5400},
        "later": {"every_seconds": 300, "start_time": LATER + timedelta(seconds=1)},
    }.items():
        trigger = "cron" if "cron" in values else "interval"
        given = {"arguments": {"user_id": 1, "template": "n"}, "start_time": start, **values}
        create_schedule(name=name, task_key="send", trigger=trigger, **given)
    row = create_schedule(name="gone", task_key="send", trigger="cron", cron="0 3 * * *")
    OxSchedule.objects.filter(pk=row.pk).update(task_key="gone")
    # The latest run of "often".
    OxScheduleTick.objects.create(
        schedule_name=f"db:{OxSchedule.objects.get(name='often').pk}",
        scheduled_for=LAST_RUN,
        created_at=LAST_RUN,
    )


def waiting() -> int:
    return sum(rows.count() for rows in SOURCES[settings.SOURCE]().parts())


def move(*arguments: str) -> list[dict[str, Any]]:
    out = io.StringIO()
    given = ["queue", "import", settings.SOURCE, "--rename", f"{THEIRS}={OURS}", "--json"]
    with suppress(SystemExit):
        call_command(*given, *arguments, stdout=out)
    return json.loads(out.getvalue())


def moved(rows: list[dict[str, Any]], kind: str = "job") -> int:
    return sum(row["number"] for row in rows if not row["problem"] and row["kind"] == kind)


def main() -> None:
    for alias in connections:
        call_command("migrate", database=alias, verbosity=0)
    jobs, recurring = Job.objects.using(QUEUE), RecurringTask.objects.using(QUEUE)
    enqueue()
    before, own = waiting(), recurring.count()

    sent: list[Any] = []
    signals.task_enqueued.connect(note := lambda **kwargs: sent.append(kwargs), weak=False)
    tried = said = move("--dry-run")
    assert (moved(said), jobs.count(), waiting(), sent) == (2, 0, before, []), said
    signals.task_enqueued.disconnect(note)
    check_that_an_error_after_the_insert_leaves_no_job(jobs)
    assert recurring.count() == own

    if connection.vendor != "sqlite":
        check_that_rows_of_a_worker_stay(jobs)
    if "queue" in settings.DATABASES:
        check_that_a_repetition_finds_what_was_moved()
    said = move()
    assert moved(said) == 2, said
    problems = {row["problem"] for row in said if row["problem"] and row["kind"] == "job"}
    assert any("theirs.gone is no task with @task" in each for each in problems), said
    assert waiting() == before - 2

    first, later = jobs.order_by("run_after")
    assert (first.task, first.args, first.kwargs) in (
        (OURS, [7], {"template": "hello", "tags": TAGS}),
        (OURS, [], {"user_id": 7, "template": "hello", "tags": TAGS}),
    )
    assert first.state == "ready"
    assert first.queue == ("default" if settings.SOURCE == "django-q2" else "mail")
    assert first.priority == (5 if HAS_PRIORITY else 0)
    assert first.metadata["imported_from"].startswith(settings.SOURCE.replace("-q2", "_q"))
    assert (later.state, later.run_after) == ("scheduled", LATER)
    if settings.SOURCE == "procrastinate":
        assert later.limits[0]["key"] == '"account-8"'
        assert later.key.endswith(" once-8")
    if settings.SOURCE == "django-q2":
        assert any("It has hook" in each for each in problems), said
        check_schedules_of_q2(said, jobs.db)
        assert problems_of_schedules(tried) == problems_of_schedules(said), tried
    if settings.SOURCE == "dj-queue":
        check_schedules_of_dj_queue(said, jobs.db)
    if settings.SOURCE == "steady-queue":
        check_schedules_of_steady_queue(said, jobs.db)
    if settings.SOURCE == "django-ox":
        check_schedules_of_ox(said, jobs.db)
    if settings.SOURCE in ("dj-queue", "steady-queue", "django-ox"):
        assert problems_of_schedules(tried) == problems_of_schedules(said), tried

    again = move()
    assert (moved(again), moved(again, "schedule"), jobs.count()) == (0, 0, 2), again
    assert drain() == 1
    assert tasks.calls == [(7, "hello", TAGS)]
    if settings.SOURCE == "django-tasks-db":
        check_that_a_dry_run_refuses_the_same_arguments()


def check_that_an_error_after_the_insert_leaves_no_job(jobs: Any) -> None:
    def refuse(**kwargs: Any) -> None:
        raise ValueError("The audit log is full.")

    before = waiting()
    signals.task_enqueued.connect(refuse)
    # Schedules enqueue nothing now.
    with patch.object(SOURCES[settings.SOURCE], "schedules", lambda self: []):
        said = move()
    signals.task_enqueued.disconnect(refuse)
    assert (moved(said), jobs.count(), waiting()) == (0, 0, before), said
    assert "ValueError: The audit log is full." in {row["problem"] for row in said}


def check_that_a_repetition_finds_what_was_moved() -> None:
    """Between the commits of the two databases, the jobs and schedules are in both."""
    source = SOURCES[settings.SOURCE]
    with (
        patch.object(source, "remove", lambda self, rows: None),
        patch.object(source, "remove_schedule", lambda self, row: None),
    ):
        assert moved(move()) == 2


def check_that_a_dry_run_refuses_the_same_arguments() -> None:
    from django_tasks_db.models import DBTaskResult

    row = DBTaskResult.objects.get(task_path="tests.importing.theirs.gone")
    row.task_path, row.run_after = f"{tasks.__name__}.note", LATER - timedelta(days=1)
    for call in ([], {"self": 3}), (None, {}), ("text", {}), ([], [1]), ([1], {}):
        row.pk = uuid.uuid4()
        row.args_kwargs = dict(zip(("args", "kwargs"), call, strict=True))
        row.save(force_insert=True)
    tried, said = move("--dry-run"), move()
    assert tried == said, (tried, said)
    assert [
        (each["problem"], each["number"]) for each in said if each["task"] == row.task_path
    ] == [
        ("", 1),
        *(
            (f"Its arguments must be a list and a dict, not {call}. Correct them there.", 1)
            for call in ("'text' and {}", "None and {}", "[] and [1]")
        ),
        (
            "TypeError: tests.importing.tasks.note(): too many positional arguments. "
            "Pass the arguments of its signature.",
            1,
        ),
    ]
    assert drain() == 1
    assert tasks.notes == [{"self": 3}]


def check_that_rows_of_a_worker_stay(jobs: Any) -> None:
    """A row that a worker of the other queue has locked is not moved."""
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            source = SOURCES[settings.SOURCE]()
            for rows in (*source.parts(), *source.schedules()):
                list(rows.select_for_update())
            locked.set()
            done.wait(60)
            transaction.set_rollback(True)
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(60)
    try:
        said = move()
    finally:
        done.set()
        thread.join()
    assert (moved(said), moved(said, "schedule"), jobs.count()) == (0, 0, 0), said


def check_schedules_of_q2(said: list[dict[str, Any]], database: str) -> None:
    found = {row.name: row for row in RecurringTask.objects.using(database).all()}
    assert sorted(found) == [
        "cron",
        "daily",
        "no minutes",
        "often",
        "quarter",
        "report",
        "seconds",
        "taken",
        "zero minutes",
    ], said
    assert (found["daily"].cron, found["daily"].kwargs) == ("30 9 * * *", {"template": "x"})
    assert found["often"].every == timedelta(minutes=5)
    every_minute = found["no minutes"], found["zero minutes"]
    assert {row.every for row in every_minute} == {timedelta(minutes=1)}
    crons = [found[name].cron for name in ("cron", "seconds")]
    assert crons == ["5 4 * * *", "30 */5 4 * * *"]
    assert found["quarter"].cron == "30 9 5 2,5,8,11 *"
    assert (found["report"].starts_at, found["taken"].starts_at) == (LATER, None)
    assert (found["report"].next_run_at, found["report"].missed) == (LATER, "all")
    days, syntax, call, ends, *taken, keyword = problems_of_schedules(said)
    assert taken == [
        f"There is a recurring task '{name}' already. Rename one of them."
        for name in ("report", "report", "taken")
    ]
    assert "{'self': 3} have 'self', which Task.enqueue() cannot pass on" in keyword
    assert "'*/2' as day of the month and '1' as day of the week" in days
    assert "'5/15' as minutes, which is ambiguous" in syntax
    assert "too many positional arguments. Pass the arguments of its signature." in call
    assert ends == "It ends after 3 more runs. Make it here with an end."


def check_schedules_of_dj_queue(said: list[dict[str, Any]], database: str) -> None:
    from dj_queue.cron import next_cron_run
    from django.utils.timezone import now

    found = {row.name: row for row in RecurringTask.objects.using(database).all()}
    assert sorted(found) == ["mondays", "nightly"], said
    row = found["nightly"]
    values = (row.task, row.args, row.kwargs, row.cron, row.queue, row.priority)
    assert values == (OURS, [1], {"template": "n"}, "0 3 * * *", "mail", 2)
    assert row.time_after(now()) == next_cron_run("0 3 * * *", now())
    assert found["mondays"].time_after(now()) == next_cron_run("0 3 1-31 * 1", now())
    # The run that is due is made up for.
    assert (row.next_run_at, len(row.plan(now()).times)) == (MISSED_RUN, 1)
    (days,) = problems_of_schedules(said)
    assert "'*/2' as day of the month and '1' as day of the week" in days


def check_schedules_of_steady_queue(said: list[dict[str, Any]], database: str) -> None:
    from steady_queue.models import RecurringTask as Theirs

    found = {row.name: row for row in RecurringTask.objects.using(database).all()}
    assert sorted(found) == ["nightly", "seconds", "year"], said
    row = found["nightly"]
    values = (row.task, row.args, row.kwargs, row.queue, row.priority)
    assert values == (OURS, [1], {"template": "n"}, "mail", 2)
    assert {row.timezone for row in found.values()} == {"UTC"}
    assert not any(row.is_enabled for row in found.values())
    crons = [found[name].cron for name in ("nightly", "seconds", "year")]
    assert crons == ["0 3 * * *", "30 0 3 * * *", "0 3 * * mon"]
    assert Theirs.objects.filter(key="declared").exists()
    year, days, syntax, invalid, command, moment, arguments = problems_of_schedules(said)
    assert "'2030' as year" in year
    assert "'1' as day of the month and 'mon' as day of the week" in days
    assert "'Z2'" in syntax
    assert "'0 3 * * mon#1', which steady-queue cannot read" in invalid
    assert "command='print()'" in command
    assert "datetime" in moment, moment
    assert "arguments cannot be read" in arguments


def check_schedules_of_ox(said: list[dict[str, Any]], database: str) -> None:
    found = {row.name: row for row in RecurringTask.objects.using(database).all()}
    moved = ["disabled", "ends", "half days", "later", "nightly", "often", "week"]
    assert sorted(found) == moved, said
    row = found["nightly"]
    values = (row.task, row.args, row.kwargs, row.queue, row.priority, row.cron, row.missed)
    call = {"user_id": 1, "template": "n"}
    assert values == (OURS, [], call, "mail", 2, "0 3 * * *", "one")
    assert (row.is_enabled, found["disabled"].is_enabled) == (True, False)
    assert found["disabled"].next_run_at is None
    assert found["ends"].ends_at == LATER + timedelta(days=9)
    assert found["half days"].cron == "5 3,15 * * *"
    assert found["week"].cron == "0 0 * * 5"
    often, later = found["often"], found["later"]
    assert (often.every, often.next_run_at) == (timedelta(minutes=5), LAST_RUN + often.every)
    assert later.next_run_at.minute % 5 == later.next_run_at.second == 0
    assert timedelta(0) < later.next_run_at - LATER <= timedelta(minutes=5)
    ended, deadline, syntax, days, call_, odd, gone = problems_of_schedules(said)
    assert "It ends at" in ended
    assert "starting_deadline_seconds=30" in deadline
    assert "'5/15' as minutes, which is ambiguous" in syntax
    assert "'*/10' as day of the month and 'mon' as day of the week" in days
    assert "missing a required argument: 'user_id'" in call_
    assert "1:30:00" in odd
    assert "'gone' is not registered" in gone


def problems_of_schedules(said: list[dict[str, Any]]) -> list[str]:
    return [row["problem"] for row in said if row["kind"] == "schedule" and row["problem"]]


main()
