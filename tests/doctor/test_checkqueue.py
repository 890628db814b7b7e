"""``manage.py checkqueue`` finds each problem, which the test creates on a real database."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, connections, transaction
from django.db.models import F
from django.utils import timezone

from django_dbqueue.compat import task_backends
from django_dbqueue.doctor import (
    bloat,
    database,
    innodb,
    mysql,
    postgresql,
    queue,
    runner,
    snapshots,
    sqlite,
    vacuum,
)
from django_dbqueue.doctor.database import QueueDatabase, queue_databases
from django_dbqueue.models import Failure, Job, Operation, Process, Queue, RecurringTask, TaskState
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.models.identifier import binary_collation
from django_dbqueue.testing import drain

from .. import tasks
from ..admin.conftest import a_failure, an_execution
from ..conftest import a_process, until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])
# Checks that depend on the settings of the test server, or on its other users.
OF_THE_SERVER = [
    "autovacuum",
    "durability",
    "transactions",
    "connections",
    "checkpoints",
    "hidden-sessions",
    "history",
]


def on(*vendors: str) -> Any:
    return pytest.mark.skipif(
        connection.vendor not in vendors, reason=f"Only {' and '.join(vendors)}."
    )


def run_check(*arguments: str) -> dict[str, Any]:
    """Return the report on the default database, with the exit code."""
    out = io.StringIO()
    code = 0
    try:
        call_command("checkqueue", "--database", "default", "--json", *arguments, stdout=out)
    except SystemExit as end:
        code = end.code
    (report,) = json.loads(out.getvalue())
    return {**report, "code": code}


def run_only(*checks: str) -> dict[str, Any]:
    return run_check(*(f"--ignore={name}" for name in runner.names() if name not in checks))


def findings(check: str) -> list[dict[str, str]]:
    return [each for each in run_check()["findings"] if each["check"] == check]


def not_checked(check: str) -> list[dict[str, str]]:
    return [each for each in run_check()["not_checked"] if each["check"] == check]


def execute(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def value(query: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchone()[0]


def apply_remedy(finding: dict[str, str]) -> None:
    """Execute the first line of the remedy."""
    execute(finding["remedy"].partition("\n")[0].partition(";")[0])


@pytest.fixture
def alive(transactional_db: Any) -> None:
    for kind in ("supervisor", "worker", "dispatcher"):
        a_process(
            f"{kind}@here:1:abc",
            kind=kind,
            details={"queues": "*", "threads": 8} if kind == "worker" else {},
        )


@pytest.fixture
def other_session(transactional_db: Any):
    """A second connection to the same database."""
    other = connection.copy("other_session")
    yield other
    other.close()


@pytest.fixture
def probe(transactional_db: Any, monkeypatch: pytest.MonkeyPatch):
    """A copy of the job table without statistics and without other users."""
    like = (
        "(LIKE dbqueue_job INCLUDING ALL)"
        if connection.vendor == "postgresql"
        else "LIKE dbqueue_job"
    )
    execute("DROP TABLE IF EXISTS dbqueue_probe", f"CREATE TABLE dbqueue_probe {like}")
    monkeypatch.setattr(QueueDatabase, "tables", ["dbqueue_probe"])
    yield "dbqueue_probe"
    execute("DROP TABLE dbqueue_probe")


def broken(database):
    database.ask("SELECT * FROM no_such_table")


def a_failed_job(failure: Failure, minutes: float = 1, **values: Any) -> Job:
    at = timezone.now() - timedelta(minutes=minutes)
    given = {"state": "failed", "attempt": 1, "failures": 1, "started_at": at, "finished_at": at}
    job = Job.objects.create(task="t", queue="default", **{**given, **values})
    an_execution(job, failure)
    return job


def a_recurring_task(name: str, hours: float | None = 1, **values: Any) -> RecurringTask:
    """Create a task that is overdue by some hours, or that is unplanned."""
    row = RecurringTask.objects.create(name=name, task="shop.tasks.report", cron="0 9 * * *")
    next_run_at = None if hours is None else timezone.now() - timedelta(hours=hours)
    RecurringTask.objects.filter(pk=row.pk).update(**{"next_run_at": next_run_at, **values})
    return row


def change_options(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    backend = task_backends["default"]
    config = backend.config.changed(**changes)
    monkeypatch.setitem(vars(backend), "config", config)
    monkeypatch.setitem(vars(backend), "options_of", config.of)


def fill(table: str, jobs: int, **values: Any) -> None:
    Job.objects.bulk_create(
        [Job(task="t", queue="default", priority=n % 20, **values) for n in range(jobs)],
        batch_size=2000,
    )
    execute(f"INSERT INTO {table} SELECT * FROM dbqueue_job")
    Job.objects.all().delete()


# The command


def test_healthy_database_has_no_findings(alive):
    report = run_check(*(f"--ignore={name}" for name in OF_THE_SERVER if name in runner.names()))

    assert (report["findings"], report["not_checked"], report["code"]) == ([], [], 0)


def test_finding_has_reason_and_remedy(transactional_db):
    out = io.StringIO()

    with pytest.raises(SystemExit):
        call_command("checkqueue", "--database=default", stdout=out)

    assert "default (" in out.getvalue()
    assert (
        "1. No runqueue is alive. [processes, critical]\n   Why: No job runs.\n"
        "   Do:  python manage.py" in out.getvalue()
    )


def test_exit_code_is_that_of_the_worst_result(alive, monkeypatch):
    checks = ("processes", "failures", "broken")
    assert run_only(*checks)["code"] == 0

    a_failed_job(a_failure())
    report = run_only(*checks)
    assert [each["severity"] for each in report["findings"]] == ["warning"]
    assert report["code"] == 1

    monkeypatch.setattr(runner, "OF_THE_QUEUE", (broken, *runner.OF_THE_QUEUE))
    report = run_only(*checks)
    assert [each["severity"] for each in report["not_checked"]] == ["unknown"]
    assert report["code"] == 3

    Process.objects.all().delete()
    report = run_only(*checks)
    assert [each["severity"] for each in report["findings"]] == ["critical", "warning"]
    assert report["code"] == 2


def test_failed_recommendation_does_not_change_exit_code(alive, monkeypatch):
    monkeypatch.setattr(runner, "OF_A_VENDOR", {connection.vendor: (broken,)})

    report = run_only("broken")

    assert [each["severity"] for each in report["not_checked"]] == [None]
    assert report["code"] == 0


def test_first_line_counts_critical_findings_and_they_come_first(transactional_db):
    a_failed_job(a_failure())
    ignored = [
        f"--ignore={name}" for name in runner.names() if name not in ("processes", "failures")
    ]
    out = io.StringIO()

    with pytest.raises(SystemExit):
        call_command("checkqueue", "--database=default", *ignored, stdout=out)

    assert out.getvalue().splitlines()[0].endswith("): 2 findings, 1 critical.")
    assert out.getvalue().index("[processes, critical]") < out.getvalue().index("[failures]")


def test_misuse_is_unknown_to_monitoring(transactional_db, settings):
    for arguments in (["--ignore=rubbish"], ["--backend=rubbish"], ["--database=rubbish"]):
        with pytest.raises(CommandError) as error:
            call_command("checkqueue", *arguments)
        assert error.value.returncode == 3

    wrong = {**settings.TASKS["default"], "OPTIONS": {"redy_within": 5}}
    settings.TASKS = {"default": wrong}
    with pytest.raises(CommandError, match="Did you mean 'ready_within'") as error:
        call_command("checkqueue")
    assert error.value.returncode == 3


@pytest.mark.parametrize("command", ["checkqueue", "queuehealth"])
@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ({"BACKEND": "gone.Backend"}, r"InvalidTaskBackend\w*: .*gone.Backend"),
        ({"OPTIONS": {"database": "gone"}}, "gone"),
    ],
    ids=["backend", "database"],
)
def test_wrong_settings_are_unknown_to_monitoring(
    transactional_db, settings, command, backend, said
):
    settings.TASKS = {**settings.TASKS, "wrong": {**settings.TASKS["default"], **backend}}

    with pytest.raises(CommandError, match=said) as error:
        call_command(command)
    assert error.value.returncode == 3


@pytest.mark.parametrize("command", ["checkqueue", "queuehealth"])
def test_database_without_its_driver_is_unknown_to_monitoring(
    transactional_db, monkeypatch, command
):
    def connect():
        raise ImproperlyConfigured("Error loading psycopg_pool module.")

    monkeypatch.setattr(connections["default"], "ensure_connection", connect)
    out = io.StringIO()

    with pytest.raises(SystemExit) as ended:
        call_command(command, "--database=default", stdout=out)

    assert ended.value.code == 3
    assert "Error loading psycopg_pool module." in out.getvalue()


def test_ignored_check_is_not_reported(transactional_db):
    assert "processes" in {each["check"] for each in run_check()["findings"]}
    assert "processes" not in {
        each["check"] for each in run_check("--ignore=processes")["findings"]
    }
    with pytest.raises(CommandError, match="There is no check rubbish to ignore"):
        run_check("--ignore=rubbish")


def test_each_database_is_checked_once(alive, settings, monkeypatch):
    third = {**settings.TASKS["other"], "QUEUES": ["third"]}
    twin = {**settings.TASKS["default"], "QUEUES": ["twin"], "OPTIONS": {"database": "twin"}}
    settings.TASKS = {**settings.TASKS, "third": third, "twin": twin}
    monkeypatch.setattr(connections._connections, "twin", connection.copy("twin"), raising=False)
    out = io.StringIO()

    with pytest.raises(SystemExit):
        call_command("checkqueue", "--json", stdout=out)

    assert [each["database"] for each in json.loads(out.getvalue())] == ["default", "other"]


def test_backend_or_database_can_be_selected(alive):
    for chosen in ("--backend=other", "--database=other"):
        out = io.StringIO()
        with pytest.raises(SystemExit):
            call_command("checkqueue", chosen, "--json", stdout=out)
        assert [each["database"] for each in json.loads(out.getvalue())] == ["other"]
    with pytest.raises(
        CommandError, match=r"The backends are default \(in the database default\), other"
    ):
        call_command("checkqueue", "--backend=rubbish")


def test_missing_tables_suggest_migrate(transactional_db):
    execute("ALTER TABLE dbqueue_job RENAME TO dbqueue_job_away")
    try:
        report = run_check()
    finally:
        execute("ALTER TABLE dbqueue_job_away RENAME TO dbqueue_job")

    (finding,) = report["findings"]
    assert (finding["severity"], report["code"]) == ("critical", 2)
    assert finding["check"] == "tables" and finding["remedy"].startswith(
        "python manage.py migrate "
    )
    assert "dbqueue_job" in finding["what"]


def test_unavailable_database_is_reported(transactional_db, monkeypatch):
    connection.close()
    away = (
        {"HOST": "127.0.0.1", "PORT": 1}
        if connection.vendor != "sqlite"
        else {"NAME": "/nowhere/at/all"}
    )
    vars(connection).pop("mysql_server_data", None)
    with monkeypatch.context() as patch:
        for name, there in away.items():
            patch.setitem(connection.settings_dict, name, there)
        out = io.StringIO()
        with pytest.raises(SystemExit) as end:
            call_command("checkqueue", "--database=default", stdout=out)
        report = run_check()
        connection.close()

    assert end.value.code == report["code"] == 3
    assert "): The database cannot be reached: " in out.getvalue().splitlines()[0]
    assert "DATABASES['default']" in out.getvalue()
    assert [each["check"] for each in report["not_checked"]] == ["connection"]


def test_failing_check_does_not_stop_others(transactional_db, monkeypatch):
    monkeypatch.setattr(runner, "OF_THE_QUEUE", (broken, *runner.OF_THE_QUEUE))
    report = run_check()

    (line,) = [each for each in report["not_checked"] if each["check"] == "broken"]
    assert "no_such_table" in line["what"]
    assert "processes" in {each["check"] for each in report["findings"]}


@on("postgresql", "mysql")
def test_slow_check_times_out(alive, monkeypatch):
    sleep = "pg_sleep(30)" if connection.vendor == "postgresql" else "SLEEP(30)"

    def slow(database):
        database.ask(f"SELECT {sleep} FROM dbqueue_process")

    monkeypatch.setattr(database, "LONGEST", 1)
    monkeypatch.setattr(runner, "OF_THE_QUEUE", (slow,))
    before = timezone.now()

    assert [each["check"] for each in run_check()["not_checked"] if each["check"] == "slow"] == [
        "slow"
    ]
    assert timezone.now() - before < timedelta(seconds=15)
    if connection.vendor == "postgresql":
        limit = value("SHOW statement_timeout")
    else:
        limit = value(
            "SELECT @@max_statement_time"
            if connection.mysql_is_mariadb
            else "SELECT @@max_execution_time"
        )
    assert float(limit) == 0


# The queue


@pytest.mark.parametrize("kind", ["worker", "dispatcher"])
def test_missing_role_is_found(kind, transactional_db):
    a_process(f"{kind}@here:1:abc", kind=kind)
    a_process("worker@there:1:abc", expires_at=now_plus(-60))

    (finding,) = findings("processes")

    assert finding["what"] == f"No {'dispatcher' if kind == 'worker' else 'worker'} is alive."


def test_overdue_job_is_found(alive):
    Job.objects.create(task="t", queue="slow", run_after=timezone.now() - timedelta(hours=2))
    Job.objects.create(task="t", queue="quick", run_after=timezone.now() - timedelta(seconds=300))

    (finding,) = findings("lag")

    assert finding["what"].startswith("A job of the queue 'slow' has been ready for 2:00:0")
    assert finding["what"].endswith("workers that serve the queue: 1, with 8 threads.")


def test_unserved_queue_is_found_sooner(transactional_db):
    a_process("worker@here:1:abc", details={"queues": "*, -slow", "threads": 8})
    Job.objects.create(task="t", queue="slow", run_after=timezone.now() - timedelta(seconds=90))

    (finding,) = findings("lag")

    assert "no live worker serves the queue" in finding["what"] and '"slow"' in finding["remedy"]


def test_paused_jobs_are_not_overdue(alive):
    long_ago = timezone.now() - timedelta(hours=2)
    Job.objects.create(task="t", queue="paused", run_after=long_ago)
    Job.objects.create(task="shop.tasks.paused", queue="default", run_after=long_ago)
    assert len(findings("lag")) == 2

    Queue.objects.named("paused").pause()
    TaskState.objects.named("shop.tasks.paused").pause()

    assert findings("lag") == []


def test_orphaned_jobs_are_found(alive):
    gone = a_process("worker@gone:1:abc")
    for minutes in (1, 10):
        started = timezone.now() - timedelta(minutes=minutes)
        Job.objects.create(
            task="t", queue="default", state="running", process=gone, attempt=1, started_at=started
        )
    assert findings("orphaned-jobs") == []

    type(gone).objects.filter(pk=gone.pk).delete()

    (finding,) = findings("orphaned-jobs")
    assert finding["what"].startswith("1 running job belongs to a dead process")


@pytest.mark.parametrize(
    "state, option, days",
    [
        ("successful", "keep_successful", 7),
        ("failed", "keep_failed", 90),
        ("discarded", "keep_failed", 90),
    ],
)
def test_jobs_past_retention_are_found(alive, monkeypatch, state, option, days):
    def ended(hours: float, queue: str) -> None:
        at = timezone.now() - timedelta(days=days, hours=hours)
        Job.objects.create(
            task="t", queue=queue, state=state, attempt=1, started_at=at, finished_at=at
        )

    ended(0.5, "default")
    ended(2, "audit")
    (finding,) = findings("retention")
    assert re.fullmatch(
        rf"A job of the queue 'audit' ended {days} days, 2:0\d:\d\d ago, "
        rf"and {option} is {days} days, 0:00:00\.",
        finding["what"],
    )

    change_options(monkeypatch, per_queue={"audit": {option: None}})

    assert findings("retention") == []


def test_silent_process_is_found(alive):
    a_process("worker@lost:1:abc", heartbeat_at=now_plus(-90), expires_at=now_plus(-60))

    (finding,) = findings("silent-processes")

    assert finding["what"].startswith("1 process without a heartbeat: worker@lost:1:abc for 0:01:3")
    assert finding["severity"] == "warning"


def test_process_with_heartbeat_of_the_future_is_silent_for_no_time(alive):
    a_process("worker@ahead:1:abc", heartbeat_at=now_plus(600))

    (finding,) = findings("silent-processes")

    assert finding["what"].endswith("worker@ahead:1:abc for 0:00:00.")


def test_many_silent_processes_are_counted(alive):
    for number in range(7):
        a_process(f"worker@lost:{number}:abc", expires_at=now_plus(-60))

    (finding,) = findings("silent-processes")

    assert finding["what"].startswith("7 processes without a heartbeat: ")
    assert finding["what"].endswith(", 2 more.")


def test_overdue_recurring_task_is_found(alive):
    a_recurring_task("nightly", hours=2)
    a_recurring_task("just due", hours=1 / 60)
    a_recurring_task("later", hours=-1)
    a_recurring_task("new", hours=None)
    a_recurring_task("disabled", is_enabled=False)
    a_recurring_task("over", is_over=True)

    (finding,) = findings("overdue-recurring-tasks")

    assert finding["what"].startswith("The recurring task 'nightly' is overdue by 2:00:0")
    assert ", since 20" in finding["what"]
    assert finding["severity"] == "critical"


def test_problem_of_overdue_recurring_task_is_named(alive):
    a_recurring_task("unplanned", hours=None, problem="No such zone:\n'Europe/Bern'.")
    a_recurring_task("unknown", problem="There is no task shop.tasks.report.")

    unplanned, unknown = [each["what"] for each in findings("overdue-recurring-tasks")]

    assert unplanned == (
        "The recurring task 'unplanned' has no next time. No such zone: 'Europe/Bern'."
    )
    assert unknown.endswith(" UTC. There is no task shop.tasks.report.")


@pytest.mark.parametrize("hours", [2, None, -1])
def test_invalid_recurring_task_is_found_with_its_cure(alive, hours):
    """The remedy was another dispatcher, while one was alive."""
    a_recurring_task("wrong", hours=hours, problem="'61 * * * *' is not a cron expression.")

    (finding,) = findings("overdue-recurring-tasks")

    assert finding["what"].endswith("'61 * * * *' is not a cron expression.")
    assert finding["remedy"].startswith("Correct the recurring task")


@pytest.mark.parametrize(
    "change", [{"OPTIONS": {"options": "-c search_path=twin"}}, {"USER": "twin"}]
)
def test_schemas_of_one_database_are_checked_each(settings, monkeypatch, change):
    if connection.vendor != "postgresql":
        pytest.skip("Schemas of PostgreSQL.")
    twin = {**settings.TASKS["default"], "QUEUES": ["twin"], "OPTIONS": {"database": "twin"}}
    settings.TASKS = {**settings.TASKS, "twin": twin}
    elsewhere = connection.copy("twin")
    elsewhere.settings_dict = {**elsewhere.settings_dict, **change}
    monkeypatch.setattr(connections._connections, "twin", elsewhere, raising=False)
    backends = [task_backends["default"], task_backends["twin"]]

    assert len(queue_databases(backends)) == 2


def test_recurring_task_removed_from_code_is_overdue_only_without_dispatcher(alive):
    a_recurring_task("removed", is_from_code=True, declared_at=now_plus(-3600))
    assert findings("overdue-recurring-tasks") == []

    Process.objects.filter(kind="dispatcher").delete()

    assert len(findings("overdue-recurring-tasks")) == 1


def test_many_overdue_recurring_tasks_are_counted(alive):
    for number in range(7):
        a_recurring_task(f"task {number}")

    *named, rest = findings("overdue-recurring-tasks")

    assert len(named) == 5 and rest["what"] == "2 further recurring tasks are overdue."


def test_many_invalid_recurring_tasks_are_not_said_to_be_overdue(alive):
    for number in range(7):
        later = timezone.now() + timedelta(hours=1)
        a_recurring_task(f"task {number}", next_run_at=later, problem="No such task.")
    a_recurring_task("late")

    found = findings("overdue-recurring-tasks")

    (said,) = [
        each for each in found if "cannot be enqueued." in each["what"] and "fur" in each["what"]
    ]
    assert said["what"] in (
        "2 further recurring tasks cannot be enqueued.",
        "3 further recurring tasks cannot be enqueued.",
    )
    assert said["remedy"].startswith("Correct the recurring task")


@pytest.mark.parametrize("command", ["checkqueue", "queuehealth"])
def test_wrong_argument_ends_with_unknown_and_not_as_critical(command):
    program = [sys.executable, "-m", "django", command, "--nope"]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == 3, ended.stderr
    assert "unrecognized arguments: --nope" in ended.stderr


def test_ready_within_is_an_option_of_the_queue(alive, monkeypatch):
    for name in ("bulk", "slow", "urgent", "ordinary"):
        at = timezone.now() - timedelta(seconds=300)
        Job.objects.create(task="t", queue=name, run_after=at)
    assert findings("lag") == []

    own = {"bulk": {"ready_within": None}, "slow": {"ready_within": 900}}
    change_options(monkeypatch, ready_within=120, per_queue={**own, "urgent": {"ready_within": 5}})

    found = sorted(each["what"] for each in findings("lag"))
    assert len(found) == 2 and "'ordinary'" in found[0] and "'urgent'" in found[1]
    assert (
        "ready_within is 0:02:00. Ready jobs: 1; workers that serve the queue: 1, with 8 threads"
        in found[0]
    )
    assert "ready_within is 0:00:05" in found[1]


def test_unserved_queue_is_found_even_if_its_jobs_may_wait(transactional_db, monkeypatch):
    a_process("worker@here:1:abc", details={"queues": "*, -slow", "threads": 8})
    Job.objects.create(task="t", queue="slow", run_after=timezone.now() - timedelta(seconds=90))
    change_options(monkeypatch, ready_within=None)

    assert len(findings("lag")) == 1


def test_queue_that_no_worker_may_serve_has_another_remedy(transactional_db, settings):
    """The named command was refused: the queue is not in QUEUES."""
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default"]}}
    a_process("worker@here:1:abc", details={"queues": "default", "threads": 8})
    Job.objects.create(task="t", queue="gone", run_after=timezone.now() - timedelta(hours=1))

    (finding,) = findings("lag")

    assert finding["remedy"].startswith("Add it to QUEUES, or move its jobs")


def test_unserved_queues_are_named_first_and_the_rest_is_counted(transactional_db, monkeypatch):
    monkeypatch.setattr(queue, "MOST", 1)
    a_process("worker@here:1:abc", details={"queues": "*, -slow", "threads": 8})
    for name, hours in (("slow", 1), ("one", 2), ("two", 3)):
        at = timezone.now() - timedelta(hours=hours)
        Job.objects.create(task="t", queue=name, run_after=at)

    first, rest = findings("lag")

    assert "'slow'" in first["what"] and first["severity"] == "critical"
    assert rest["what"] == "2 further queues with jobs that have been ready for too long."
    assert rest["severity"] == "warning"


def test_open_failure_with_jobs_failed_within_the_hour_is_found(alive):
    rare, frequent = a_failure("Rare"), a_failure("No such customer", count=412)
    for _ in range(3):
        a_failed_job(frequent, minutes=50)
    a_failed_job(frequent, minutes=70)
    a_failed_job(rare)
    a_failed_job(a_failure("Old"), minutes=70)
    a_failed_job(a_failure("Muted", state="muted"))
    a_failed_job(a_failure("Resolved", state="resolved"))
    a_failed_job(a_failure("Retried"), state="scheduled", finished_at=None)

    first, second = findings("failures")

    assert first["what"].startswith(
        "Failure NoCustomer: No such customer: 3 jobs failed within the last hour; "
        "occurrences: 412 since 20"
    )
    assert f"filter(pk={frequent.pk}).mute()" in first["remedy"]
    assert second["what"].startswith("Failure NoCustomer: Rare: 1 job failed within the last hour;")
    assert first["severity"] == "warning"


def test_hanged_jobs_are_found_by_the_limit_of_their_queue(alive, monkeypatch):
    change_options(monkeypatch, hanged_after=7200, per_queue={"slow": {"hanged_after": 86_400}})
    worker = Process.objects.get(kind=Process.Kind.WORKER)
    for name, hours in (("default", 1), ("default", 3), ("slow", 20), ("slow", 30)):
        Job.objects.create(
            task="app.tasks.report",
            queue=name,
            state="running",
            process=worker,
            started_at=timezone.now() - timedelta(hours=hours),
        )

    (found,) = findings("hanged-jobs")

    assert found["what"].startswith(
        "2 hanged jobs. The first one, of app.tasks.report, has run for 1 day, 6:00"
    )
    assert found["severity"] == "warning"


def test_hanged_job_inserted_by_hand_is_found(alive):
    """It has no start, no process that lives, and a name that would move a terminal's cursor."""
    Job.objects.create(task="evil\x1b[2J", queue="q", state="running", process_id=999)

    (found,) = findings("hanged-jobs")
    assert found["what"] == "1 hanged job."
    Job.objects.update(started_at=timezone.now())

    (found,) = findings("hanged-jobs")
    assert found["what"].startswith("1 hanged job. The first one, of evil [2J, has run for 0:00:0")


