"""``python -m tests.importing.beat_scenario``: move the schedules of django-celery-beat here."""

from __future__ import annotations

import io
import json
import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import patch

import django

django.setup()

from celery import current_app  # noqa: E402 - After the setup.
from django.conf import settings  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import OperationalError, connection, connections, models, transaction  # noqa: E402
from django.test import override_settings  # noqa: E402
from django_celery_beat import models as theirs  # noqa: E402
from django_celery_beat.schedulers import DatabaseScheduler  # noqa: E402

from django_dbqueue.command_line.sources.django_celery_beat import DjangoCeleryBeat  # noqa: E402
from django_dbqueue.compat import task_backends  # noqa: E402
from django_dbqueue.models import Job, RecurringTask  # noqa: E402
from django_dbqueue.runtime.scheduler import Scheduler  # noqa: E402

OURS = "tests.importing.tasks.send"
KINDS = {
    "interval": theirs.IntervalSchedule,
    "crontab": theirs.CrontabSchedule,
    "solar": theirs.SolarSchedule,
    "clocked": theirs.ClockedSchedule,
}
SECOND, HOUR, DAY = timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)
HOURLY, NIGHTLY = {"every": 1, "period": "hours"}, {"minute": "30", "hour": "3"}
LEAP_DAY = {"day_of_month": "29", "month_of_year": "2"}
SUNSET = {"event": "sunset", "latitude": "52.5", "longitude": "13.4"}
QUEUE = "queue" if "queue" in settings.DATABASES else "default"
jobs, tasks = Job.objects.using(QUEUE), RecurringTask.objects.using(QUEUE)
rows = theirs.PeriodicTask.objects
time_sleep = time.sleep


def now() -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0)


def add(name: str, **given: Any) -> None:
    """Write a row as the table may have it: ``save()`` refuses some values, and changes others."""
    for kind in KINDS.keys() & given.keys():
        given[kind] = KINDS[kind].objects.create(**given[kind])
    changed = given.pop("date_changed", now())
    rows.bulk_create([theirs.PeriodicTask(**{"name": name, "task": OURS, "args": "[7]", **given})])
    rows.filter(name=name).update(date_changed=changed)


def move(*arguments: str, waits: bool = False) -> tuple[dict[str, str], int]:
    """Return the problems by the names of schedules and the tasks of jobs, and the exit code."""
    out, code = io.StringIO(), 0
    with patch.object(time, "sleep", time.sleep if waits else lambda seconds: None):
        try:
            call_command("queue", "import", "django-celery-beat", "--json", *arguments, stdout=out)
        except SystemExit as error:
            code = error.code
    return {row["task"].split(": ")[0]: row["problem"] for row in json.loads(out.getvalue())}, code


def left() -> list[str]:
    return sorted(rows.values_list("name", flat=True))


def enqueued() -> int:
    """Return the number of jobs that a dispatcher enqueues now."""
    before = jobs.count()
    Scheduler(task_backends["default"]).turn(waiting=True)
    return jobs.count() - before


def check_that_schedules_keep_their_times():
    at = now()
    later, end = at + 30 * DAY, at + 60 * DAY
    add("often", interval={"every": 90, "period": "seconds"}, last_run_at=at - SECOND)
    add("micros", interval={"every": 90_000_000, "period": "microseconds"}, date_changed=at)
    add("begins", interval={"every": 2, "period": "days"}, start_time=later)
    add("is late", interval={"every": 2, "period": "days"}, start_time=at - HOUR)
    add("began", interval=HOURLY, start_time=at - DAY, last_run_at=at)
    add("rests", interval=HOURLY, start_time=later, last_run_at=at)
    add("off", interval=HOURLY, enabled=False)
    add("expired", interval=HOURLY, expires=at - HOUR)
    add("nightly", crontab={**NIGHTLY, "timezone": "Asia/Tokyo"}, start_time=later, expires=end)

    problems, code = move()

    found = {row.name: row for row in tasks.all()}
    assert (code, set(problems.values()), left()) == (0, {""}, ["expired"]), problems
    assert {name: (row.every, row.next_run_at) for name, row in found.items() if row.every} == {
        "often": (90 * SECOND, at + 89 * SECOND),
        "micros": (90 * SECOND, at + 90 * SECOND),
        "begins": (2 * DAY, later),
        "is late": (2 * DAY, at - HOUR),
        "began": (HOUR, at + HOUR),
        "rests": (HOUR, later),
        "off": (HOUR, None),
    }
    assert [name for name, row in found.items() if not row.is_enabled] == ["off"]
    nightly = found["nightly"]
    assert (nightly.cron, nightly.timezone) == ("30 3 * * *", "Asia/Tokyo")
    assert later <= nightly.next_run_at < later + DAY
    assert end - DAY <= nightly.next_times(99)[-1] < end
    # An operator's change does not shift an interval.
    tasks.filter(name="often").replan()
    assert tasks.get(name="often").next_times(1, after=at) == [at + 89 * SECOND]


