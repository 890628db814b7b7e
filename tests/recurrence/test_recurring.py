"""Recurring tasks are declared, synchronised, scheduled, and enqueued once for each time."""

from __future__ import annotations

import sys
import textwrap
import threading
import types
from datetime import datetime, timedelta, timezone

import pytest
from django.core.checks import run_checks
from django.db import (
    IntegrityError,
    InterfaceError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.test.utils import CaptureQueriesContext

from django_dbqueue import checks, recurring, recurring_command, task, testing
from django_dbqueue.compat import FrameworkTask, task_backends
from django_dbqueue.contrib.tasks import call_command
from django_dbqueue.engine import recurring as recurring_engine
from django_dbqueue.engine.attempt_result import AttemptResult
from django_dbqueue.exceptions import InvalidSchedule, InvalidTaskPath
from django_dbqueue.models import Execution, Job, RecurringExecution, RecurringTask
from django_dbqueue.models.expressions import Now, now_plus
from django_dbqueue.recurrence.declare import declared
from django_dbqueue.recurrence.target import enqueue
from django_dbqueue.runtime import scheduler as runtime_scheduler
from django_dbqueue.runtime.scheduler import Scheduler

from .. import direct, tasks
from ..conftest import BOTH, LONG, log_of, until
from ..models import Effect
from ..reliability.conftest import Elsewhere

pytestmark = pytest.mark.django_db(transaction=True)

UTC = timezone.utc
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
LONG_CRON = (
    "0,2,4,6,8,11,13,15,17,19,22,24,26,28,31,33,35,37,39,41,44,46,48,50,52 0,1,2,3,4,5,6,7 "
    "1-5,8-12,15-19,22-26 * mon-fri"
)
BEFORE_YEAR_1 = datetime(1, 1, 1, tzinfo=timezone(5 * HOUR))
AFTER_YEAR_9999 = datetime(9999, 12, 31, 23, tzinfo=timezone(-5 * HOUR))


@task(key=lambda: "one", on_conflict="once")
def once():
    pass


@pytest.fixture
def a_module(monkeypatch):
    """Import a task module with this text."""

    def imported(text: str) -> None:
        lines = textwrap.dedent(text)
        module = types.ModuleType("shop_tasks")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(lines, module.__dict__)

    return imported


@pytest.fixture
def scheduler(backend) -> Scheduler:
    return a_scheduler(backend)


def a_scheduler(backend) -> Scheduler:
    """Return a scheduler that scans on each turn."""
    scheduler = Scheduler(backend)
    scheduler.SCAN = 0.0
    return scheduler


def turn(scheduler: Scheduler) -> float:
    scheduler._scan_at = scheduler._declare_at = 0.0
    return scheduler.turn(waiting=True)


def a_row(**values) -> RecurringTask:
    given = {"name": "every hour", "task": "tests.tasks.nothing", "every": HOUR}
    return RecurringTask.objects.create(**{**given, **values})


def due(row: RecurringTask, ago: timedelta = timedelta(seconds=1)) -> datetime:
    """Make the row due, and return its scheduled time."""
    RecurringTask.objects.filter(pk=row.pk).update(next_run_at=now_plus(-ago))
    row.refresh_from_db()
    return row.next_run_at


def times(row: RecurringTask) -> list[datetime]:
    return list(
        RecurringExecution.objects.filter(task=row)
        .order_by("run_at")
        .values_list("run_at", flat=True)
    )


def now() -> datetime:
    a = RecurringTask.objects.annotate(seen_at=Now()).first()
    return a.seen_at


def end(job: Job, claim, state=Job.State.SUCCESSFUL, **values) -> None:
    (claimed,) = claim()
    assert claimed.pk == job.pk
    outcome = (
        Execution.Outcome.SUCCESSFUL if state == Job.State.SUCCESSFUL else Execution.Outcome.FAILED
    )
    direct.settle([AttemptResult.of(claimed, outcome, state, **values)])


class TestDeclared:
    def test_decorator_above_task_creates_row_named_by_task_path(self, scheduler):
        recurring(
            "0 9 * * mon-fri",
            timezone="Europe/Berlin",
            args=[1],
            kwargs={"b": 2},
            queue_name="mail",
            priority=7,
        )(tasks.add)

        turn(scheduler)

        row = RecurringTask.objects.get()
        assert (row.name, row.task, row.is_from_code, row.is_enabled) == (
            "tests.tasks.add",
            "tests.tasks.add",
            True,
            True,
        )
        assert (row.cron, row.timezone, row.args, row.kwargs) == (
            "0 9 * * mon-fri",
            "Europe/Berlin",
            [1],
            {"b": 2},
        )
        assert (row.queue, row.priority) == ("mail", 7)

    @pytest.mark.parametrize(
        "origin", ["django_dbqueue", FrameworkTask.__module__.removesuffix(".base")]
    )
    def test_decorator_below_any_task_decorator_creates_row(self, scheduler, a_module, origin):
        a_module(f"""
            from datetime import timedelta
            from django_dbqueue import recurring
            from {origin} import task

            @task
            @recurring(every=timedelta(minutes=1))
            def report(): pass
        """)

        turn(scheduler)

        assert RecurringTask.objects.get().name == "shop_tasks.report"

    def test_reimported_module_replaces_its_declarations(self, a_module):
        text = """
            from datetime import timedelta
            from django_dbqueue import recurring, recurring_command, task

            @recurring(every=timedelta(minutes={}))
            @task
            def report(): pass

            recurring_command("check", every=timedelta(minutes=1))
        """
        a_module(text.format(1)), a_module(text.format(2))

        assert declared()["shop_tasks.report"].recurrence.every == 2 * MINUTE

    def test_function_without_task_is_logged_and_omitted(self, scheduler, caplog):
        recurring(every=MINUTE)(tasks.SuspiciousOperation)

        turn(scheduler), turn(scheduler)

        assert not RecurringTask.objects.exists()
        assert caplog.text.count("It does not run") == 1

    def test_task_may_have_several_schedules_with_distinct_names(self, scheduler):
        recurring("0 9 * * *", args=[1])(recurring("0 12 * * *", name="noon", args=[2])(tasks.add))

        turn(scheduler)

        assert set(RecurringTask.objects.values_list("name", "args__0")) == {
            ("tests.tasks.add", 1),
            ("noon", 2),
        }

    def test_command_runs_as_a_job(self, scheduler, claim):
        recurring_command(
            "check",
            "--database",
            "default",
            every=MINUTE,
            options={"verbosity": 0},
            queue_name="nightly",
        )
        turn(scheduler)
        due(RecurringTask.objects.get())

        turn(scheduler)

        job = Job.objects.get()
        assert (job.task, job.queue) == (call_command.module_path, "nightly")
        assert (job.args, job.kwargs) == (["check", "--database", "default"], {"verbosity": 0})
        testing.drain()
        assert Job.objects.get().state == "successful"

    def test_task_of_another_backend_is_left_to_its_dispatcher(self, scheduler):
        recurring(every=MINUTE)(tasks.nothing.using(backend="other"))
        recurring_command("check", every=MINUTE, backend="other")

        turn(scheduler)

        assert not RecurringTask.objects.exists()


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({}, "neither a cron expression nor every"),
            ({"cron": "0 9 * * *", "every": HOUR}, "Leave one out"),
            ({"every": timedelta()}, "every must be from one second"),
            ({"every": -HOUR}, "every must be from one second"),
            ({"every": 300}, "every must be a timedelta"),
            ({"cron": "0 9 * * *", "timezone": "Europe/Berlim"}, "Did you mean 'Europe/Berlin'"),
            ({"every": HOUR, "timezone": "Europe/Berlin"}, "has no effect on every"),
            ({"cron": "0 0 31 2 *"}, "never matches"),
            ({"cron": "R 0 * * *"}, "Write H"),
            ({"cron": "0 9 * * *", "drift": True}, "Use every"),
            ({"every": HOUR, "jitter": HOUR}, "is not shorter than 1:00:00"),
            ({"cron": "0,5 9 * * *", "jitter": 10 * MINUTE}, "is not shorter than 0:05:00"),
            ({"every": HOUR, "jitter": -MINUTE}, "jitter must be"),
            ({"every": HOUR, "jitter": 30}, "jitter must be"),
            # What the columns and constraints of its row refuse.
            ({"cron": LONG_CRON}, "has 116 characters, more than 100. Shorten it"),
            (
                {"cron": "0 0 */29 2 mon", "timezone": "UTC", "jitter": timedelta(days=10_001)},
                "from zero to 3,650 days",
            ),
            ({"every": HOUR, "starts_at": BEFORE_YEAR_1}, "starts_at must be within the years 1"),
            ({"every": HOUR, "ends_at": AFTER_YEAR_9999}, "ends_at must be within the years 1"),
            ({"every": HOUR, "missed": "some"}, "not one of skip, one, all"),
            ({"every": HOUR, "missed": "all", "most_missed": 0}, "from 1 to 1000"),
            ({"every": HOUR, "starts_at": datetime(2027, 1, 1)}, "aware"),
            (
                {
                    "every": HOUR,
                    "starts_at": datetime(2027, 1, 2, tzinfo=UTC),
                    "ends_at": datetime(2027, 1, 1, tzinfo=UTC),
                },
                "not after",
            ),
            ({"every": HOUR, "args": [1, 2, 3]}, "too many positional arguments"),
            ({"every": HOUR, "args": []}, "missing a required argument: 'a'"),
            ({"every": HOUR, "kwargs": {"a": 1, "c": 2}}, "unexpected keyword argument 'c'"),
            ({"every": HOUR, "args": [object()]}, "Unsupported type"),
            ({"every": HOUR, "args": "1"}, "must be a list"),
            ({"every": HOUR, "priority": 200}, "between -100 and 100"),
            ({"every": HOUR, "name": ""}, "is not a name"),
            ({"every": HOUR, "name": "x" * 256}, "is not a name"),
        ],
    )
    def test_invalid_declaration_is_refused(self, options, why):
        with pytest.raises(InvalidSchedule) as error:
            recurring(**{"args": [1], **options} if "kwargs" not in options else options)(tasks.add)

        assert why in str(error.value)
        assert not declared()

    def test_two_tasks_cannot_have_one_name(self):
        recurring(every=HOUR, name="report")(tasks.nothing)

        with pytest.raises(InvalidSchedule, match=r"already the recurring tests\.tasks\.nothing"):
            recurring(every=HOUR, name="report")(tasks.fail)

    def test_two_schedules_of_a_task_cannot_have_one_name(self):
        with pytest.raises(InvalidSchedule, match=r"Give this one another name: name=\.\.\."):
            recurring(every=HOUR)(recurring(every=MINUTE)(tasks.nothing))

    def test_unknown_command_is_refused(self):
        with pytest.raises(InvalidSchedule, match="no command 'clearsesions'"):
            recurring_command("clearsesions", cron="0 3 * * *")

    def test_unknown_command_option_is_refused(self):
        with pytest.raises(InvalidSchedule, match="does not take verbosity"):
            recurring_command("check", cron="0 3 * * *", verbosity=0)

    def test_non_callable_is_refused(self):
        with pytest.raises(InvalidSchedule, match="Put it above @task"):
            recurring(every=HOUR)("tests.tasks.add")


