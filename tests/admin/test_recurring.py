"""The page of recurring tasks: tasks added there, and tasks declared in code."""

from __future__ import annotations

import json
import re
import zoneinfo
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.admin.calendar import Calendar
from django_dbqueue.admin.formatting import schedule
from django_dbqueue.core.counts import Counts, Times
from django_dbqueue.core.redaction import HIDDEN
from django_dbqueue.core.uuid7 import uuid7
from django_dbqueue.models import Job, RecurringExecution, RecurringTask, Statistic
from django_dbqueue.models.enums import State

from .conftest import EDIT, OPERATE, VIEW, a_client, a_job, a_recurring_task, act, press

FORM_DATA = {
    "name": "report",
    "task": "tests.tasks.add",
    "args": "[1]",
    "kwargs": "{}",
    "cron": "0 9 * * mon-fri",
}
FORM_DATA |= {
    "timezone": "Europe/Berlin",
    "missed": "skip",
    "most_missed": "10",
    "jitter": "00:00:00",
}


def url(name: str = "changelist", *args: Any) -> str:
    return reverse(f"admin:dbqueue_recurringtask_{name}", args=args)


@pytest.fixture
def editor(db: Any) -> Client:
    return a_client("editor", VIEW + OPERATE + EDIT)


def submit_new(client: Client, **values: str) -> Any:
    return client.post(url("add"), {**FORM_DATA, **values}, follow=True)


def errors(response: Any) -> str:
    return " ".join(str(each) for each in response.context["adminform"].form.errors.values())