def check_that_schedules_keep_their_calls():
    kwargs = {"template": "x", "tags": ["a", {"k": 1}]}
    add("all", interval=HOURLY, kwargs=json.dumps(kwargs), queue="mail", priority=2, headers="{}")
    add("empty", interval=HOURLY, task="old.send", args="", kwargs='{"user_id": 1}', headers="")

    assert move("--rename", f"old.send={OURS}") == ({"all": "", "empty": ""}, 0)

    every, empty = tasks.order_by("name")
    assert (every.task, every.args, every.kwargs) == (OURS, [7], kwargs)
    assert (every.queue, every.priority) == ("mail", -2)
    assert (empty.task, empty.args, empty.kwargs) == (OURS, [], {"user_id": 1})
    assert (empty.queue, empty.priority) == ("", None)


def check_that_crontabs_have_the_times_of_celery():
    after = datetime(2026, 6, 3, 10, 20, tzinfo=timezone.utc)
    expected = {}
    for name, given in {
        "Sunday": {"minute": "0", "hour": "9", "day_of_week": "0"},
        "names": {"minute": "15,45", "hour": "8-18/2", "day_of_week": "monday-fri"},
        "odd days": {"minute": "0", "hour": "0", "day_of_month": "*/2"},
        "odd Tuesdays": {"minute": "0", "hour": "0", "day_of_month": "*/2", "day_of_week": "tue"},
        "wraps": {"minute": "0", "hour": "22-2", "month_of_year": "*/3"},
        "spaces": {"minute": " 0, 30 ", "hour": "12", "month_of_year": "august, 12"},
    }.items():
        add(name, crontab={**given, "timezone": "America/New_York"})
        celerys, at, times = rows.get(name=name).schedule, after, []
        for _ in range(12):
            celerys.nowfun = lambda at=at: at
            at += celerys.remaining_estimate(at)
            times.append(at.astimezone(timezone.utc))
        expected[name] = times

    assert move()[1] == 0
    assert {row.name: row.recurrence.next_times(12, after) for row in tasks.all()} == expected


def check_that_crontabs_without_a_time_zone_have_that_of_celery():
    add("nightly", crontab={**NIGHTLY, "timezone": "Asia/Tokyo"})

    with override_settings(DJANGO_CELERY_BEAT_TZ_AWARE=False):
        assert move()[1] == 0
    assert tasks.get().timezone == "UTC"


def check_that_a_time_is_neither_missed_nor_repeated():
    add("missed", interval=HOURLY, last_run_at=now() - 90 * SECOND - HOUR)
    add("missed long", crontab=NIGHTLY, last_run_at=now() - 9 * DAY)
    add("has run", crontab={"minute": f"{now().minute}"}, last_run_at=now())
    add("is new", crontab={"minute": "*"}, date_changed=now() + 20 * SECOND)

    assert move()[1] == 0
    assert (enqueued(), enqueued()) == (2, 0)


def check_that_a_row_that_is_due_about_now_waits():
    add("often", interval=HOURLY, last_run_at=now() - HOUR)
    add("once", interval=HOURLY, last_run_at=now() - HOUR, one_off=True)
    add("off", interval=HOURLY, last_run_at=now() - HOUR, enabled=False)

    problems, code = move()

    assert "about now. Repeat the command." in problems["often"], problems
    assert problems["?"].startswith("once: It is due at"), problems
    assert (code, left(), tasks.get().name, jobs.count()) == (1, ["often", "once"], "off", 0)
    # By now, beat would have saved their runs.
    has_saved = patch.object(DjangoCeleryBeat, "_saved_until", now() + DAY)
    with has_saved, patch.object(DjangoCeleryBeat, "prepare"):
        assert move()[1] == 0
    assert (left(), enqueued(), jobs.count()) == ([], 1, 2)