def test_operation_whose_job_has_ended_is_found(alive):
    values = {"verb": "discard", "total": 9, "done": 4, "changed": 4}
    operation = Operation.objects.create(**values, created_at=timezone.now())
    assert findings("stalled-operations") == []
    Operation.objects.update(created_at=timezone.now() - timedelta(hours=1))

    (found,) = findings("stalled-operations")
    assert found["what"] == (
        f"The operation Discard #{operation.pk} has not ended, and no job goes on with it: "
        "4 of 9 jobs processed."
    )
    job = Job.objects.create(task="tests.tasks.nothing", queue="q")
    Operation.objects.update(job=job.pk)
    assert findings("stalled-operations") == []


def test_jobs_that_no_worker_knows_are_found(alive, monkeypatch):
    for number in range(3):
        row = tasks.add.enqueue(number)
        Job.objects.filter(pk=row.id).update(
            task="shop.tasks.renamed" if number else "shop.tasks.gone"
        )
    tasks.fail_and_wait.enqueue()
    drain()

    found = findings("unknown-tasks")

    assert [each["what"] for each in found] == [
        "No live worker knows the task shop.tasks.renamed. Jobs that wait for it: 2.",
        "No live worker knows the task shop.tasks.gone. Jobs that wait for it: 1.",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(queue, "MOST", 1)
        assert findings("unknown-tasks")[1]["what"] == "1 further finding of this kind."
    # A new run of its key.
    Job.objects.filter(task="shop.tasks.gone").update(attempts_before=F("attempt"))
    assert [each["what"] for each in findings("unknown-tasks")] == [found[0]["what"]]
    Job.objects.filter(task__startswith="shop").discard()
    assert findings("unknown-tasks") == []


def test_move_that_was_interrupted_is_found(alive):
    values = {"verb": "move_out", "value": "bulk", "total": 9, "done": 4, "changed": 4}
    Operation.objects.create(**values, finished_at=timezone.now())
    assert findings("interrupted-moves") == []
    Operation.objects.update(finished_at=timezone.now() - timedelta(hours=1))

    (found,) = findings("interrupted-moves")
    assert found["what"] == "A move to the backend bulk was interrupted. It holds jobs: 5."
    assert findings("stalled-operations") == []
    Operation.objects.update(done=9)
    assert findings("interrupted-moves") == []


def test_number_of_ready_jobs_says_what_a_dead_runqueue_costs(transactional_db):
    for _ in range(3):
        Job.objects.create(task="t", queue="q")

    (found,) = findings("processes")

    assert found["why"] == "No job runs; 3 ready jobs so far."


def test_job_failed_without_a_failure_is_no_failure(alive):
    a_failed_job(a_failure())
    Failure.objects.all().delete()

    assert findings("failures") == []


def test_job_counts_for_the_failure_of_its_last_attempt(alive):
    job = a_failed_job(a_failure("Last"), attempt=2)
    an_execution(job, a_failure("First"), attempt=1)

    (finding,) = findings("failures")

    assert "NoCustomer: Last: 1 job" in finding["what"]


def test_ten_failures_are_named_and_the_rest_is_counted(alive):
    for number in range(12):
        a_failed_job(a_failure(f"Message {number}"))

    *named, rest = findings("failures")

    assert len(named) == 10
    assert rest["what"] == "2 further open failures; jobs failed within the last hour: 2."


def test_failures_of_very_many_jobs_are_lower_bounds(alive, monkeypatch):
    monkeypatch.setattr(queue, "LIMIT", 2)
    failure = a_failure()
    for _ in range(5):
        a_failed_job(failure)

    (finding,) = findings("failures")

    assert ": ≥ 3 jobs failed within the last hour" in finding["what"]


@on("postgresql", "mysql")
def test_jobs_that_failed_recently_are_found_by_index(alive):
    at = timezone.now() - timedelta(days=2)
    times = {"started_at": at, "finished_at": at}
    Job.objects.bulk_create(
        [Job(task="t", queue="default", state="failed", attempt=1, **times) for _ in range(3000)],
        batch_size=1000,
    )
    execute(f"ANALYZE {'TABLE ' * (connection.vendor == 'mysql')}dbqueue_job")

    plan = queue.recently_failed(QueueDatabase("default", ()))[:10_001].explain()

    assert "dbqueue_job_finished" in plan


def test_message_of_a_failure_cannot_control_the_terminal(alive):
    a_failed_job(a_failure("\x1b[2J{0} %s\r\n|\u202eevil"))

    (finding,) = findings("failures")

    assert finding["what"].startswith("Failure NoCustomer: [2J{0} %s | evil: 1 job failed")


# PostgreSQL


@on("postgresql")
@pytest.mark.parametrize("how", ["reads", "writes", "writes in another database"])
def test_old_transaction_is_found_with_its_session(alive, other_session, monkeypatch, how):
    monkeypatch.setattr(snapshots, "OLD", 0.0)
    if how == "writes in another database":
        other_session = connections["other"].copy("other_session")
    other_session.set_autocommit(False)
    with other_session.cursor() as cursor:
        if how == "reads":
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT 1" if how == "reads" else "SELECT pg_current_xact_id()")
    pid = other_session.connection.info.backend_pid

    mine = [each for each in findings("transactions") if f"pid {pid} " in each["what"]]

    assert (
        len(mine) == 1
        and "idle in transaction" in mine[0]["what"]
        and other_session.settings_dict["NAME"] in mine[0]["what"]
    )
    assert "idle_in_transaction_session_timeout" in mine[0]["remedy"]
    apply_remedy(mine[0])
    until(lambda: not [each for each in findings("transactions") if f"pid {pid} " in each["what"]])
    other_session.connection.close()


@on("postgresql")
def test_transaction_without_snapshot_is_not_reported(alive, other_session, monkeypatch):
    monkeypatch.setattr(snapshots, "OLD", 0.0)
    other_session.set_autocommit(False)
    with other_session.cursor() as cursor:
        cursor.execute("SELECT 1")
    pid = other_session.connection.info.backend_pid

    assert [each for each in findings("transactions") if f"pid {pid} " in each["what"]] == []


@on("postgresql")
def test_new_transaction_is_not_reported(alive, other_session):
    other_session.set_autocommit(False)
    with other_session.cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()")
    pid = other_session.connection.info.backend_pid

    assert [each for each in findings("transactions") if f"pid {pid} " in each["what"]] == []


@on("postgresql")
def test_forgotten_prepared_transaction_is_found(alive, monkeypatch):
    if value("SHOW max_prepared_transactions") == "0":
        pytest.skip("This server allows no prepared transactions.")
    monkeypatch.setattr(snapshots, "OLD", 0.0)
    execute("BEGIN", "SELECT pg_current_xact_id()", "PREPARE TRANSACTION 'it''s mine'")
    try:
        (finding,) = findings("prepared-transactions")
        assert '"it\'s mine"' in finding["what"]
        apply_remedy(finding)
        assert findings("prepared-transactions") == []
    finally:
        if value("SELECT count(*) FROM pg_prepared_xacts WHERE gid = 'it''s mine'"):
            execute("ROLLBACK PREPARED 'it''s mine'")


@on("postgresql")
@pytest.mark.parametrize("is_active", [True, False])
def test_replication_slot_that_blocks_vacuum_is_found(alive, monkeypatch, is_active):
    # A real one needs a standby.
    monkeypatch.setattr(
        snapshots,
        "SLOTS",
        f"SELECT 'gone' AS slot_name, {is_active} AS active, 2000000 AS behind WHERE %s < 2000000 LIMIT %s",
    )

    (finding,) = findings("replication")

    assert "'gone' holds back vacuum: its xmin is 2,000,000 transactions old" in finding["what"]
    assert (
        "hot_standby_feedback" if is_active else "SELECT pg_drop_replication_slot('gone');"
    ) in finding["remedy"]


@on("postgresql")
def test_standby_that_blocks_vacuum_is_found(alive, monkeypatch):
    report = (
        "SELECT 7 AS pid, 'two' AS application_name, 2000000 AS behind WHERE %s < 2000000 LIMIT %s"
    )
    monkeypatch.setattr(snapshots, "STANDBYS", report)

    (finding,) = findings("replication")

    assert (
        finding["what"]
        == "The standby two holds back vacuum: its xmin is 2,000,000 transactions old."
    )


@on("postgresql")
def test_hidden_sessions_are_named(alive, other_session):
    other_session.ensure_connection()
    execute(
        "DROP ROLE IF EXISTS dbqueue_unprivileged",
        "CREATE ROLE dbqueue_unprivileged",
        "GRANT pg_read_all_data TO dbqueue_unprivileged",
    )
    assert not_checked("hidden-sessions") == []
    try:
        execute("SET ROLE dbqueue_unprivileged")
        (line,) = not_checked("hidden-sessions")
    finally:
        execute("RESET ROLE", "DROP ROLE dbqueue_unprivileged")

    assert (
        "dbqueue_unprivileged may not see them" in line["what"]
        and other_session.settings_dict["USER"] in line["what"]
    )
    assert line["remedy"] == 'GRANT pg_read_all_stats TO "dbqueue_unprivileged";'


@on("postgresql")
def test_disabled_autovacuum_is_found(alive):
    whats = [each["what"] for each in findings("autovacuum")]

    assert ("autovacuum is off." in whats) == (value("SHOW autovacuum") == "off")


@on("postgresql")
def test_table_without_autovacuum_is_found(alive, probe):
    execute(f"ALTER TABLE {probe} SET (autovacuum_enabled = false)")

    finding = next(each for each in findings("autovacuum") if probe in each["what"])

    apply_remedy(finding)
    assert not [each for each in findings("autovacuum") if probe in each["what"]]


@on("postgresql")
def test_late_autovacuum_of_busy_table_is_found(alive, probe, monkeypatch):
    monkeypatch.setattr(vacuum, "BUSY", 500)
    monkeypatch.setattr(vacuum, "LATE", 100)
    fill(probe, 400)
    assert findings("late-autovacuum") == []

    execute(f"UPDATE {probe} SET attempt = 1", f"UPDATE {probe} SET attempt = 2")

    (finding,) = until(lambda: findings("late-autovacuum"))
    assert "begins when dbqueue_probe has 130 dead rows" in finding["what"]
    monkeypatch.setattr(vacuum, "LATE", 20_000)
    apply_remedy(finding)
    assert findings("late-autovacuum") == []


@on("postgresql")
def test_accumulated_dead_rows_are_found(alive, probe, monkeypatch):
    monkeypatch.setattr(vacuum, "DEAD", 100)
    execute(f"ALTER TABLE {probe} SET (autovacuum_enabled = false)")
    fill(probe, 200)
    assert findings("dead-rows") == []

    execute(f"UPDATE {probe} SET attempt = 1")

    (finding,) = until(lambda: findings("dead-rows"))
    assert "200 dead and 200 live rows; last vacuum: none" in finding["what"]
    apply_remedy(finding)
    until(lambda: not findings("dead-rows"))


@on("postgresql")
def test_table_without_statistics_is_found(alive, probe, monkeypatch):
    assert findings("statistics") == []
    monkeypatch.setattr(vacuum, "LARGE", 8192)
    fill(probe, 200)

    (finding,) = findings("statistics")

    apply_remedy(finding)
    assert findings("statistics") == []


@on("postgresql")
def test_bloated_table_and_indexes_are_found(alive, probe, monkeypatch):
    monkeypatch.setattr(bloat, "LARGE", 10 * 8192)
    fill(probe, 4000, metadata={"of": "some length" * 5})
    execute(f"VACUUM ANALYZE {probe}")
    assert findings("bloat") == []

    execute(f"DELETE FROM {probe} WHERE priority > 0", f"VACUUM ANALYZE {probe}")

    found = findings("bloat")
    assert any(each["what"].startswith("dbqueue_probe has") for each in found)
    assert any(each["what"].startswith("dbqueue_probe_pkey has") for each in found)
    for each in found:
        apply_remedy(each)
    execute(f"ANALYZE {probe}")
    assert findings("bloat") == []


@on("postgresql")
def test_asynchronous_commit_is_found(alive):
    name = connection.settings_dict["NAME"]
    assert not [each for each in findings("durability") if "synchronous_commit" in each["what"]]
    try:
        execute("SET synchronous_commit = off")
        (of_the_session,) = [
            each for each in findings("durability") if "synchronous_commit" in each["what"]
        ]
        execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
        connection.close()
        (of_the_database,) = [
            each for each in findings("durability") if "synchronous_commit" in each["what"]
        ]
    finally:
        execute(f"ALTER DATABASE {name} RESET synchronous_commit")
        connection.close()

    assert "DATABASES['default']['OPTIONS']" in of_the_session["remedy"]
    assert of_the_database["remedy"] == f'ALTER DATABASE "{name}" RESET synchronous_commit;'


@on("postgresql")
def test_missing_idle_transaction_timeout_is_found(alive, probe, monkeypatch):
    if value("SHOW idle_in_transaction_session_timeout") != "0":
        pytest.skip("This server sets the timeout.")
    assert findings("idle-transactions") == []
    monkeypatch.setattr(vacuum, "BUSY", 0)
    monkeypatch.setattr(postgresql, "BUSY", 0)

    (finding,) = findings("idle-transactions")

    try:
        apply_remedy(finding)
        connection.close()
        assert findings("idle-transactions") == []
    finally:
        execute(
            f"ALTER DATABASE {connection.settings_dict['NAME']} RESET idle_in_transaction_session_timeout"
        )
        connection.close()


@on("postgresql")
def test_more_threads_than_connections_are_found(alive):
    room = value("SHOW max_connections")
    assert not [each for each in findings("connections") if "may need" in each["what"]]

    a_process("worker@there:1:abc", details={"threads": int(room)})

    (finding,) = findings("connections")
    # Two each for supervisor and dispatcher, and four for each worker beside its threads.
    assert finding["what"].startswith(
        f"The live processes may need {2 + 2 + 4 + 8 + 4 + int(room)} connections"
    )


@on("postgresql")
def test_nearly_exhausted_connections_are_found(alive, monkeypatch):
    monkeypatch.setattr(postgresql, "TAKEN", 0.0)

    (finding,) = findings("connections")

    assert "connections are taken" in finding["what"]


@on("postgresql")
@pytest.mark.parametrize(
    "requested, written, is_found", [(100, 10**11, True), (100, 10**6, False), (9, 10**11, False)]
)
def test_frequent_checkpoints_are_found(alive, monkeypatch, requested, written, is_found):
    assert not_checked("checkpoints") == []
    monkeypatch.setattr(
        postgresql,
        "CHECKPOINTS",
        f"SELECT 10 AS timed, {requested} AS requested, {2**30} AS most, {written} AS written, 3600.0 AS seconds",
    )

    assert [each["remedy"] for each in findings("checkpoints")] == [
        "ALTER SYSTEM SET max_wal_size = '4096MB'; SELECT pg_reload_conf();"
    ] * is_found


@on("postgresql")
def test_missing_index_of_an_argument_is_found_until_its_remedy_has_run(alive, monkeypatch):
    assert findings("search-indexes") == []
    change_options(monkeypatch, indexed_arguments=["customer"])

    (finding,) = findings("search-indexes")
    try:
        with connection.cursor() as cursor:
            for statement in finding["remedy"].splitlines():
                cursor.execute(statement)

        assert "customer" in finding["what"] and "CONCURRENTLY" in finding["remedy"]
        assert findings("search-indexes") == []
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP INDEX IF EXISTS dbqueue_job_kwargs_customer")
            cursor.execute("DROP INDEX IF EXISTS dbqueue_job_metadata_customer")


def test_quiet_processes_are_found_in_place_of_an_unserved_queue(alive):
    tasks_of = {"state": "ready", "run_after": now_plus(-3600)}
    Job.objects.create(task="t", queue="default", **tasks_of)
    assert findings("quiet-processes") == []

    Process.objects.filter(kind=Process.Kind.WORKER).quiet()

    (finding,) = findings("quiet-processes")
    assert finding["what"].startswith("1 quiet process: ")
    assert finding["severity"] == "warning" and "resume" in finding["remedy"]
    assert findings("lag") == []


@on("postgresql")
def test_pooler_is_found(alive, monkeypatch):
    assert findings("pooler") == []
    # OPTIONS may name the server's socket, and they override HOST.
    options = {
        name: value
        for name, value in connection.settings_dict["OPTIONS"].items()
        if name not in ("host", "port")
    }
    pooler = Pooler(connection.connection.info.host, connection.connection.info.port)
    connection.close()
    try:
        with monkeypatch.context() as patch:
            patch.setitem(connection.settings_dict, "OPTIONS", options)
            patch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
            patch.setitem(connection.settings_dict, "PORT", pooler.port)
            assert len(findings("pooler")) == 1
            # Threads use connections of the pooler, not of the server.
            a_process("worker@there:1:abc", details={"threads": 10_000})
            assert findings("connections") == []
            patch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
            assert findings("pooler") == []
    finally:
        connection.close()
        pooler.close()


class Pooler:
    """Proxy that reports its own process id to clients, as a pooler does."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (
            f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host or "127.0.0.1", port)
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(
                socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET
            )
            server.connect(self._target)
            for pair in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_to_client: bool) -> None:
        # Either end may be closed.
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                # BackendKeyData.
                if is_to_client and (place := data.find(b"K\0\0\0\x0c")) >= 0:
                    data = data[: place + 5] + b"\0\0\0\x01" + data[place + 9 :]
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


# MariaDB and MySQL


@on("mysql")
def test_old_innodb_transaction_is_found_with_its_thread(alive, other_session, monkeypatch):
    monkeypatch.setattr(innodb, "OLD", -1)
    # Other tests have transactions on this server too.
    monkeypatch.setattr(innodb, "MOST", 1000)
    other_session.set_autocommit(False)
    with other_session.cursor() as cursor:
        cursor.execute("SELECT CONNECTION_ID()")
        (thread,) = cursor.fetchone()
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT count(*) FROM dbqueue_job")
    execute("SET time_zone = '+09:00'")

    def mine():
        # InnoDB refreshes its list of transactions once it has not been read for 0.1 s.
        time.sleep(0.12)
        return [each for each in findings("transactions") if f"thread {thread} " in each["what"]]

    (finding,) = until(mine)
    assert (
        finding["what"].startswith("A transaction has been open for 0:00:0")
        and "Sleep" in finding["what"]
    )
    monkeypatch.setattr(innodb, "OLD", 300)
    assert mine() == []
    monkeypatch.setattr(innodb, "OLD", -1)
    apply_remedy(finding)
    until(lambda: not mine())
    connection.close()


@on("mysql")
def test_hidden_transactions_are_reported_as_not_checked(alive, monkeypatch):
    name = connection.settings_dict["NAME"]
    execute(
        "DROP USER IF EXISTS dbqueue_unprivileged",
        "CREATE USER dbqueue_unprivileged IDENTIFIED BY 'unpr1vileged'",
    )
    execute(f"GRANT SELECT ON `{name}`.* TO dbqueue_unprivileged")
    connection.close()
    try:
        with monkeypatch.context() as patch:
            patch.setitem(connection.settings_dict, "USER", "dbqueue_unprivileged")
            patch.setitem(connection.settings_dict, "PASSWORD", "unpr1vileged")
            report = run_check()
            connection.close()
    finally:
        connection.close()
        execute("DROP USER dbqueue_unprivileged")

    lines = {each["check"]: each for each in report["not_checked"]}
    assert set(lines) == {"transactions", "history"}
    assert "PROCESS" in lines["transactions"]["what"]
    assert lines["transactions"]["remedy"].startswith(
        "GRANT PROCESS ON *.* TO `dbqueue_unprivileged`@"
    )


@on("mysql")
def test_long_history_list_is_found(alive, monkeypatch):
    assert findings("history") == []
    monkeypatch.setattr(innodb, "HISTORY", -1)

    assert len(findings("history")) == 1


@on("mysql")
def test_fragmented_table_is_found(alive, probe, monkeypatch):
    monkeypatch.setattr(innodb, "FREE", 2**20)
    fill(probe, 100)
    assert findings("fragmentation") == []

    # Deleted rows are freed once no snapshot on the server sees them; rolled-back rows are freed at once.
    with transaction.atomic():
        fill(probe, 12_000, metadata={"of": "some length" * 100})
        transaction.set_rollback(True)

    def free():
        execute(f"ANALYZE TABLE {probe}")
        return findings("fragmentation")

    (finding,) = until(free)
    apply_remedy(finding)
    until(lambda: not free())


@on("mysql")
def test_unsuitable_isolation_level_is_found(alive):
    assert findings("isolation") == []
    execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    try:
        assert [each["what"] for each in findings("isolation")] == [
            "The project's connections run at REPEATABLE-READ."
        ]
    finally:
        connection.close()


@on("mysql")
@pytest.mark.parametrize(
    "check, changes",
    [
        ("durability", {"innodb_flush_log_at_trx_commit": "2"}),
        ("durability", {"log_bin": "ON", "sync_binlog": "0"}),
        ("packets", {"max_allowed_packet": "1048576"}),
        ("buffer-pool", {"innodb_buffer_pool_size": "5242"}),
    ],
)
def test_unsuitable_server_setting_is_found(alive, monkeypatch, check, changes):
    # All users of the server share its real settings.
    has = mysql.variables(QueueDatabase("default", ()))
    good = {
        "innodb_flush_log_at_trx_commit": "1",
        "sync_binlog": "1",
        "max_allowed_packet": "67108864",
    }
    for module in (mysql, innodb):
        monkeypatch.setattr(module, "variables", lambda database: {**has, **good})
    assert findings(check) == []
    for module in (mysql, innodb):
        monkeypatch.setattr(module, "variables", lambda database: {**has, **good, **changes})

    (finding,) = findings(check)

    assert finding["remedy"].startswith(f"SET GLOBAL {list(changes)[-1]} = ")


@on("mysql")
def test_incomplete_character_set_is_found(alive, probe):
    assert findings("character-sets") == []
    execute("SET NAMES latin1", f"ALTER TABLE {probe} CONVERT TO CHARACTER SET latin1")
    try:
        of_connections, of_the_table = findings("character-sets")
    finally:
        connection.close()

    assert "latin1" in of_connections["what"] and "'charset'" in of_connections["remedy"]
    assert "dbqueue_probe has the collation latin1_" in of_the_table["what"]
    apply_remedy(of_the_table)
    assert findings("character-sets") == []


@on("mysql")
@pytest.mark.parametrize("charset", ["latin1", "utf8mb4"])
def test_identifiers_that_compare_inexactly_are_found(alive, charset):
    """A conversion without a collation replaces that of each column."""
    try:
        execute(f"ALTER TABLE dbqueue_job CONVERT TO CHARACTER SET {charset}")
        (finding,) = findings("character-sets")
        assert ("key (utf8mb4_" in finding["what"]) == (charset == "utf8mb4")
        if charset == "utf8mb4":
            keyed = tasks.index_document
            keyed.using(key="Ada").enqueue(1)
            with pytest.raises(IntegrityError, match=r"the key '\S+ ada' for another one"):
                keyed.using(key="ada").enqueue(1)
        apply_remedy(finding)
        assert findings("character-sets") == []
    finally:
        collation = binary_collation(connection)
        execute(f"ALTER TABLE dbqueue_job CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}")
    keys = [tasks.index_document.using(key=each).enqueue(1) for each in ("Bob", "bob")]
    assert [each.enqueued for each in keys] == ["created", "created"]


# SQLite


@on("sqlite")
def test_deferred_transactions_are_found_with_text_of_system_check(alive, monkeypatch):
    from django_dbqueue.checks import check_databases

    assert findings("transactions") == []
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "transaction_mode", "DEFERRED")

    (finding,) = findings("transactions")

    (warning,) = [each for each in check_databases() if each.id == "dbqueue.W001"]
    assert finding["what"] in warning.msg and finding["remedy"] in warning.hint


@on("sqlite")
@pytest.mark.parametrize(
    "check, pragma, good, bad",
    [
        ("journal", "journal_mode", "wal", "delete"),
        ("busy-timeout", "busy_timeout", "20000", "1000"),
        ("durability", "synchronous", "NORMAL", "OFF"),
    ],
)
def test_unsuitable_pragma_is_found(alive, check, pragma, good, bad):
    assert findings(check) == []
    execute(f"PRAGMA {pragma} = {bad}")
    try:
        assert len(findings(check)) == 1
    finally:
        execute(f"PRAGMA {pragma} = {good}")


@on("sqlite")
def test_wal_held_by_reader_is_found(alive, monkeypatch):
    monkeypatch.setattr(sqlite, "MAX_WAL", 5 * 2**20)
    execute("PRAGMA wal_checkpoint(TRUNCATE)")
    reader = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    try:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM dbqueue_job").fetchone()
        assert findings("write-ahead-log") == []
        Job.objects.bulk_create(
            [
                Job(task="t", queue="default", metadata={"of": "some length" * 100})
                for _ in range(4000)
            ]
        )
        (finding,) = findings("write-ahead-log")
    finally:
        reader.close()

    apply_remedy(finding)
    assert findings("write-ahead-log") == []


@on("sqlite")
def test_file_with_many_free_pages_is_found(alive, monkeypatch):
    monkeypatch.setattr(sqlite, "FREE", 2**20)
    execute("VACUUM")
    assert findings("free-pages") == []
    Job.objects.bulk_create([Job(task="t", queue="default") for _ in range(4000)])
    Job.objects.all().delete()

    (finding,) = findings("free-pages")

    apply_remedy(finding)
    assert findings("free-pages") == []
