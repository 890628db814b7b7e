"""``OPTIONS["recurring"]``: schedules by settings, with the rules of those in code."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.core.checks import run_checks
from django.test import override_settings

from django_dbqueue import recurring, testing
from django_dbqueue.compat import task_backends
from django_dbqueue.contrib.tasks import call_command
from django_dbqueue.core.options import Options
from django_dbqueue.exceptions import CommandNotAllowed, InvalidOption
from django_dbqueue.models import Job, RecurringTask
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.recurrence.cron import UTC
from django_dbqueue.runtime.scheduler import Scheduler

from .. import tasks

pytestmark = pytest.mark.django_db(transaction=True)

OURS = "django_dbqueue.backend.DatabaseBackend"
HOUR = timedelta(hours=1)
EACH_MINUTE = ",".join(map(str, range(60)))


def backend_with(entries, **more):
    options = {"database": "default", "recurring": entries}
    return {"BACKEND": OURS, "QUEUES": [], "OPTIONS": options, **more}


@pytest.fixture
def declared(settings):
    """Put entries into the settings, and return a new scheduler that has had its turn."""

    def declare(entries) -> Scheduler:
        settings.TASKS = {"default": backend_with(entries)}
        scheduler = Scheduler(task_backends["default"])
        scheduler.SCAN = 0.0
        turn(scheduler)
        return scheduler

    return declare


def turn(scheduler: Scheduler) -> None:
    scheduler._scan_at = scheduler._declare_at = 0.0
    scheduler.turn(waiting=True)


def due() -> None:
    RecurringTask.objects.update(next_run_at=now_plus(-1.0))


def errors(tasks_setting) -> list[str]:
    with override_settings(TASKS=tasks_setting):
        return [
            message.msg
            for message in run_checks(databases=["default"])
            if message.id in ("dbqueue.E001", "dbqueue.E006")
        ]


def test_entry_becomes_a_row_as_in_code(declared):
    declared(
        {
            "nightly": {
                "task": "tests.tasks.add",
                "cron": "0 3 * * *",
                "timezone": "Europe/Rome",
                "args": [1],
                "kwargs": {"b": 2},
                "queue_name": "mail",
                "priority": 7,
                "missed": "all",
                "most_missed": 3,
                "jitter": 60,
                "starts_at": datetime(2026, 1, 1, tzinfo=UTC),
            },
            "often": {"task": "tests.tasks.nothing", "every": 300, "drift": True},
            "seldom": {"task": "tests.tasks.nothing", "every": timedelta(days=2), "enabled": True},
        }
    )

    nightly, often, seldom = RecurringTask.objects.order_by("name")
    assert (nightly.task, nightly.cron, nightly.timezone) == (
        "tests.tasks.add",
        "0 3 * * *",
        "Europe/Rome",
    )
    assert (nightly.args, nightly.kwargs, nightly.queue) == ([1], {"b": 2}, "mail")
    assert (nightly.priority, nightly.missed, nightly.most_missed) == (7, "all", 3)
    assert (nightly.jitter, nightly.is_from_code) == (timedelta(minutes=1), True)
    assert (often.every, often.drift, seldom.every) == (timedelta(minutes=5), True, 48 * HOUR)


def test_row_equals_that_of_the_same_declaration_in_code(declared):
    declared({"tests.tasks.add": {"task": "tests.tasks.add", "every": 3600, "args": [1]}})
    in_settings = RecurringTask.objects.get().definition
    declared({})
    recurring(every=HOUR, args=[1])(tasks.add)
    declared({})

    assert RecurringTask.objects.get().definition == in_settings


def test_task_is_enqueued_when_due(declared):
    scheduler = declared({"sum": {"task": "tests.tasks.add", "every": 3600, "args": [1]}})
    due()
    turn(scheduler)

    job = Job.objects.get()
    assert (job.task, job.args) == ("tests.tasks.add", [1])


def test_command_runs_with_exactly_its_arguments(declared):
    entry = {
        "command": "check",
        "every": 3600,
        "args": ["--database", "default"],
        "kwargs": {"verbosity": 0},
    }
    scheduler = declared({"clear": entry})
    due()
    turn(scheduler)

    assert Job.objects.get().args == ["check", "--database", "default"]
    testing.drain()
    assert Job.objects.get().state == "successful"
    with pytest.raises(CommandNotAllowed):
        call_command.enqueue("check", "--deploy")


@pytest.mark.parametrize("then", [{}, {"sum": {"enabled": False}}])
def test_removed_or_disabled_entry_is_no_longer_enqueued_and_deleted(declared, then):
    entry = {"task": "tests.tasks.nothing", "every": 3600}
    declared({"sum": entry})
    scheduler = declared({name: {**entry, **changes} for name, changes in then.items()})
    due()
    turn(scheduler)
    assert not Job.objects.exists()

    RecurringTask.objects.update(declared_at=now_plus(-2 * Scheduler.KEEP))
    scheduler._forget_at = 0.0
    turn(scheduler)
    assert not RecurringTask.objects.exists()


def test_disabled_entry_makes_no_row(declared):
    declared({"sum": {"task": "tests.tasks.gone", "every": 3600, "enabled": False}})

    assert not RecurringTask.objects.exists()


def test_changed_entry_changes_the_row_and_keeps_an_operators_disable(declared):
    declared({"sum": {"task": "tests.tasks.nothing", "every": 3600}})
    RecurringTask.objects.disable()
    declared({"sum": {"task": "tests.tasks.nothing", "cron": "0 9 * * *"}})

    row = RecurringTask.objects.get()
    assert (row.cron, row.every, row.is_enabled) == ("0 9 * * *", None, False)


def test_one_bad_entry_does_not_stop_the_others(declared, caplog):
    declared(
        {
            "bad": {"task": "tests.tasks.gone", "every": 3600},
            "good": {"task": "tests.tasks.nothing", "every": 3600},
        }
    )

    assert RecurringTask.objects.get().name == "good"
    assert "'bad': 'tests.tasks.gone' is not known here" in caplog.text


def test_name_of_a_declaration_in_code_is_refused(declared, caplog):
    recurring(every=HOUR, name="sum")(tasks.nothing)
    entries = {"sum": {"task": "tests.tasks.add", "every": 60, "args": [1]}}
    declared(entries)

    assert RecurringTask.objects.get().task == "tests.tasks.nothing"
    said = "'sum' of OPTIONS['recurring'] is already the recurring tests.tasks.nothing of the code"
    assert said in caplog.text
    assert any(said in message for message in errors({"default": backend_with(entries)}))


def test_row_made_in_the_admin_is_not_overwritten(declared, caplog):
    RecurringTask.objects.create(name="sum", task="tests.tasks.nothing", cron="0 9 * * *")
    declared({"sum": {"task": "tests.tasks.add", "every": 60, "args": [1]}})

    assert RecurringTask.objects.get().task == "tests.tasks.nothing"
    assert "'sum' is declared in the code and also made in the admin" in caplog.text


def test_jobs_belong_to_the_backend_of_the_entry(settings):
    settings.TASKS = {
        **settings.TASKS,
        "bulk": backend_with({"sum": {"task": "tests.tasks.nothing", "every": 60}}),
    }
    for alias in ("default", "bulk"):
        turn(Scheduler(task_backends[alias]))
        assert RecurringTask.objects.count() == (alias == "bulk")


class TestBadInput:
    @pytest.mark.parametrize(
        ("entry", "why"),
        [
            ({"every": 60}, "neither a task nor a command is given"),
            (
                {"task": "tests.tasks.nothing", "command": "check", "every": 60},
                "both task='tests.tasks.nothing' and command='check'",
            ),
            ({"task": "tests.tasks.gone", "every": 60}, "'tests.tasks.gone' is not known here"),
            ({"task": "tests.tasks.os", "every": 60}, "is a module, not a task"),
            ({"command": "clearsesions", "every": 60}, "there is no command 'clearsesions'"),
            ({"task": "tests.tasks.add", "every": 60}, "missing a required argument: 'a'"),
            ({"task": "tests.tasks.add", "every": 60, "args": "1"}, "must be a list"),
            ({"task": "tests.tasks.add", "every": 60, "args": None}, "must be a list"),
            ({"task": "tests.tasks.add", "every": 60, "kwargs": [1]}, "must be a list and a dict"),
            ({"task": "tests.tasks.add", "every": 60, "args": [HOUR]}, "Unsupported type"),
            ({"task": "tests.tasks.nothing", "every": 60, "priority": 200}, "between -100 and"),
            ({"task": "tests.tasks.nothing", "every": 60, "queue_name": "a,b"}, "queue_name"),
        ],
    )
    def test_invalid_target_is_a_system_check_error(self, entry, why):
        (found,) = errors({"default": backend_with({"sum": entry})})

        assert "'sum': " in found
        assert why in found

    @pytest.mark.parametrize(
        ("entries", "why"),
        [
            (["sum"], r"recurring=\['sum'\] is not a dict"),
            ({"sum": "0 3 * * *"}, r"recurring\['sum'\]: '0 3 \* \* \*' is not a dict"),
            ({"sum": {"cronn": "0 3 * * *"}}, r"recurring\['sum'\]: 'cronn' is .*'cron'"),
            ({"sum": {"interval": 60}}, "'interval' is not an option. Choose from task, command"),
            ({"sum": {"task": "a.b"}}, "'sum': neither a cron expression nor every"),
            ({"sum": {"task": "a.b", "every": 60, "cron": "0 3 * * *"}}, "Leave one out"),
            ({"sum": {"task": "a.b", "cron": "every day at 9am"}}, "has words"),
            ({"sum": {"task": "a.b", "cron": 5}}, "is text such as"),
            ({"sum": {"task": "a.b", "cron": f"{EACH_MINUTE} * * * *"}}, "more than 100. Shorten"),
            ({"sum": {"task": "a.b", "every": 0}}, "every must be from one second"),
            ({"sum": {"task": "a.b", "every": -1}}, "every: -1 is not a delay"),
            ({"sum": {"task": "a.b", "every": "1h"}}, "every: '1h' is not a delay. Give seconds"),
            ({"sum": {"task": "a.b", "every": float("nan")}}, "every: nan is not a delay"),
            ({"sum": {"task": "a.b", "every": 10**40}}, "is not a delay"),
            ({"sum": {"task": "a.b", "every": True}}, "every: True is not a delay"),
            ({"sum": {"task": "a.b", "every": 60, "jitter": None}}, "jitter: None is not a delay"),
            ({"sum": {"task": "a.b", "every": 60, "enabled": "no"}}, "enabled='no' is not True or"),
            ({"sum": {"task": "a.b", "every": 60, "drift": "false"}}, "drift='false' is not True"),
            ({"sum": {"task": 5, "every": 60}}, "task=5 is not text"),
            ({"sum": {"command": None, "every": 60}}, "command=None is not text"),
            ({"sum": {"task": "a.b", "every": 60, "queue_name": 5}}, "queue_name=5 is not text"),
            ({"sum": {"task": "a.b", "every": 60, "starts_at": "2027-01-01"}}, "aware datetime"),
            ({"sum": {"task": "a.b", "cron": "0 3 * * *", "timezone": "Rome"}}, "not a time zone"),
            ({"sum": {"task": "a.b", "cron": "0 3 * * *", "enabled": False, "x": 1}}, "'x' is not"),
            ({"": {"task": "a.b", "every": 60}}, "'' is not a name"),
            ({5: {"task": "a.b", "every": 60}}, "5 is not a name"),
            (
                {"a\x00": {"task": "a.b", "every": 60}},
                "is not a name of up to 255 characters without",
            ),
            ({"x" * 256: {"task": "a.b", "every": 60}}, "is not a name of up to 255"),
        ],
    )
    def test_invalid_entry_is_an_invalid_option(self, entries, why):
        with pytest.raises(InvalidOption, match=why):
            Options.from_settings({"recurring": entries})

    def test_invalid_entry_is_a_system_check_error(self):
        (found,) = errors({"default": backend_with({"sum": {"task": "a.b", "cron": "9am"}})})

        assert found.startswith("TASKS['default']['OPTIONS']: recurring: 'sum': The cron")

    def test_one_name_in_two_backends_of_a_database_is_an_error(self):
        entry = {"sum": {"task": "tests.tasks.nothing", "every": 60}}
        found = errors(
            {
                "one": backend_with(entry, QUEUES=["a"]),
                "two": backend_with(entry, QUEUES=["b"]),
                "default": backend_with({}, QUEUES=["default"]),
            }
        )

        assert any("TASKS['one'] and TASKS['two'] both declare 'sum'" in each for each in found)