REFUSED = {
    "solar": ({"solar": SUNSET}, "Sunset (52.500000, 13.400000): there are no solar times"),
    "brief": ({"interval": {"every": 5, "period": "microseconds"}}, "not 0:00:00.000005"),
    "never": ({"interval": {"every": 0, "period": "days"}}, "from one second to 3,650 days"),
    "none": ({}, "It has no schedule. Give it one"),
    "two": ({"interval": HOURLY, "crontab": NIGHTLY}, "It has interval and crontab. Give it one"),
    "days": (
        {"crontab": {"day_of_week": "mon", "day_of_month": "1-7"}},
        "such as 'mon#1' for the first Monday",
    ),
    "words": ({"crontab": {"minute": "x"}}, "Invalid weekday literal 'x'. Correct it there."),
    "step": ({"crontab": {"minute": "*/90"}}, "the step exceeds the range"),
    "long": (
        {"crontab": {"minute": ",".join(map(str, range(60))), **LEAP_DAY}},
        "178 characters, more than 100",
    ),
    "unknown": (
        {"task": "tests.importing.tasks.sent"},
        f"--rename tests.importing.tasks.sent={OURS}",
    ),
    "nameless": ({"task": ""}, "is no task with @task"),
    "signature": ({"args": "[1, 2, 3, 4]"}, "too many positional arguments"),
    "args": ({"args": "[1,"}, "It has args='[1,', which is no JSON list. Correct it there."),
    "no list": ({"args": '{"a": 1}'}, "which is no JSON list"),
    "kwargs": ({"kwargs": "null"}, "It has kwargs='null', which is no JSON object"),
    "type": ({"args": '[{"__type__": "datetime", "__value__": "2026-01-01"}]'}, "datetime"),
    "queue": ({"queue": "celery"}, "Queue 'celery' is not valid"),
    "priority": ({"priority": 10}, "priority=10 is not served"),
    "exchange": (
        {"exchange": "e", "routing_key": "r"},
        "It has exchange='e', routing_key='r', which",
    ),
    "headers": ({"headers": '{"trace": 1}'}, "It has headers={'trace': 1}, which"),
    "no headers": ({"headers": "{"}, "It has headers='{', which is no JSON object"),
    "expires": ({"expire_seconds": 60}, "Give its task expires=timedelta(seconds=60)"),
    "ends": ({"expires": now() + 60 * SECOND}, "before its next time. Delete it there."),
    "off once": ({"one_off": True, "enabled": False}, "It is disabled, so that it may have run"),
}


def check_that_what_has_no_counterpart_stays_with_the_reason():
    for name, (given, _) in REFUSED.items():
        has_times = KINDS.keys() & given.keys() or name == "none"
        add(name, **given, **({} if has_times else {"interval": HOURLY}))
    clocked = {"clocked_time": now() + DAY}
    add("off later", clocked=clocked, one_off=True, enabled=False)

    for arguments in (["--dry-run"], []):
        problems, code = move(*arguments)
        for name, (_, reason) in REFUSED.items():
            assert reason in problems[name], (name, problems[name])
            assert "InvalidSchedule" not in problems[name]
        assert "It is disabled" in problems["off later"]
        assert (code, left()) == (1, sorted([*REFUSED, "off later"]))
        assert not tasks.exists()


def check_that_a_priority_needs_the_name_of_the_broker():
    add("urgent", interval=HOURLY, priority=2)

    with override_settings(DBQUEUE_CELERY_BROKER=None):
        assert "The setting DBQUEUE_CELERY_BROKER is None" in move()[0]["urgent"]
    with override_settings(DBQUEUE_CELERY_BROKER="rabbitmq"):
        assert move() == ({"urgent": ""}, 0)
    assert tasks.get().priority == 2