class TestAddedInAdmin:
    def test_task_is_added_and_its_next_runs_are_shown(self, editor: Client) -> None:
        response = submit_new(editor)

        row = RecurringTask.objects.get()
        assert (row.name, row.args, row.kwargs, row.is_from_code, row.is_enabled) == (
            "report",
            [1],
            {},
            False,
            True,
        )
        assert (
            "Next runs" in response.text and response.text.count(":45:00</time>") == 5
        )  # In Kathmandu.

    @pytest.mark.parametrize(
        ("values", "error"),
        [
            ({"cron": "0 0 31 2 *"}, "never matches"),
            ({"cron": "59/15 * * * *"}, "Write 59-59/15"),
            ({"cron": ""}, "either a cron expression or an interval"),
            ({"every": "00:05:00"}, "either a cron expression or an interval"),
            ({"cron": "", "timezone": "", "every": "-00:05:00"}, "every must be from one second"),
            (
                {"cron": "", "timezone": "", "every": "00:05:00", "jitter": "00:06:00"},
                "is not shorter than",
            ),
            ({"timezone": "Europe/Berlim"}, "Did you mean"),
            ({"drift": "on"}, "Use every"),
            ({"task": ""}, "either a task or a command"),
            ({"command": "check"}, "either a task or a command"),
            ({"task": "", "command": "clearsesions"}, "there is no command"),
            (
                {"task": "", "command": "check", "args": "[]"},
                "call_command may not run &#x27;check&#x27;",
            ),
            (
                {"task": "django_dbqueue.contrib.tasks.call_command", "args": '["check"]'},
                "Add it to TASKS",
            ),
            (
                {"task": "django_dbqueue.contrib.tasks.run_sql", "args": '["SELECT 1"]'},
                "run_sql may not run",
            ),
            ({"task": "shop.tasks.report"}, "is not known here"),
            ({"task": "os.system"}, "not a task"),
            ({"args": "[]"}, "missing a required argument"),
            ({"args": '{"a": 1}'}, "must be a list"),
            ({"kwargs": "[1]"}, "a dict"),
            ({"priority": "200"}, "between -100 and 100"),
            ({"most_missed": "0"}, "from 1 to 1000"),
            ({"ends_at_0": "2020-01-01", "ends_at_1": "00:00:00"}, "no time left"),
            ({"name": "nightly"}, "already exists"),
        ],
    )
    def test_invalid_input_is_refused_with_an_error(
        self, editor: Client, values: dict[str, str], error: str
    ) -> None:
        a_recurring_task()

        response = submit_new(editor, **values)

        assert error in errors(response)
        assert RecurringTask.objects.count() == 1

    def test_allowed_command_is_added_and_run_now(
        self, editor: Client, backend: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            vars(backend), "config", backend.config.changed(allow_commands=["check"])
        )
        submit_new(editor, task="", command="check", args="[]")

        press(editor, "recurringtask", "run", RecurringTask.objects.get().pk)

        assert Job.objects.get().args == ["check"]

    def test_disallowed_command_is_not_run_now(self, editor: Client) -> None:
        row = a_recurring_task(task="", command="check")

        response = press(editor, "recurringtask", "run", row.pk)

        assert "all_command may not run &#x27;check" in response.text and not Job.objects.exists()

    def test_changed_schedule_resets_next_run_and_problem(self, editor: Client) -> None:
        row = a_recurring_task(next_run_at=timezone.now(), problem="It was wrong.")

        editor.post(url("change", row.pk), {**FORM_DATA, "name": "nightly"})

        row.refresh_from_db()
        assert (row.cron, row.next_run_at, row.problem) == ("0 9 * * mon-fri", None, "")

    def test_changed_arguments_keep_the_next_run(self, editor: Client) -> None:
        soon = timezone.now().replace(microsecond=0)
        submit_new(editor)
        RecurringTask.objects.update(next_run_at=soon)

        editor.post(url("change", RecurringTask.objects.get().pk), {**FORM_DATA, "args": "[2]"})

        row = RecurringTask.objects.get()
        assert (row.args, row.next_run_at) == ([2], soon)

    def test_hidden_arguments_are_not_shown_and_stay(self, editor: Client) -> None:
        secret = {
            "task": "tests.tasks.sign_in",
            "args": ["ann", "hunter2"],
            "kwargs": {"headers": {"password": "swordfish", "to": ["x"]}, "token": "t0p"},
        }
        row = a_recurring_task(**secret)
        page = url("change", row.pk)

        text = editor.get(page).text
        assert "ann" in text and not [
            each for each in ("hunter2", "swordfish", "t0p") if each in text
        ]
        given = {name: json.dumps(value) for name, value in secret.items() if name != "task"}
        given["args"] = json.dumps(["bob", HIDDEN])
        given["kwargs"] = json.dumps(
            {"headers": {"password": HIDDEN, "to": ["y", "z"]}, "token": HIDDEN}
        )
        values = {**FORM_DATA, "name": row.name, "task": row.task, **given}
        editor.post(page, values)
        row.refresh_from_db()
        assert row.args == ["bob", "hunter2"]
        headers = {"password": "swordfish", "to": ["y", "z"]}
        assert row.kwargs == {"headers": headers, "token": "t0p"}

        moved = {**values, "args": json.dumps([HIDDEN, "bob"])}
        other = {**values, "task": "tests.tasks.echo"}
        for each in (moved, other):
            assert "Enter the hidden values again" in editor.post(page, each).text
        row.refresh_from_db()
        assert row.args == ["bob", "hunter2"]

    def test_task_is_deleted_with_its_executions(self, editor: Client) -> None:
        row = a_recurring_task()
        RecurringExecution.objects.create(task=row, run_at=timezone.now())

        editor.post(url("delete", row.pk), {"post": "yes"})

        assert not RecurringTask.objects.exists() and not RecurringExecution.objects.exists()

    @pytest.mark.parametrize("missing", EDIT)
    def test_add_change_and_delete_require_their_permission(self, db: Any, missing: str) -> None:
        client = a_client("user", VIEW + OPERATE + [name for name in EDIT if name != missing])
        row = a_recurring_task()
        request = {
            "add_recurringtask": lambda: client.post(url("add"), FORM_DATA),
            "change_recurringtask": lambda: client.post(
                url("change", row.pk), {**FORM_DATA, "name": "other"}
            ),
            "delete_recurringtask": lambda: client.post(url("delete", row.pk), {"post": "yes"}),
        }[missing]

        assert request().status_code == 403
        assert list(RecurringTask.objects.values_list("name", flat=True)) == ["nightly"]