class TestChecked:
    """``manage.py check`` reports invalid declarations before anything runs."""

    def found(self) -> str:
        return " ".join(
            message.msg
            for message in run_checks(tags=["dbqueue_recurring"])
            if message.id == "dbqueue.E006"
        )

    @pytest.mark.parametrize("other", ["ImmediateBackend", "DummyBackend"])
    def test_task_of_backend_without_schedules_is_an_error(self, settings, other):
        module = FrameworkTask.__module__.removesuffix(".base")
        path = {"ImmediateBackend": "immediate", "DummyBackend": "dummy"}[other]
        settings.TASKS = {
            **settings.TASKS,
            "quick": {"BACKEND": f"{module}.backends.{path}.{other}"},
        }
        recurring(every=HOUR)(tasks.nothing.using(backend="quick"))
        recurring(every=HOUR, name="below")(tasks.nothing.func)
        recurring_command("check", every=HOUR, backend="quick")

        assert self.found().count("TASKS['quick'] is not a DatabaseBackend") == 2

    def test_backend_that_is_not_in_tasks_is_an_error(self):
        recurring_command("check", every=HOUR, name="nightly check", backend="reports")
        recurring(every=HOUR)(tasks.nothing)

        assert (
            "'nightly check': its backend 'reports' is not in TASKS. Add it, or choose from "
            "'default'" in self.found()
        )

    def test_project_without_database_backend_is_warned(self, settings):
        module = FrameworkTask.__module__.removesuffix(".base")
        settings.TASKS = {"default": {"BACKEND": f"{module}.backends.dummy.DummyBackend"}}
        recurring(every=HOUR)(tasks.nothing)
        recurring_command("check", every=HOUR)

        assert self.found() == ""
        assert [message.id for message in run_checks(tags=["dbqueue_recurring"])] == [
            "dbqueue.W004"
        ] * 2

    def test_valid_declarations_pass(self):
        recurring(every=HOUR)(tasks.nothing)
        recurring_command("check", every=HOUR)

        assert self.found() == ""

    def test_arguments_of_a_command_are_checked(self):
        recurring_command("speak", "--loudly", every=HOUR)
        recurring_command("speak", every=HOUR, name="loud", options={"loudly": True})

        assert (
            "'speak': call_command: arguments of 'speak': unrecognized arguments: --loudly"
            in self.found()
        )
        assert "'loud': call_command: arguments of 'speak': Unknown option(s)" in self.found()

    def test_decorator_below_task_is_checked(self, monkeypatch):
        recurring(every=HOUR, args=[1])(tasks.nothing.func)
        recurring(every=HOUR)(tasks.SuspiciousOperation)
        recurring_command("check", every=HOUR, priority=200)

        assert (
            "'tests.tasks.nothing': tests.tasks.nothing(): too many positional arguments"
            in self.found()
        )
        assert "SuspiciousOperation" in self.found()
        assert "'check': priority must be" in self.found()

    def test_module_that_fails_to_import_is_named(self, monkeypatch, tmp_path):
        (tmp_path / "shop_broken.py").write_text(
            "from django_dbqueue import recurring\nrecurring('0 0 31 2 *')(print)"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(checks, "_task_modules", lambda: ["shop_broken"])

        assert (
            "shop_broken: 'builtins.print': '0 0 31 2 *' never matches: there is no such date"
            in self.found()
        )


class TestSynchronised:
    def declare(self, **values):
        recurring(**{"every": HOUR, "name": "report", **values})(tasks.nothing)

    def test_task_disabled_by_operator_stays_disabled(self, scheduler, backend):
        self.declare()
        turn(scheduler)
        RecurringTask.objects.all().disable()

        turn(a_scheduler(backend))

        assert not RecurringTask.objects.get().is_enabled

    def test_scheduled_time_survives_redeclaration(self, scheduler, backend):
        self.declare()
        turn(scheduler)
        planned = due(RecurringTask.objects.get(), -17 * MINUTE)

        turn(a_scheduler(backend))

        assert RecurringTask.objects.get().next_run_at == planned

    def test_changed_schedule_is_rescheduled(self, scheduler, backend):
        self.declare()
        turn(scheduler)
        _forget_declarations()
        self.declare(every=None, cron="0 4 1 1 *", timezone="UTC")

        turn(a_scheduler(backend))

        row = RecurringTask.objects.get()
        assert (row.next_run_at.month, row.next_run_at.day, row.next_run_at.hour) == (1, 1, 4)

    def test_old_code_does_not_change_rows_of_live_new_code(self, scheduler, backend):
        self.declare(args=[], priority=1)
        turn(scheduler)
        _forget_declarations()
        self.declare(priority=2)
        new = a_scheduler(backend)
        turn(new)

        _forget_declarations()
        self.declare(priority=1)
        due(RecurringTask.objects.get())
        turn(scheduler)

        assert RecurringTask.objects.get().priority == 2
        assert not Job.objects.exists()

    def test_old_code_reclaims_rows_of_gone_new_code(self, scheduler, backend):
        self.declare(priority=1)
        turn(scheduler)
        _forget_declarations()
        self.declare(priority=2)
        turn(a_scheduler(backend))
        RecurringTask.objects.update(declared_at=now_plus(-300))

        _forget_declarations()
        self.declare(priority=1)
        turn(scheduler)

        assert RecurringTask.objects.get().priority == 1

    def test_undeclared_task_is_not_enqueued_and_deleted_after_a_day(self, scheduler, backend):
        self.declare()
        turn(scheduler)
        row = RecurringTask.objects.get()
        RecurringExecution.objects.create(task=row, run_at=Now())
        due(row)
        _forget_declarations()
        new = a_scheduler(backend)

        turn(new)
        assert not Job.objects.exists()
        new._forget_at = 0.0
        turn(new)
        assert RecurringTask.objects.exists()
        RecurringTask.objects.update(declared_at=now_plus(-90_000))
        new._forget_at = 0.0
        turn(new)

        assert not RecurringTask.objects.exists() and not RecurringExecution.objects.exists()

    def test_row_from_the_admin_is_not_overwritten_by_code(self, scheduler, caplog):
        a_row(name="report", every=MINUTE)
        self.declare()

        turn(scheduler), turn(scheduler)

        row = RecurringTask.objects.get()
        assert (row.every, row.is_from_code) == (MINUTE, False)
        assert caplog.text.count("rename one of them") == 1


def _forget_declarations():
    sys.modules["django_dbqueue.recurrence.declare"]._by_name.clear()


class TestTimes:
    def test_new_row_is_scheduled_and_enqueued_at_its_time(self, scheduler):
        row = a_row()

        turn(scheduler)
        row.refresh_from_db()
        assert timedelta() < row.next_run_at - now() <= HOUR
        planned = due(row)
        turn(scheduler)

        row.refresh_from_db()
        assert times(row) == [planned]
        assert RecurringExecution.objects.get().job == Job.objects.get().pk
        assert (row.last_run_at, row.next_run_at) == (planned, planned + HOUR)

    def test_interval_counts_from_the_scheduled_time(self, scheduler):
        row = a_row()
        planned = due(row, timedelta(minutes=20))

        turn(scheduler)

        row.refresh_from_db()
        assert row.next_run_at == planned + HOUR

    def test_times_are_between_starts_at_and_ends_at(self, scheduler):
        start = clock_plus(timedelta(days=1))
        row = a_row(starts_at=start, ends_at=start + 2 * HOUR)

        turn(scheduler)

        row.refresh_from_db()
        assert row.next_run_at == start
        assert row.next_times(9) == [start, start + HOUR, start + 2 * HOUR]

    def test_task_past_ends_at_is_not_enqueued(self, scheduler):
        row = a_row(ends_at=clock_plus(timedelta(minutes=-1)), every=MINUTE)
        turn(scheduler)
        assert RecurringTask.objects.get().next_run_at is None

        row = a_row(name="last", starts_at=clock_plus(-30 * MINUTE), ends_at=clock_plus(5 * MINUTE))
        planned = due(row)
        turn(scheduler), turn(scheduler)

        row.refresh_from_db()
        assert (times(row), row.next_run_at) == ([planned], None)

    def test_ended_tasks_do_not_block_others(self, scheduler):
        for number in range(scheduler.BATCH + 1):
            a_row(
                name=f"over {number}",
                starts_at=clock_plus(-30 * MINUTE),
                ends_at=clock_plus(5 * MINUTE),
            )
        row = a_row(name="other")
        planned = due(row)

        turn(scheduler), turn(scheduler), turn(scheduler)

        assert times(row) == [planned]
        assert not RecurringTask.objects.exclude(pk=row.pk).waiting().exists()

    def test_ended_task_resumes_after_later_ends_at(self, scheduler):
        row = a_row(starts_at=clock_plus(-30 * MINUTE), ends_at=clock_plus(5 * MINUTE))
        turn(scheduler)
        RecurringTask.objects.update(ends_at=clock_plus(2 * HOUR))

        RecurringTask.objects.filter(pk=row.pk).replan()
        turn(scheduler)

        row.refresh_from_db()
        assert row.next_run_at

    def test_jitter_delays_a_job_by_a_random_part(self, scheduler):
        row = a_row(jitter=10 * MINUTE)
        due(row)

        turn(scheduler)

        job = Job.objects.get()
        assert job.state == "scheduled"
        assert timedelta() < job.run_after - job.enqueued_at < 10 * MINUTE

    def test_next_times_returns_five_times(self):
        row = a_row(every=None, cron="30 2 * * *", timezone="Europe/Berlin")

        found = row.next_times(5, datetime(2026, 3, 27, 12, tzinfo=UTC))

        assert [f"{each:%d %H:%M}" for each in found] == [
            "28 01:30",
            "29 01:00",
            "30 00:30",
            "31 00:30",
            "01 00:30",
        ]

    def test_next_times_starts_with_the_scheduled_time(self):
        row = a_row()
        planned = due(row, -17 * MINUTE)

        assert row.next_times(2) == [planned, planned + HOUR]

    def test_next_times_end_at_the_given_time(self):
        row = a_row()
        planned = due(row, -HOUR)

        assert row.next_times(9, until=planned + 2 * HOUR) == [planned + n * HOUR for n in range(3)]
        assert row.next_times(9, until=planned - HOUR) == []

    def test_times_while_disabled_are_not_missed(self, scheduler):
        row = a_row(missed="all")
        due(row, 5 * HOUR)
        assert RecurringTask.objects.all().disable() == 1
        turn(scheduler)
        assert RecurringTask.objects.all().enable() == 1
        turn(scheduler)

        row.refresh_from_db()
        assert not Job.objects.exists() and row.next_run_at > now()


def clock_plus(wait: timedelta) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + wait


class TestDrift:
    @pytest.fixture
    def row(self, scheduler):
        row = a_row(drift=True)
        due(row)
        turn(scheduler)
        row.refresh_from_db()
        return row

    def test_next_time_is_set_when_the_job_has_ended(self, row, scheduler, claim):
        assert row.next_run_at is None
        turn(scheduler)
        row.refresh_from_db()
        assert row.next_run_at is None
        job = Job.objects.get()
        end(job, claim)

        turn(scheduler)

        row.refresh_from_db()
        job.refresh_from_db()
        assert row.next_run_at == job.finished_at + HOUR

    @pytest.mark.parametrize("how", ["deleted", "discarded", "failed"])
    def test_next_time_is_set_without_a_successful_job(self, row, scheduler, claim, how):
        if how == "deleted":
            direct.erase([Job.objects.get().pk])
        elif how == "discarded":
            Job.objects.all().discard()
        else:
            end(Job.objects.get(), claim, Job.State.FAILED)

        turn(scheduler)

        row.refresh_from_db()
        assert timedelta(minutes=59) < row.next_run_at - now() <= HOUR

    def test_next_time_is_unset_while_the_job_waits(self, row, scheduler):
        Job.objects.update(state="scheduled", run_after=now_plus(7200))

        turn(scheduler)

        row.refresh_from_db()
        assert row.next_run_at is None

    def test_next_time_follows_a_call_that_its_key_ignores(self, scheduler):
        once.enqueue()
        testing.drain()
        Job.objects.update(finished_at=now_plus(-48 * 3600))
        row = a_row(task=once.module_path, drift=True)
        planned = due(row)

        for _ in range(4):
            turn(scheduler)

        row.refresh_from_db()
        assert row.next_run_at == planned + HOUR
        assert times(row) == [planned]

    @pytest.mark.parametrize("how", ["disabled and enabled", "replanned", "declared anew"])
    def test_changed_row_still_waits_for_its_unfinished_job(self, backend, scheduler, claim, how):
        recurring(every=HOUR, drift=True)(tasks.nothing)
        turn(scheduler)
        rows = RecurringTask.objects.all()
        due(rows.get())
        turn(scheduler)
        if how == "disabled and enabled":
            assert (rows.disable(), rows.enable()) == (1, 1)
        elif how == "replanned":
            rows.replan()
        else:
            _forget_declarations()
            recurring(every=2 * HOUR, drift=True)(tasks.nothing)
            scheduler = a_scheduler(backend)

        turn(scheduler), turn(scheduler)

        job, row = Job.objects.get(), rows.get()
        assert (row.next_run_at, row.waits_for) == (None, job.pk)
        end(job, claim)
        turn(scheduler)
        job.refresh_from_db()
        assert rows.get().next_run_at == job.finished_at + row.every

    def test_row_that_is_enabled_after_its_job_has_ended_has_missed_none(self, row, scheduler):
        rows = RecurringTask.objects.all()
        rows.disable()
        Job.objects.update(state="successful", finished_at=now_plus(-48 * 3600))
        rows.enable()

        turn(scheduler)

        assert timedelta() < rows.get().next_run_at - now() <= HOUR

    def test_row_that_no_longer_drifts_does_not_wait_for_its_job(self, row, scheduler):
        RecurringTask.objects.all().replan(drift=False)

        turn(scheduler)

        row.refresh_from_db()
        assert row.waits_for is None
        assert timedelta() < row.next_run_at - now() <= HOUR

    def test_run_now_waits_for_the_new_job(self, row, scheduler, claim):
        first = Job.objects.get()
        direct.run_now(enqueue)

        row.refresh_from_db()
        assert row.waits_for == Job.objects.exclude(pk=first.pk).get().pk


class TestMissed:
    """Five times of an hourly task have passed: 4:20, 3:20, 2:20, 1:20 and 0:20 ago."""

    def missed(self, scheduler, ago=timedelta(hours=4, minutes=20), **values):
        row = a_row(**values)
        planned = due(row, ago)
        turn(scheduler)
        row.refresh_from_db()
        return [(each - planned) // row.every for each in times(row)], (
            row.next_run_at - planned
        ) // row.every

    def test_skip_enqueues_none(self, scheduler, caplog):
        assert self.missed(scheduler) == ([], 5)
        assert "is skipped" in caplog.text

    def test_last_time_before_the_end_is_not_missed(self, scheduler):
        row = a_row()
        planned = due(row, timedelta(hours=4, minutes=20))
        RecurringTask.objects.update(ends_at=planned + 30 * MINUTE)

        turn(scheduler)

        row.refresh_from_db()
        assert (times(row), row.next_run_at, row.is_over) == ([planned], None, True)

    def test_one_enqueues_the_newest(self, scheduler):
        assert self.missed(scheduler, missed="one") == ([4], 5)

    def test_all_enqueues_each(self, scheduler):
        assert self.missed(scheduler, missed="all") == ([0, 1, 2, 3, 4], 5)
        assert Job.objects.count() == 5

    def test_most_missed_keeps_the_newest(self, scheduler):
        assert self.missed(scheduler, missed="all", most_missed=2) == ([3, 4], 5)

    def test_delay_below_the_interval_is_not_missed(self, scheduler):
        assert self.missed(scheduler, ago=timedelta(minutes=59)) == ([0], 1)

    def test_dispatcher_late_by_seconds_has_missed_none(self, scheduler):
        assert self.missed(scheduler, ago=timedelta(seconds=5), every=timedelta(seconds=2)) == (
            [2],
            3,
        )


class TestOnce:
    def test_time_has_one_execution_by_constraint(self):
        row = a_row()
        RecurringExecution.objects.create(task=row, run_at="2026-01-01T00:00:00Z")

        with pytest.raises(IntegrityError), transaction.atomic():
            RecurringExecution.objects.create(task=row, run_at="2026-01-01T00:00:00Z")

    def test_enqueued_time_is_not_enqueued_again(self, scheduler):
        row = a_row()
        planned = due(row)
        turn(scheduler)
        RecurringTask.objects.update(next_run_at=planned)

        turn(scheduler)

        assert Job.objects.count() == 1
        row.refresh_from_db()
        assert row.next_run_at == planned + HOUR

    def test_many_dispatchers_enqueue_each_time_once(self, backend):
        rows = [a_row(name=f"row {number}", missed="all", most_missed=3) for number in range(12)]
        for row in rows:
            due(row, timedelta(hours=2, minutes=20))
        together = threading.Barrier(4)

        def dispatch():
            scheduler = a_scheduler(backend)
            together.wait(LONG)
            for _ in range(30):
                try:
                    turn(scheduler)
                except (
                    Exception
                ) as error:  # SQLite is busy; the dispatcher continues after this error.
                    assert "locked" in str(error)

        for other in [Elsewhere(dispatch) for _ in range(4)]:
            other.result()

        assert Job.objects.count() == RecurringExecution.objects.count() == 36
        assert set(RecurringExecution.objects.values_list("job", flat=True)) == set(
            Job.objects.values_list("pk", flat=True)
        )

    @pytest.mark.skipif(
        connections["default"].vendor == "sqlite", reason="SQLite locks as a whole."
    )
    def test_locked_row_is_skipped(self, scheduler):
        row = a_row()
        due(row)
        held, go_on = threading.Event(), threading.Event()

        def hold():
            with transaction.atomic():
                RecurringTask.objects.select_for_update().get()
                held.set()
                assert go_on.wait(LONG)

        other = Elsewhere(hold)
        assert held.wait(LONG)
        turn(scheduler)
        assert not Job.objects.exists()
        go_on.set()
        other.result()
        turn(scheduler)

        assert Job.objects.count() == 1

    def test_execution_and_job_are_written_together(self, scheduler, monkeypatch):
        row = a_row()
        due(row)

        def fail(*args):
            raise RuntimeError("lost power")

        with pytest.raises(RuntimeError):
            recurring_engine.enqueue_due(RecurringTask.objects.all(), row, fail)

        assert not RecurringExecution.objects.exists()
        turn(scheduler)
        assert Job.objects.count() == 1

    def test_executions_outlive_their_jobs_and_are_pruned_later(self, scheduler):
        row = a_row()
        due(row)
        turn(scheduler)
        direct.erase([Job.objects.get().pk])
        assert RecurringExecution.objects.count() == 1

        assert scheduler.prune(10) == 0
        RecurringExecution.objects.update(run_at=now_plus(-8 * 86_400))
        assert scheduler.prune(10) == 1


class TestProblems:
    def test_failing_task_does_not_stop_the_others(self, scheduler, caplog):
        bad, worse, good = a_row(name="a", args=[1]), a_row(name="b"), a_row(name="c")
        RecurringTask.objects.filter(pk=worse.pk).update(cron="0 0 31 2 *", every=None)
        for row in (bad, worse, good):
            due(row)

        turn(scheduler), turn(scheduler)

        assert [row.task_id for row in RecurringExecution.objects.all()] == [good.pk]
        assert "too many positional arguments" in RecurringTask.objects.get(pk=bad.pk).problem
        assert "never matches" in RecurringTask.objects.get(pk=worse.pk).problem
        assert caplog.text.count("could not be enqueued") == 2

    def test_declaration_for_an_unknown_backend_does_not_stop_the_others(self, scheduler, caplog):
        recurring_command("check", every=HOUR, name="nightly check", backend="reports")
        recurring(every=HOUR, name="innocent")(tasks.nothing)

        turn(scheduler), turn(scheduler)

        assert [row.name for row in RecurringTask.objects.all()] == ["innocent"]
        assert caplog.text.count("'nightly check': its backend 'reports' is not in TASKS") == 1

    @pytest.mark.parametrize("how", ["elsewhere", "interface", "timeout", "lost"])
    def test_database_error_of_a_task_does_not_stop_the_others(self, scheduler, monkeypatch, how):
        def fail():
            if how == "elsewhere":
                raise OperationalError("connection to server at 127.0.0.1, port 1 failed")
            if how == "timeout" and connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute("SET LOCAL statement_timeout = 50; SELECT pg_sleep(5)")
            if how == "lost" and connection.vendor != "sqlite":
                connection.connection.close()
                Job.objects.exists()
            raise InterfaceError("connection already closed")

        monkeypatch.setattr(tasks, "failing", task(key=fail)(tasks.nothing.func), raising=False)
        bad, good = a_row(name="a", task="tests.tasks.failing"), a_row(name="b")
        due(bad, MINUTE), due(good)

        turn(scheduler), turn(scheduler)

        assert [row.task_id for row in RecurringExecution.objects.all()] == [good.pk]
        assert "Error: " in RecurringTask.objects.get(pk=bad.pk).problem

    def test_conflict_of_a_transaction_is_raised_to_repeat_the_round(self, scheduler, monkeypatch):
        def overtake(row, wait):
            raise OperationalError("deadlock") from Exception(1213)

        monkeypatch.setattr(scheduler, "_write", overtake)
        row = a_row()
        due(row)

        with pytest.raises(OperationalError):
            turn(scheduler)

        assert RecurringTask.objects.get().problem == ""

    def test_unavailable_database_is_raised(self, scheduler, monkeypatch):
        def fail(row, wait):
            raise OperationalError("gone")

        monkeypatch.setattr(scheduler, "_write", fail)
        monkeypatch.setattr(runtime_scheduler, "answers", lambda alias: False)
        due(a_row())

        with pytest.raises(OperationalError, match="gone"):
            turn(scheduler)

    def test_problem_is_cleared_once_task_is_enqueued(self, backend, scheduler):
        row = a_row(args=[1])
        due(row)
        turn(scheduler)
        RecurringTask.objects.update(args=[])

        turn(a_scheduler(backend))

        assert RecurringTask.objects.get().problem == ""
        assert Job.objects.count() == 1

    def test_unknown_task_is_left_to_other_dispatchers(self, scheduler, caplog):
        row = a_row(task="shop.tasks.report")
        planned = due(row)

        turn(scheduler), turn(scheduler)

        row.refresh_from_db()
        assert (row.next_run_at, row.problem) == (planned, "")
        assert caplog.text.count("is left to other dispatchers") == 1

    def test_task_unknown_everywhere_has_a_problem(self, scheduler):
        row = a_row(task="shop.tasks.report")
        due(row, 2 * MINUTE)

        turn(scheduler)

        assert "'shop.tasks.report' is not known here" in RecurringTask.objects.get().problem

    def test_task_of_another_database_is_not_enqueued(self, scheduler, monkeypatch):
        monkeypatch.setattr(tasks, "elsewhere", tasks.nothing.using(backend="other"), raising=False)
        due(a_row(task="tests.tasks.elsewhere"))

        turn(scheduler)

        assert "Create the row in the database of the jobs" in RecurringTask.objects.get().problem

    @pytest.mark.django_db(databases=BOTH)
    def test_plain_task_of_a_row_elsewhere_is_enqueued_in_the_database_of_the_row(self):
        """A row made by SQL in a second database could only have tasks that name its backend."""
        other = task_backends["other"]
        row = RecurringTask(name="there", task="tests.tasks.nothing", every=HOUR)
        row.save(using="other")
        RecurringTask.objects.using("other").update(next_run_at=now_plus(-1))

        turn(a_scheduler(other))

        row.refresh_from_db()
        assert row.problem == ""
        assert Job.objects.using("other").get().task == "tests.tasks.nothing"
        assert not Job.objects.using("default").exists()

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"args": [1, 2, 3]}, "too many positional arguments"),
            ({"task": "shop.tasks.gone"}, "'shop.tasks.gone' is not known here"),
            ({"queue": "a,b"}, "'a,b' is not a queue name"),
        ],
    )
    def test_problem_is_shown_when_a_row_is_planned(self, scheduler, values, said):
        """The first time of a yearly schedule with a typo was the first to tell."""
        a_row()
        RecurringTask.objects.update(**values)  # As by SQL.

        turn(scheduler)

        row = RecurringTask.objects.get()
        assert said in row.problem
        assert row.next_run_at > datetime.now(timezone.utc)

    def test_row_has_one_target_and_one_schedule(self):
        a_row()
        for values in ({"command": "check"}, {"task": ""}, {"cron": "0 9 * * *"}, {"every": None}):
            with pytest.raises(IntegrityError), transaction.atomic():
                RecurringTask.objects.update(**values)