def check_that_rows_that_run_once_become_jobs():
    later = now() + DAY
    add_once("clocked", clocked={"clocked_time": later}, priority=0, expire_seconds=60)
    add_once("starts", clocked={"clocked_time": now()}, start_time=later)
    add_once("hourly", interval=HOURLY, last_run_at=now(), expires=later)
    add_once("missed", clocked={"clocked_time": now() - HOUR})
    add_once("has run", clocked={"clocked_time": now() - HOUR}, total_run_count=1)
    add_once("is over", clocked={"clocked_time": now() - HOUR}, enabled=False)
    add_once("expired", interval=HOURLY, expires=now() - HOUR)
    add_once("malformed", clocked={"clocked_time": later}, kwargs="[")
    add_once("unknown", clocked={"clocked_time": later}, task="old.gone")

    problems, code = move()

    assert problems["?"].startswith("malformed: It has kwargs='[', which is no JSON object")
    assert "old.gone is no task with @task" in problems["old.gone"]
    assert sorted(problems) == ["?", "old.gone", OURS]
    assert (code, left()) == (1, ["expired", "has run", "is over", "malformed", "unknown"])
    assert (enqueued(), tasks.count()) == (0, 0)
    found = {job.args[0]: job for job in jobs.all()}
    assert {name: (job.state, job.run_after) for name, job in found.items() if job.run_after} == {
        "clocked": ("scheduled", later),
        "starts": ("scheduled", later),
        "hourly": ("scheduled", found["hourly"].run_after),
        "missed": ("ready", found["missed"].run_after),
    }
    assert timedelta() < found["hourly"].run_after - now() <= HOUR
    assert [found[name].expires_at for name in ("clocked", "hourly")] == [
        later + 60 * SECOND,
        later,
    ]
    assert {(job.queue, job.priority, job.task) for job in found.values()} == {("mail", 0, OURS)}


def add_once(name: str, **given: Any) -> None:
    add(name, **{"one_off": True, "queue": "mail", "args": json.dumps([name]), **given})


def check_that_a_dry_run_changes_nothing():
    theirs.PeriodicTasks.update_changed()
    add("hourly", interval=HOURLY)
    add_once("clocked", clocked={"clocked_time": now() + DAY})
    before = theirs.PeriodicTasks.last_change()

    assert move("--dry-run") == ({OURS: "", "hourly": ""}, 0)

    assert (tasks.count(), jobs.count(), left()) == (0, 0, ["clocked", "hourly"])
    assert theirs.PeriodicTasks.last_change() == before


def check_that_the_clean_up_of_celery_stays_and_is_no_error():
    name = "celery.backend_cleanup"
    add(name, task=name, crontab=NIGHTLY, expire_seconds=43_200)

    for arguments in (["--dry-run"], []):
        problems, code = move(*arguments)
        assert (code, left()) == (0, [name])
        assert problems[name].startswith("It deletes Celery's results")


def check_that_a_row_of_beat_schedule_stays_until_it_is_taken_out():
    add("hourly", interval=HOURLY)

    current_app.conf.beat_schedule = {"hourly": {}}
    problems, code = move()
    assert "from which beat writes it again" in problems["hourly"]
    assert (code, left()) == (1, ["hourly"])
    current_app.conf.beat_schedule = {}
    assert move() == ({"hourly": ""}, 0)


def check_that_a_name_that_is_taken_stays():
    add("hourly", interval=HOURLY)
    tasks.create(name="hourly", task=OURS, args=[8], every=HOUR)

    for arguments in (["--dry-run"], []):
        problems, code = move(*arguments)
        assert "There is a recurring task 'hourly' already." in problems["hourly"]
        assert (code, left(), tasks.get().args) == (1, ["hourly"], [8])


class Report(models.Model):
    """A model of the project that refers to a schedule."""

    schedule = models.ForeignKey(theirs.PeriodicTask, models.CASCADE)

    class Meta:
        app_label = "importing"


def check_that_a_row_to_which_others_refer_stays():
    add("hourly", interval=HOURLY)
    add_once("clocked", clocked={"clocked_time": now() + DAY})
    for row in rows.all():
        Report.objects.create(schedule=row)

    for arguments in (["--dry-run"], []):
        problems, code = move(*arguments)
        assert "importing.Report.schedule refers to it" in problems["hourly"]
        assert problems["?"].startswith("clocked: importing.Report.schedule refers to it")
        assert (code, left(), Report.objects.count()) == (1, ["clocked", "hourly"], 2)
    Report.objects.all().delete()
    assert move()[1] == 0


def check_that_an_interrupted_move_is_repeated():
    add("hourly", interval=HOURLY, last_run_at=now())
    interrupted = patch.object(DjangoCeleryBeat, "remove_schedule", side_effect=KeyboardInterrupt)
    with interrupted, suppress(KeyboardInterrupt):
        move()
    assert (left(), tasks.count()) == (["hourly"], 0)

    # Between the commits of two databases, it is in both.
    with patch.object(DjangoCeleryBeat, "remove_schedule"):
        assert move() == ({"hourly": ""}, 0)
    assert (left(), tasks.count()) == (["hourly"], 1)
    rows.update(last_run_at=now() + SECOND)
    assert move() == ({"hourly": ""}, 0)
    assert (left(), tasks.count()) == ([], 1)


