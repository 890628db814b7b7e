"""The page of recurring tasks: what is made there, and what can be done to what the code declares."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.admin.formatting import schedule
from django_dbqueue.models import Job, RecurringExecution, RecurringTask

from .conftest import MAKE, OPERATE, VIEW, a_client, a_job, a_recurring_task, press

GIVEN = {
    "name": "report",
    "task": "tests.tasks.add",
    "args": "[1]",
    "kwargs": "{}",
    "cron": "0 9 * * mon-fri",
}
GIVEN |= {"timezone": "Europe/Berlin", "missed": "skip", "most_missed": "10", "jitter": "00:00:00"}


def url(name: str = "changelist", *args: Any) -> str:
    return reverse(f"admin:dbqueue_recurringtask_{name}", args=args)


@pytest.fixture
def maker(db: Any) -> Client:
    return a_client("maker", VIEW + OPERATE + MAKE)


def make(client: Client, **values: str) -> Any:
    return client.post(url("add"), {**GIVEN, **values}, follow=True)


def errors(answer: Any) -> str:
    return " ".join(str(each) for each in answer.context["adminform"].form.errors.values())


class TestMade:
    def test_it_is_made_and_its_next_times_are_shown(self, maker: Client) -> None:
        answer = make(maker)

        row = RecurringTask.objects.get()
        assert (row.name, row.args, row.kwargs, row.is_from_code, row.is_enabled) == (
            "report",
            [1],
            {},
            False,
            True,
        )
        assert (
            "Next runs" in answer.text and answer.text.count(":45:00</time>") == 5
        )  # In Kathmandu.

    @pytest.mark.parametrize(
        ("values", "why"),
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
    def test_what_cannot_be_is_refused_with_the_reason(
        self, maker: Client, values: dict[str, str], why: str
    ) -> None:
        a_recurring_task()

        answer = make(maker, **values)

        assert why in errors(answer)
        assert RecurringTask.objects.count() == 1

    def test_allowed_command_is_made_and_run_now(
        self, maker: Client, backend: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(
            vars(backend), "config", backend.config.changed(allow_commands=["check"])
        )
        make(maker, task="", command="check", args="[]")

        press(maker, "recurringtask", "run", RecurringTask.objects.get().pk)

        assert Job.objects.get().args == ["check"]

    def test_command_that_is_not_allowed_is_not_run_now(self, maker: Client) -> None:
        row = a_recurring_task(task="", command="check")

        answer = press(maker, "recurringtask", "run", row.pk)

        assert "all_command may not run &#x27;check" in answer.text and not Job.objects.exists()

    def test_another_schedule_is_planned_anew_and_a_problem_is_over(self, maker: Client) -> None:
        row = a_recurring_task(next_run_at=timezone.now(), problem="It was wrong.")

        maker.post(url("change", row.pk), {**GIVEN, "name": "nightly"})

        row.refresh_from_db()
        assert (row.cron, row.next_run_at, row.problem) == ("0 9 * * mon-fri", None, "")

    def test_other_changes_leave_its_next_time(self, maker: Client) -> None:
        soon = timezone.now().replace(microsecond=0)
        make(maker)
        RecurringTask.objects.update(next_run_at=soon)

        maker.post(url("change", RecurringTask.objects.get().pk), {**GIVEN, "args": "[2]"})

        row = RecurringTask.objects.get()
        assert (row.args, row.next_run_at) == ([2], soon)

    def test_it_is_deleted_with_its_executions(self, maker: Client) -> None:
        row = a_recurring_task()
        RecurringExecution.objects.create(task=row, run_at=timezone.now())

        maker.post(url("delete", row.pk), {"post": "yes"})

        assert not RecurringTask.objects.exists() and not RecurringExecution.objects.exists()

    @pytest.mark.parametrize("missing", MAKE)
    def test_each_needs_its_permission(self, db: Any, missing: str) -> None:
        client = a_client("someone", VIEW + OPERATE + [name for name in MAKE if name != missing])
        row = a_recurring_task()
        asked = {
            "add_recurringtask": lambda: client.post(url("add"), GIVEN),
            "change_recurringtask": lambda: client.post(
                url("change", row.pk), {**GIVEN, "name": "other"}
            ),
            "delete_recurringtask": lambda: client.post(url("delete", row.pk), {"post": "yes"}),
        }[missing]

        assert asked().status_code == 403
        assert list(RecurringTask.objects.values_list("name", flat=True)) == ["nightly"]


class TestFromCode:
    def test_it_can_be_read_but_not_changed_or_deleted(self, maker: Client) -> None:
        row = a_recurring_task(is_from_code=True)

        text = maker.get(url("change", row.pk)).text

        assert (
            "It is defined in code" in text
            and "<textarea" not in text
            and 'name="_save"' not in text
        )
        assert maker.post(url("change", row.pk), GIVEN).status_code == 403
        assert maker.post(url("delete", row.pk), {"post": "yes"}).status_code == 403
        maker.post(
            url(), {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
        )
        assert RecurringTask.objects.get().name == "nightly"

    def test_secrets_are_not_shown_to_who_may_only_read(self, viewer: Client) -> None:
        row = a_recurring_task(
            task="tests.tasks.sign_in",
            args=["ann", "hunter2"],
            kwargs={"headers": {}, "token": "t0p"},
        )

        text = viewer.get(url("change", row.pk)).text

        assert "ann" in text and "hunter2" not in text and "t0p" not in text

    def test_variable_secrets_are_not_shown_to_who_may_only_read(self, viewer: Client) -> None:
        row = a_recurring_task(
            task="tests.tasks.sign_in_many",
            args=["ann", "hunter2", "swordfish"],
            kwargs={"ftp": "t0p"},
        )

        text = viewer.get(url("change", row.pk)).text

        assert "ann" in text and not [
            secret for secret in ("hunter2", "swordfish", "t0p") if secret in text
        ]

    def test_it_can_be_disabled_enabled_and_run(self, maker: Client) -> None:
        row = a_recurring_task(is_from_code=True)

        press(maker, "recurringtask", "disable", row.pk)
        assert not RecurringTask.objects.get().is_enabled
        press(maker, "recurringtask", "enable", row.pk)
        assert RecurringTask.objects.get().is_enabled
        press(maker, "recurringtask", "run", row.pk)
        assert Job.objects.get().task == "tests.tasks.nothing"


def test_what_cannot_be_run_says_why(maker: Client) -> None:
    row = a_recurring_task(task="shop.tasks.gone")

    assert "is not known here" in press(maker, "recurringtask", "run", row.pk).text
    assert not Job.objects.exists()


def test_its_page_shows_its_next_times_and_its_last_runs(viewer: Client, db: Any) -> None:
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


def test_the_list_costs_as_many_queries_for_20_as_for_one(viewer: Client, db: Any) -> None:
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
    ("values", "words"),
    [
        ({"cron": "* * * * *"}, "every minute (Europe/Berlin)"),
        ({"cron": "*/5 * * * *", "timezone": ""}, "every 5 minutes (Asia/Kathmandu)"),
        ({"cron": "7 * * * *"}, "hourly, at minute 7 (Europe/Berlin)"),
        ({"cron": "@daily"}, "daily at 00:00 (Europe/Berlin)"),
        ({"cron": "0 9 * * mon-fri"}, "mon-fri at 09:00 (Europe/Berlin)"),
        ({"cron": "0 9 1 * *"}, "monthly on day 1 at 09:00 (Europe/Berlin)"),
        ({"cron": "0 9 1 * mon"}, "0 9 1 * mon (Europe/Berlin)"),
        ({"cron": "nonsense"}, "nonsense (Europe/Berlin)"),
        ({"cron": "", "every": timedelta(minutes=90)}, "every 1 h 30 min"),
        (
            {"cron": "", "every": timedelta(seconds=30), "drift": True},
            "every 30 s, from the end of a run",
        ),
    ],
)
def test_a_schedule_is_said_in_words(values: dict[str, Any], words: str) -> None:
    assert schedule(RecurringTask(**{"timezone": "Europe/Berlin", **values})) == words


@pytest.mark.django_db
def test_a_page_is_shown_in_a_project_without_time_zones(settings):
    settings.USE_TZ = False
    row = a_recurring_task()

    assert a_client("reader", VIEW).get(url("change", row.pk)).status_code == 200