class TestCost:
    def test_idle_turns_run_no_query(self, backend):
        scheduler = Scheduler(backend)
        scheduler.turn(waiting=True)

        with CaptureQueriesContext(connection) as seen:
            pauses = [scheduler.turn(waiting=True) for _ in range(5)]

        assert len(seen) == 0
        assert set(pauses) == {float("inf")}

    def test_scan_of_many_rows_is_one_query(self, scheduler):
        for number in range(20):
            due(a_row(name=str(number)), -HOUR)
        scheduler.turn(waiting=True)

        with CaptureQueriesContext(connection) as seen:
            scheduler._scan_at = 0.0
            scheduler.turn(waiting=True)

        assert len(seen) == 1

    def test_turn_returns_the_wait_until_the_next_time(self, backend):
        due(a_row(), timedelta(seconds=-1))

        scheduler = Scheduler(backend)

        assert 0.0 < scheduler.turn(waiting=True) < 1.0

    def test_new_rows_are_found_by_the_next_scan(self, backend):
        scheduler = Scheduler(backend)
        scheduler.turn(waiting=True)
        due(a_row())

        assert scheduler.turn(waiting=True) == float("inf")
        scheduler._scan_at -= scheduler.SCAN
        scheduler.turn(waiting=True)

        assert Job.objects.count() == 1