def check_that_a_locked_row_stays():
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            list(rows.select_for_update())
            locked.set()
            done.wait(60)
        connections.close_all()

    add("hourly", interval=HOURLY)
    add_once("clocked", clocked={"clocked_time": now() + DAY})
    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(60)
    try:
        assert move() == ({}, 0)
    finally:
        done.set()
        thread.join()
    assert (left(), tasks.count(), jobs.count()) == (["clocked", "hourly"], 0, 0)


def check_that_a_deadlock_with_the_admin_is_repeated():
    """Saving a row locks the change marker first, and the row afterwards."""
    locked = threading.Event()

    def save() -> None:
        with suppress(OperationalError), transaction.atomic():
            theirs.PeriodicTasks.update_changed()
            locked.set()
            time_sleep(0.5)
            rows.update(description="changed")
        connections.close_all()

    theirs.PeriodicTasks.update_changed()
    add("hourly", interval=HOURLY)
    thread = threading.Thread(target=save)
    thread.start()
    locked.wait(60)
    with patch.object(DjangoCeleryBeat, "prepare"):
        move()
    thread.join()
    move()  # The row may have been locked.
    assert (left(), tasks.count()) == ([], 1)


def check_that_times_are_moved_without_use_tz():
    at = now()
    add("hourly", interval=HOURLY, last_run_at=at)
    add_once("clocked", clocked={"clocked_time": at + DAY}, expires=at + 2 * DAY)

    with override_settings(USE_TZ=False):
        assert move() == ({OURS: "", "hourly": ""}, 0)
    assert tasks.get().next_run_at == at + HOUR
    assert (jobs.get().run_after, jobs.get().expires_at) == (at + DAY, at + 2 * DAY)


class Beat(DatabaseScheduler):
    """Beat, which records tasks instead of sending them."""

    sent: list[tuple[str, datetime]]

    def send_task(self, name: str, args: list[str], kwargs: Any, **options: Any) -> None:
        self.sent.append((args[0], datetime.now(timezone.utc)))

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            time_sleep(max(0, min(self.tick(), 0.1)))


def check_that_a_running_beat_and_the_dispatcher_start_each_time_once():
    stop, sent = threading.Event(), []

    def run() -> None:
        beat = Beat(app=current_app._get_current_object())
        beat.sent = sent
        beat.run(stop)
        connections.close_all()

    # It saves the first run at once, and the next ones after three minutes.
    for name, ago in (("first", 60), ("second", 14)):
        often = {"every": 15, "period": "seconds"}
        add(name, args=f'["{name}"]', interval=often, last_run_at=now() - ago * SECOND)
    thread = threading.Thread(target=run)
    thread.start()
    time_sleep(4)
    assert [name for name, _ in sent] == ["first", "second"]
    try:
        assert move(waits=True) == ({"first": "", "second": ""}, 0)
        time_sleep(2)
    finally:
        stop.set()
        thread.join()

    assert [name for name, _ in sent] == ["first", "second"]
    assert (left(), enqueued()) == ([], 0)
    for name, at in sent:
        assert abs(tasks.get(name=name).next_run_at - at - 15 * SECOND) < SECOND


def main() -> None:
    for alias in connections:
        call_command("migrate", database=alias, verbosity=0)
    with connection.schema_editor() as editor:
        editor.create_model(Report)
    current_app.conf.update(broker_url="memory://", beat_max_loop_interval=1, result_expires=None)
    checks = [check for name, check in globals().items() if name.startswith("check_")]
    for check in checks:
        if check in NOT_ON.get(connection.vendor, ()):
            continue
        for each in (rows, tasks, jobs, *(kind.objects for kind in KINDS.values())):
            each.all().delete()
        print(check.__name__, flush=True)
        check()


NOT_ON = {
    "sqlite": [
        check_that_a_locked_row_stays,
        check_that_a_deadlock_with_the_admin_is_repeated,
        check_that_times_are_moved_without_use_tz,
    ],
    "mysql": [check_that_times_are_moved_without_use_tz],
}

main()