class TestDeclaredInCode:
    def test_task_is_shown_but_not_changed_or_deleted(self, editor: Client) -> None:
        row = a_recurring_task(is_from_code=True)

        text = editor.get(url("change", row.pk)).text

        assert (
            "It is defined in code" in text
            and "<textarea" not in text
            and 'name="_save"' not in text
        )
        assert editor.post(url("change", row.pk), FORM_DATA).status_code == 403
        assert editor.post(url("delete", row.pk), {"post": "yes"}).status_code == 403
        editor.post(
            url(), {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
        )
        assert RecurringTask.objects.get().name == "nightly"

    def test_secrets_are_hidden_from_viewers(self, viewer: Client) -> None:
        row = a_recurring_task(
            task="tests.tasks.sign_in",
            args=["ann", "hunter2"],
            kwargs={"headers": {}, "token": "t0p"},
        )

        text = viewer.get(url("change", row.pk)).text

        assert "ann" in text and "hunter2" not in text and "t0p" not in text

    def test_secret_variable_arguments_are_hidden_from_viewers(self, viewer: Client) -> None:
        row = a_recurring_task(
            task="tests.tasks.sign_in_many",
            args=["ann", "hunter2", "swordfish"],
            kwargs={"ftp": "t0p"},
        )

        text = viewer.get(url("change", row.pk)).text

        assert "ann" in text and not [
            secret for secret in ("hunter2", "swordfish", "t0p") if secret in text
        ]

    def test_task_is_disabled_enabled_and_run(self, editor: Client) -> None:
        row = a_recurring_task(is_from_code=True)

        press(editor, "recurringtask", "disable", row.pk)
        assert not RecurringTask.objects.get().is_enabled
        press(editor, "recurringtask", "enable", row.pk)
        assert RecurringTask.objects.get().is_enabled
        press(editor, "recurringtask", "run", row.pk)
        assert Job.objects.get().task == "tests.tasks.nothing"


def test_run_of_unknown_task_shows_an_error(editor: Client) -> None:
    row = a_recurring_task(task="shop.tasks.gone")

    assert "is not known here" in press(editor, "recurringtask", "run", row.pk).text
    assert not Job.objects.exists()


def test_page_shows_next_and_last_runs(viewer: Client, db: Any) -> None:
    row, now = a_recurring_task(problem="shop.tasks.x is not known"), timezone.now()
    job = a_job(state=Job.State.FAILED)
    RecurringExecution.objects.create(task=row, run_at=now, job=job.pk)
    RecurringExecution.objects.create(
        task=row, run_at=now - timedelta(days=1), job="0190a6c0-0000-7000-8000-000000000000"
    )

    text = viewer.get(url("change", row.pk)).text

    assert text.count("<li><time") == 5
    assert reverse("admin:dbqueue_job_change", args=[job.pk]) in text and "job deleted" in text
    assert "shop.tasks.x is not known" in text


def test_query_count_of_list_does_not_grow_with_rows(viewer: Client, db: Any) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            assert viewer.get(url()).status_code == 200
        return len(seen)

    def add(number: int) -> None:
        row = a_recurring_task(name=f"row {number}", last_run_at=timezone.now())
        RecurringExecution.objects.create(task=row, run_at=timezone.now(), job=a_job().pk)

    add(0), viewer.get(url())
    one = queries()
    for number in range(1, 20):
        add(number)

    assert queries() == one


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cron": "* * * * *"}, "every minute (Europe/Berlin)"),
        ({"cron": "*/5 * * * *", "timezone": ""}, "every 5 minutes (Asia/Kathmandu)"),
        ({"cron": "7 * * * *"}, "hourly, at minute 7 (Europe/Berlin)"),
        ({"cron": "@daily"}, "daily at 00:00 (Europe/Berlin)"),
        ({"cron": "0 9 * * mon-fri"}, "Mon-Fri at 09:00 (Europe/Berlin)"),
        ({"cron": "0 9 1 * *"}, "monthly on day 1 at 09:00 (Europe/Berlin)"),
        ({"cron": "0 9 1 * mon"}, "0 9 1 * mon (Europe/Berlin)"),
        ({"cron": "nonsense"}, "nonsense (Europe/Berlin)"),
        ({"cron": "*/0 * * * *"}, "*/0 * * * * (Europe/Berlin)"),
        ({"cron": "*/5-10 * * * *"}, "*/5-10 * * * * (Europe/Berlin)"),
        ({"cron": "*/ * * * *"}, "*/ * * * * (Europe/Berlin)"),
        ({"cron": "*/² * * * *"}, "*/² * * * * (Europe/Berlin)"),
        ({"cron": "", "every": timedelta(minutes=90)}, "every 1 h 30 min"),
        (
            {"cron": "", "every": timedelta(seconds=30), "drift": True},
            "every 30 s, from the end of a run",
        ),
    ],
)
def test_schedule_is_formatted_as_text(values: dict[str, Any], expected: str) -> None:
    assert schedule(RecurringTask(**{"timezone": "Europe/Berlin", **values})) == expected


@pytest.mark.django_db
def test_page_is_shown_without_time_zone_support(settings):
    settings.USE_TZ = False
    row = a_recurring_task()

    assert a_client("reader", VIEW).get(url("change", row.pk)).status_code == 200


def test_list_shows_the_states_of_the_last_runs(viewer: Client, db: Any) -> None:
    row = a_recurring_task()
    states = [State.FAILED, State.SUCCESSFUL, State.RUNNING]
    for hours, state in enumerate(states):
        job = a_job(state=state, process_id=1 if state == State.RUNNING else None)
        row.executions.create(run_at=timezone.now() - timedelta(hours=hours), job=job.pk)
    row.executions.create(run_at=timezone.now() - timedelta(hours=9), job=uuid7())

    text = viewer.get(url()).text
    cell = text.partition("field-last_runs")[2].partition("</td>")[0]

    assert re.findall(r'title="([^"]+)"', cell) == [
        "Failed",
        "Successful",
        "Running",
        "job deleted",
    ]
    assert cell.count("/admin/dbqueue/job/") == 3