class TestRunNow:
    def test_run_now_enqueues_at_once_and_keeps_the_next_time(self):
        row = a_row(jitter=MINUTE)
        planned = due(row, -17 * MINUTE)

        assert direct.run_now(enqueue) == 1

        row.refresh_from_db()
        assert Job.objects.get().state == "ready"
        assert (row.next_run_at, [row.last_run_at]) == (planned, times(row))

    def test_run_now_runs_a_disabled_task(self):
        a_row(is_enabled=False)

        assert direct.run_now(enqueue) == 1

    def test_run_now_of_unknown_task_is_refused(self):
        a_row(task="shop.tasks.report")

        with pytest.raises(InvalidTaskPath):
            direct.run_now(enqueue)

        assert not RecurringExecution.objects.exists()


def test_several_hosts_enqueue_each_time_once(runqueue):
    options = '{"task_modules": ["tests.recurring_tasks"], "embedded": true, "poll_interval": 0.2}'
    children = [runqueue(DBQUEUE_OPTIONS=options) for _ in range(2)]

    until(lambda: Effect.objects.filter(job="tick").count() >= 4)

    assert RecurringExecution.objects.count() == len(
        set(RecurringExecution.objects.values_list("run_at", flat=True))
    )
    jobs = Job.objects.filter(task="tests.recurring_tasks.tick")
    assert set(RecurringExecution.objects.values_list("job", flat=True)) == set(
        jobs.values_list("pk", flat=True)
    )
    late = [job.enqueued_at.microsecond for job in jobs.order_by("pk")[1:]]
    assert sorted(late)[len(late) // 2] < 500_000, log_of(children[0])


def test_drain_enqueues_no_recurring_tasks(runqueue):
    options = '{"task_modules": ["tests.recurring_tasks"], "embedded": true}'
    child = runqueue("--drain", DBQUEUE_OPTIONS=options)

    assert child.wait(LONG) == 0
    testing.drain()

    assert not RecurringTask.objects.exists() and not Job.objects.exists()


def test_invalid_schedule_is_not_saved():
    with pytest.raises(InvalidSchedule, match="99"):
        RecurringTask.objects.create(name="wrong", task="tests.tasks.nothing", cron="99 * * * *")
    row = RecurringTask.objects.create(name="right", task="tests.tasks.nothing", cron="9 * * * *")
    row.cron = "99 * * * *"
    with pytest.raises(InvalidSchedule, match="99"):
        row.save(update_fields=["cron"])

    assert RecurringTask.objects.get().cron == "9 * * * *"


@pytest.mark.parametrize("update_fields", [None, ("cron", "every")])
def test_changed_schedule_that_is_saved_is_planned_anew(scheduler, update_fields):
    row = a_row()
    turn(scheduler)
    row.refresh_from_db()
    assert row.next_run_at
    row.every, row.cron = None, "0 3 5 1 *"

    row.save(update_fields=update_fields and iter(update_fields))

    assert (row.next_run_at, RecurringTask.objects.get().next_run_at) == (None, None)
    turn(scheduler)
    row.refresh_from_db()
    assert row.next_run_at == row.next_times(1)[0]
    assert row.next_run_at.month == 1


def test_later_end_that_is_saved_begins_the_task_again(scheduler):
    row = a_row()
    due(row)
    RecurringTask.objects.update(ends_at=now_plus(0))
    turn(scheduler)
    row.refresh_from_db()
    assert row.is_over

    row.ends_at = datetime.now(UTC) + 48 * HOUR
    row.save(update_fields=["ends_at"])

    turn(scheduler)
    row.refresh_from_db()
    assert (row.is_over, row.next_run_at > now()) == (False, True)


@pytest.mark.parametrize("update_fields", [None, ["priority"]])
def test_same_schedule_that_is_saved_keeps_its_next_time(scheduler, update_fields):
    start = datetime(2026, 1, 1, 7, 30, tzinfo=UTC)
    row = a_row(starts_at=start, every=timedelta(minutes=7, microseconds=5))
    turn(scheduler)
    row.refresh_from_db()
    planned, row.priority = row.next_run_at, 5

    row.save(update_fields=update_fields)

    stored = RecurringTask.objects.get()
    assert (stored.next_run_at, stored.priority) == (planned, 5)
    assert planned


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"task": tasks.nothing}, "task is text, such as 'tests.tasks.nothing', not Task"),
        ({"task": "", "command": 5}, "command is text"),
        ({"args": "yesterday"}, "args must be a list and kwargs a dict, not 'yesterday' and {}"),
        ({"kwargs": [1]}, "args must be a list and kwargs a dict"),
        ({"queue": "mail*"}, r"'mail\*' is not a queue name"),
        ({"queue": None}, "None is not a queue name"),
        ({"priority": 1000}, "priority must be a whole number from -100 to 100, not 1000"),
        ({"priority": "high"}, "priority must be a whole number from -100 to 100, not 'high'"),
        ({"name": ""}, "'' is not a name of up to 255 characters"),
        ({"name": "a\x00b"}, r"'a\\x00b' is not a name of up to 255 characters without NUL"),
    ],
)
def test_call_that_no_task_can_have_is_not_saved(values, said):
    given = {"name": "wrong", "task": "tests.tasks.nothing", "every": HOUR, **values}

    with pytest.raises(InvalidSchedule, match=said):
        RecurringTask.objects.create(**given)

    assert not RecurringTask.objects.exists()