def test_queries_do_not_grow_with_recurring_tasks_and_their_runs(viewer: Client, db: Any) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as found:
            viewer.get(url())
        return len(found)

    row = a_recurring_task()
    row.executions.create(run_at=timezone.now(), job=a_job().pk)
    few = queries()
    for number in range(12):
        row = a_recurring_task(name=f"task {number}")
        for hours in range(12):
            row.executions.create(run_at=timezone.now() - timedelta(hours=hours), job=a_job().pk)

    assert queries() == few


def test_overdue_task_is_red_unless_it_is_disabled(viewer: Client, db: Any) -> None:
    late = timezone.now() - timedelta(minutes=30)
    row = a_recurring_task()
    RecurringTask.objects.update(next_run_at=late)
    assert "Overdue" in viewer.get(url()).text

    RecurringTask.objects.filter(pk=row.pk).update(is_enabled=False)
    assert "Overdue" not in viewer.get(url()).text


class TestCalendar:
    """The next day, or the next week."""

    def text(self, client: Client, query: str = "") -> str:
        return client.get(url() + query).text.partition('id="dbq-calendar"')[2]

    def test_runs_are_drawn_at_their_times(self, viewer: Client, db: Any) -> None:
        a_recurring_task(name="hourly", cron="0 * * * *", timezone="UTC")
        a_recurring_task(name="nightly", cron="0 3 * * *", timezone="UTC")

        day, week = self.text(viewer), self.text(viewer, "?calendar=7")

        assert 'aria-label="24 runs"' in day and 'aria-label="1 run"' in day
        assert 'aria-label="7 runs"' in week and 'aria-label="more than 100 runs"' in week
        places = [float(x) for x in re.findall(r'<rect class="dbq-runs" x="([\d.]+)"', day)]
        assert len(places) == 25 and all(0 <= x <= 960 for x in places)
        hours = sorted(places[:24])
        assert [b - a for a, b in pairwise(hours)] == pytest.approx([40.0] * 23, abs=0.2)

    @pytest.mark.skipif(
        connection.vendor != "postgresql", reason="Other databases need USE_TZ = True: E004."
    )
    @pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
    def test_runs_are_drawn_without_time_zone_support(
        self, viewer: Client, db: Any, settings: Any, zone: str
    ) -> None:
        settings.USE_TZ, settings.TIME_ZONE = False, zone
        a_recurring_task(name="hourly", cron="0 * * * *", timezone="UTC")

        day, week = self.text(viewer), self.text(viewer, "?calendar=7")

        assert 'aria-label="24 runs"' in day
        assert 'aria-label="more than 100 runs"' in week
        hours = sorted(float(x) for x in re.findall(r'<rect class="dbq-runs" x="([\d.]+)"', day))
        assert 0 <= hours[0] <= 40.1 and hours[-1] >= 919.9

    def test_run_is_as_long_as_usual(self, viewer: Client, db: Any) -> None:
        a_recurring_task(name="nightly", task="tests.tasks.nothing", cron="0 3 * * *")
        statistic = Statistic(
            period="hour",
            start=timezone.now() - timedelta(hours=5),
            queue="q",
            task="tests.tasks.nothing",
        )
        statistic.counts = Counts(runs=2, run_time=Times.of([3600.0, 10_800.0]))
        statistic.save()

        text = self.text(viewer)

        assert "usually for 2 h" in text
        (width,) = re.findall(r'height="12" width="([\d.]+)"', text)
        assert 0 < float(width) <= 80.1

    def test_disabled_ended_and_broken_schedules_are_left_out(
        self, viewer: Client, db: Any
    ) -> None:
        a_recurring_task(name="off", is_enabled=False)
        a_recurring_task(name="over", ends_at=timezone.now() - timedelta(days=1))
        RecurringTask.objects.filter(pk=a_recurring_task(name="broken").pk).update(cron="x y z")

        assert self.text(viewer) == ""

    def test_change_of_the_clocks_is_said(self, viewer: Client, db: Any, monkeypatch: Any) -> None:
        a_recurring_task(cron="0 3 * * *")
        berlin = zoneinfo.ZoneInfo("Europe/Berlin")
        said = "The clocks change in this time."
        with timezone.override(berlin):
            for start, expected in (
                (datetime(2026, 10, 24, 12, tzinfo=berlin), True),
                (datetime(2026, 11, 24, 12, tzinfo=berlin), False),
            ):
                calendar = Calendar(start, start + timedelta(days=1), [])
                assert (said in calendar.draw()) == expected


@pytest.mark.parametrize("action", ["run", "disable"])
def test_question_about_several_tasks_is_a_page(operator: Client, db: Any, action: str) -> None:
    rows = [a_recurring_task(name=f"task {number}") for number in range(3)]

    page = act(operator, action, [row.pk for row in rows], page="recurringtask")

    assert page.status_code == 200 and "3 recurring tasks" in page.text
