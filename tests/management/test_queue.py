"""``manage.py queue``: its listings and an operator's actions, as text and as JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, connections
from django.utils import timezone

from django_dbqueue import batch, pipeline, task
from django_dbqueue.command_line.output import as_table, duration
from django_dbqueue.models import (
    Batch,
    Failure,
    Job,
    Operation,
    Process,
    Queue,
    RecurringTask,
    TaskState,
)
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.testing import drain

from .. import tasks
from ..conftest import a_process, address_of_the_test_database

pytestmark = pytest.mark.django_db(databases=["default", "other"])


def queue(*arguments: object) -> str:
    out = io.StringIO()
    call_command("queue", *map(str, arguments), stdout=out)
    return out.getvalue()


def read(*arguments: object) -> Any:
    return json.loads(queue(*arguments, "--json"))


@task
def sign_in(name: str, password: str = "") -> None:
    raise ValueError(f"{name} is unknown")


@task(key=lambda order: str(order))
def confirm(order: int) -> dict[str, str]:
    return {"token": "s3cret", "order": str(order)}


def test_reason_that_is_too_long_is_refused() -> None:
    tasks.add.enqueue(1)
    with pytest.raises(CommandError, match=r"has 201 characters, more than 200"):
        queue("discard", "--all", "--reason", "x" * 201)
    assert Job.objects.get().state == "ready"


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs", "--key", "a\udcff"),
        ("jobs", "--queue", "a\udcff"),
        ("jobs", "--task", "a\udcff"),
        ("jobs", "--key", "a\0"),
        ("pause", "a\udcff"),
        ("discard", "--all", "--reason", "a\udcff"),
    ],
)
def test_text_that_no_database_stores_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match=r"'a\\(udcff|x00)' is not text .* in UTF-8"):
        queue(*arguments)


@pytest.mark.parametrize("limit", ["0", "1.5", "²", "99999999999999999999"])
def test_limit_that_is_no_number_of_rows_is_refused(limit: str) -> None:
    with pytest.raises(CommandError, match=f"'{limit}' is not a whole number from 1 to 1,000,000"):
        queue("jobs", "--limit", limit)


class TestListings:
    def test_stats(self) -> None:
        tasks.add.enqueue_many([(n,) for n in range(3)])
        tasks.add.using(run_after=timedelta(hours=1)).enqueue(1)
        sign_in.using(priority=1).enqueue("ada")
        Queue.objects.named("mail").pause()
        a_process("worker@here:1:abc")
        drain()
        tasks.add.enqueue(5)

        found = read("stats")
        assert (found["successful"], found["failed"], found["scheduled"]) == (3, 1, 1)
        assert (found["ready"], found["workers"], found["paused_queues"]) == (1, 1, 1)
        assert found["open_failures"] == 1
        assert found["oldest_ready"] >= 0
        assert "open failures" in queue("stats")

    def test_queues(self) -> None:
        tasks.add.using(queue_name="mail").enqueue(1)
        tasks.add.using(queue_name="bulk", run_after=timedelta(hours=1)).enqueue(1)
        Queue.objects.ensure_rows(["idle", "mail"])
        Queue.objects.named("mail").restrict(3)
        Queue.objects.named("idle").pause()
        process = a_process("worker@here:1:abc")
        Process.objects.filter(pk=process.pk).update(details={"queues": "mail"})

        rows = {row["queue"]: row for row in read("queues")}

        assert set(rows) == {"bulk", "idle", "mail"}
        assert rows["mail"]["ready"] == 1 and rows["mail"]["limit"] == 3
        assert (rows["mail"]["workers"], rows["bulk"]["workers"]) == (1, 0)
        assert rows["bulk"]["scheduled"] == 1 and rows["bulk"]["oldest"] is None
        assert [name for name, row in rows.items() if row["paused"]] == ["idle"]

    def test_jobs_by_filters(self) -> None:
        add = tasks.add.using(queue_name="mail").enqueue(1)
        with batch() as opened:
            member = tasks.nothing.enqueue()
        keyed = confirm.enqueue(7)
        failed = sign_in.using(priority=1).enqueue("ada")
        drain()
        number = read("failures")[0]["failure"]

        def ids(*filters: object) -> list[str]:
            return [row["id"] for row in read("jobs", *filters)]

        assert ids() == [failed.id, keyed.id, member.id, add.id]
        assert ids("--limit", 1) == [failed.id]
        assert ids("--queue", "mail") == [add.id]
        assert ids("--task", "tests.tasks.nothing") == [member.id]
        assert ids("--batch", opened.id) == [member.id]
        assert ids("--key", "7") == ids("--key", "7", "--task", confirm.module_path) == [keyed.id]
        assert ids("--state", "failed") == ids("--failure", number) == [failed.id]
        assert ids("--state", "failed", "--queue", "mail") == []
        assert "None." in queue("jobs", "--queue", "none")

    def test_secrets_and_control_characters_are_not_written(self) -> None:
        job = sign_in.enqueue("a\x1b[31m\nb", password="s3cret")
        confirm.enqueue(1)
        drain()

        said = queue("jobs") + queue("show", job.id) + str(read("show", job.id)) + queue("failures")

        assert "s3cret" not in said
        assert "\x1b" not in queue("jobs") + queue("failures")
        assert "••••••" in said
        (row,) = read("jobs", "--task", confirm.module_path)
        assert "s3cret" not in str(read("show", row["id"]))

    def test_arguments_are_shown_as_in_a_call(self) -> None:
        job = tasks.add.enqueue("two  spaces", b=[1, {"a": None}])

        assert read("show", job.id)["arguments"] == '"two  spaces", b=[1, {"a": null}]'

    def test_show_job_whose_task_no_worker_knows(self) -> None:
        unknown = Job.objects.create(task="tests.tasks.renamed", queue="default")
        other = sign_in.enqueue("ada")
        drain()

        said = "No live worker knows its task."
        assert said in queue("show", unknown.pk) and said in read("show", unknown.pk)["problem"]
        assert said not in queue("show", other.id) and read("show", other.id)["problem"] == ""

    def test_show_job_of_a_process_that_is_gone(self) -> None:
        job = tasks.add.enqueue(1)
        process = a_process("worker@here:1:abc")
        Job.objects.update(state="running", process=process, attempt=1, started_at=timezone.now())
        Process.objects.all().erase()

        assert read("show", job.id)["process"] == f"#{process.pk}"

    def test_show(self) -> None:
        job = sign_in.using(queue_name="mail", metadata={"order": 3}).enqueue("ada")
        drain()

        found, text = read("show", job.id), queue("show", job.id)

        assert (found["id"], found["state"], found["queue"]) == (job.id, "failed", "mail")
        assert found["metadata"] == {"order": 3}
        (attempt,) = found["attempts"]
        assert attempt["error"] == "builtins.ValueError: ada is unknown"
        assert 'raise ValueError(f"{name} is unknown")' in text
        assert "expires" not in text

    def test_failures_and_workers_and_recurring(self) -> None:
        sign_in.enqueue("ada")
        drain()
        a_process("worker@here:1:abc", release="7", memory=50 * 2**20)
        RecurringTask.objects.create(name="nightly", task="tests.tasks.nothing", cron="0 3 * * *")

        (failure,) = read("failures")
        (process,) = read("workers")
        (recurring,) = read("recurring")

        assert (failure["error"], failure["occurrences"]) == ("ValueError", 1)
        assert (failure["failed_now"], failure["waiting"]) == (1, 0)
        assert (process["alive"], process["release"], process["memory_mb"]) == (True, "7", 50)
        assert (recurring["calls"], recurring["schedule"]) == ("tests.tasks.nothing", "0 3 * * *")
        for name in ("failures", "workers", "recurring"):
            assert len(queue(name).splitlines()) == 2

    def test_empty_queue(self) -> None:
        for name in ("queues", "jobs", "failures", "workers", "recurring"):
            assert read(name) == []
            assert queue(name) == "None.\n"
        assert read("stats")["oldest_ready"] is None

    def test_top(self) -> None:
        tasks.add.using(queue_name="mail").enqueue(1)

        said = queue("top", "--once")

        assert "mail" in said and "\x1b" not in said
        assert "Running:\nNone." in said

    def test_top_as_json(self) -> None:
        tasks.add.using(queue_name="mail").enqueue(1)

        found = read("top", "--once")

        assert [row["queue"] for row in found["queues"]] == ["mail"]
        assert (found["running"], found["failures"]) == ([], [])
        assert found["at"]

    def test_backend(self) -> None:
        job = tasks.add.using(backend="other").enqueue(1)

        assert [row["id"] for row in read("jobs", "--backend", "other")] == [job.id]
        assert read("jobs") == []
        assert read("show", job.id)["id"] == job.id
        with pytest.raises(CommandError, match="TASKS has no DatabaseBackend nowhere"):
            queue("jobs", "--backend", "nowhere")


class TestEnqueue:
    def test_a_job_is_enqueued_with_its_options(self) -> None:
        found = read(
            *("enqueue", "tests.tasks.add", "--args", "[2]", "--kwargs", '{"b": 3}'),
            *("--queue", "mail", "--priority", -5, "--after", 60),
        )

        job = Job.objects.get(pk=found["id"])
        assert (job.args, job.kwargs, job.queue, job.priority) == ([2], {"b": 3}, "mail", -5)
        assert job.state == "scheduled"
        assert queue("enqueue", "tests.tasks.nothing").strip() == str(
            Job.objects.get(task="tests.tasks.nothing").pk
        )

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["tests.tasks.nothin"], "Did you mean tests.tasks.nothing?"),
            (["tests.tasks"], "There is no task 'tests.tasks'"),
            (["tests.tasks.add"], "missing a required argument"),
            (["tests.tasks.add", "--args", "[1"], "is not JSON"),
            (["tests.tasks.add", "--args", "{}"], "is not a list"),
            (["tests.tasks.add", "--kwargs", "[]"], "is not an object"),
            (["tests.tasks.add", "--args", "[1]", "--priority", "500"], "priority"),
            (["tests.tasks.add", "--args", "[1]", "--queue", "a,b"], "is not a queue name"),
            (["tests.tasks.add", "--args", "[1]", "--after", "-1"], "not a number of seconds"),
            (["os.getcwd"], "os.getcwd"),
        ],
    )
    def test_bad_input_is_refused(self, arguments: list[str], said: str) -> None:
        with pytest.raises(CommandError, match=said):
            queue("enqueue", *arguments)

        assert not Job.objects.exists()


class TestChanges:
    def test_retry_by_filters_is_an_operation_that_can_be_undone(self) -> None:
        sign_in.using(queue_name="mail").enqueue_many([("ada",), ("bob",)])
        sign_in.using(queue_name="other").enqueue("eve")
        drain()

        assert "would change 2 jobs" in queue("retry", "--queue", "mail", "--dry-run")
        assert Job.objects.filter(state="failed").count() == 3
        found = read("retry", "--queue", "mail", "--state", "failed", "--reason", "mended")

        operation = Operation.objects.get(pk=found["operation"])
        assert found["changed"] == operation.changed == 2
        assert operation.scope == "manage.py queue retry --state=failed --queue=mail"
        assert (operation.reason, operation.verb) == ("mended", "retry")
        assert "@" in operation.actor and operation.finished_at
        assert operation in Operation.objects.undoable()
        assert Job.objects.filter(state="ready", queue="mail").count() == 2

    def test_each_verb_changes_the_jobs_with_these_ids(self, process: Process) -> None:
        ready, scheduled, running = (tasks.add.enqueue(n).id for n in range(3))
        Job.objects.filter(pk=scheduled).update(state="scheduled", run_after=now_plus(3600))
        Job.objects.filter(pk=running).update(state="running", process=process, attempt=1)

        assert read("discard", ready)["changed"] == 1
        assert read("run-now", scheduled)["changed"] == 1
        assert read("stop", running)["changed"] == 1
        assert read("retry", ready)["changed"] == 1
        assert read("retry", running)["changed"] == 0

        states = dict(Job.objects.values_list("pk", "state"))
        assert sorted(states.values()) == ["ready", "ready", "running"]
        assert Job.objects.get(pk=running).stop_requested_at

    def test_more_jobs_than_one_part_are_changed_at_once(self) -> None:
        tasks.add.enqueue_many([(n,) for n in range(1200)])

        assert "changed 1,200 jobs" in queue("discard", "--all")
        assert not Job.objects.exclude(state="discarded").exists()

    @pytest.mark.parametrize(
        "arguments", [[], ["--all", "--queue", "mail"], [str(uuid4()), "--all"]]
    )
    def test_all_jobs_must_be_asked_for(self, arguments: list[str]) -> None:
        tasks.add.enqueue(1)

        with pytest.raises(CommandError, match="Give the ids of jobs, or filters"):
            queue("discard", *arguments)
        assert Job.objects.get().state == "ready"

    def test_unknown_id_changes_nothing(self) -> None:
        job, unknown = tasks.add.enqueue(1), uuid4()

        with pytest.raises(CommandError, match=f"no job {unknown}.* Nothing is changed"):
            queue("discard", job.id, unknown)
        with pytest.raises(CommandError, match="There is no failure 4711"):
            queue("retry", "--failure", 4711)
        with pytest.raises(CommandError, match="invalid UUID"):
            queue("retry", "1")
        assert Job.objects.get().state == "ready"

    def test_pause_and_resume(self) -> None:
        assert read("pause", "mail", "bulk", "--reason", "provider is down")["changed"] == 2
        assert set(Queue.objects.names_of_paused()) == {"mail", "bulk"}
        assert read("pause", "mail")["changed"] == 0
        assert read("resume", "mail")["changed"] == 1
        assert Queue.objects.names_of_paused() == ["bulk"]
        assert Operation.objects.earliest("pk").scope == "manage.py queue pause mail bulk"

    def test_new_run_of_a_key_is_left_alone_by_the_failure_of_an_earlier_one(self) -> None:
        fail = tasks.fail.using(key="order-42")
        fail.enqueue("the provider is down")
        drain()
        failure = Failure.objects.get().pk
        fail.using(run_after=timedelta(days=7)).enqueue("another call")
        before = Job.objects.values().get()

        assert before["state"] == "scheduled"
        for action in ("retry", "discard"):
            assert read(action, "--failure", failure)["changed"] == 0
        assert Job.objects.values().get() == before

    def test_pause_for_a_while_and_of_a_task(self) -> None:
        queue("pause", "mail", "--for", 60)
        queue("pause", "tests.tasks.add", "--task")

        resume_at = Queue.objects.get(name="mail").resume_at
        assert 0 < (resume_at - timezone.now()).total_seconds() < 70
        assert TaskState.objects.names_of_paused() == ["tests.tasks.add"]
        queue("resume", "tests.tasks.add", "--task")
        assert TaskState.objects.names_of_paused() == []

    def test_queue_that_is_none_is_refused(self) -> None:
        with pytest.raises(CommandError, match="is not a queue name"):
            queue("pause", "a,b")
        assert not Queue.objects.exists()

    def test_queue_that_is_not_in_the_settings_is_refused(self, settings: Any) -> None:
        backend = {**settings.TASKS["default"], "QUEUES": ["default", "mail"]}
        settings.TASKS = {**settings.TASKS, "default": backend}

        for action in ("pause", "resume"):
            with pytest.raises(CommandError, match=r"'mial'.* Did you mean 'mail'"):
                queue(action, "mial")
        assert not Queue.objects.exists()
        assert read("pause", "mail")["changed"] == 1


@pytest.mark.skipif(connection.vendor != "postgresql", reason="others need USE_TZ = True: E004")
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu"])
def test_listings_show_naive_times(settings: Any, zone: str) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, zone
    tasks.add.enqueue(1)
    job = tasks.fail.enqueue()
    drain()
    a_process("worker@here:1:abc")
    RecurringTask.objects.create(name="nightly", task="tests.tasks.add", cron="0 3 * * *")
    row = Job.objects.get(pk=job.id)

    assert f"{row.run_after:%Y-%m-%d %H:%M:%S}" in queue("jobs")
    assert f"{row.finished_at:%Y-%m-%d %H:%M:%S}" in queue("show", job.id)
    for listing in (["queues"], ["failures"], ["recurring"], ["workers"], ["top", "--once"]):
        assert queue(*listing)


class TestPending:
    def check(self) -> tuple[int, str]:
        out = io.StringIO()
        try:
            call_command("queue", "check", "--pending", stdout=out)
        except SystemExit as error:
            return int(error.code or 0), out.getvalue()
        return 0, out.getvalue()

    def test_fitting_jobs(self) -> None:
        tasks.add.enqueue(1)
        tasks.add.enqueue(1, b=2)
        pipeline(tasks.add, tasks.add).enqueue(1)
        tasks.nothing.using(queue_name="mail", timeout=3).enqueue()
        Job.objects.create(task="tests.tasks.gone", state="successful", finished_at=now_plus(0))

        assert self.check()[0] == 0

    def test_jobs_that_do_not_fit_are_counted_by_reason(self) -> None:
        tasks.add.enqueue_many([(n,) for n in range(3)])
        Job.objects.update(kwargs={"renamed": 1})
        tasks.add.enqueue(1)
        Job.objects.create(task="tests.tasks.gone", queue="default", args=[])
        stages = pipeline(tasks.add, tasks.add).enqueue(1)
        row = Job.objects.get(pk=stages.id)
        row.pipeline[1]["task"] = "tests.tasks.gone"
        Job.objects.filter(pk=stages.id).update(pipeline=row.pipeline)
        other = pipeline(tasks.add, tasks.echo).enqueue(1)
        row = Job.objects.get(pk=other.id)
        row.pipeline[1]["task"] = "tests.tasks.nothing"  # It takes no argument.
        Job.objects.filter(pk=other.id).update(pipeline=row.pipeline)
        for _ in range(2):
            with batch(on_finish=tasks.sum_up) as opened:
                tasks.add.enqueue(1)
            callback = {**opened._batch.on_finish, "task": "tests.tasks.gone"}
            Batch.objects.filter(pk=opened.id).update(on_finish=callback)
        gone = {"task": "tests.tasks.gone", "cron": "0 3 * * *"}
        RecurringTask.objects.create(name="old", **gone)
        RecurringTask.objects.create(name="from older code", is_from_code=True, **gone)

        code, said = self.check()
        out = io.StringIO()
        with pytest.raises(SystemExit):
            call_command("queue", "check", "--pending", "--json", stdout=out)
        found = json.loads(out.getvalue())

        assert code == 1
        assert {(each["task"], each["jobs"]) for each in found} == {
            ("tests.tasks.add", 3),
            ("tests.tasks.add", 1),
            ("tests.tasks.gone", 1),
            ("tests.tasks.gone", None),
        }
        assert [
            each["problem"].partition(": ")[0] for each in found if "later" in each["problem"]
        ] == ["A later stage"] * 2
        assert said.count("It follows a batch: 'tests.tasks.gone' is not known here") == 1
        assert "A later stage: tests.tasks.nothing(): too many positional arguments" in said
        assert "unexpected keyword argument 'renamed'" in said
        assert "A later stage: 'tests.tasks.gone' is not known here" in said
        assert found[-1]["for_example"] == "old"


class TestOutput:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90_061, "1 d 1 h")],
    )
    def test_durations(self, seconds: float, text: str) -> None:
        assert duration(timedelta(seconds=seconds)) == text

    def test_numbers_are_to_the_right_and_lines_are_cut(self) -> None:
        rows = [{"name": "a", "number": 5}, {"name": "long", "number": None}]

        assert as_table(rows).splitlines() == ["name  number", "a          5", "long       -"]
        assert as_table(rows, width=6).splitlines()[0] == "name  "


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.parametrize(
    ("database", "arguments"),
    [
        ("default", ["stats"]),
        ("default", ["show", str(uuid4())]),
        ("other", ["top", "--once", "--backend", "other"]),
        ("other", ["move", "--backend", "default", "--to", "other", "--all"]),
    ],
)
def test_unreachable_database_is_named_with_the_error(
    monkeypatch: pytest.MonkeyPatch, database: str, arguments: list[str]
) -> None:
    tasks.add.enqueue(1)

    def refuse() -> None:
        raise OperationalError("connection refused\n")

    connections[database].close()
    monkeypatch.setattr(connections[database], "connect", refuse)
    with pytest.raises(
        CommandError, match=rf"^The database '{database}' is unreachable: connection refused$"
    ):
        queue(*arguments)


def test_error_of_a_reachable_database_is_not_taken_for_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_backend: object) -> None:
        raise OperationalError("deadlock detected")

    monkeypatch.setattr("django_dbqueue.command_line.listings.stats", fail)
    with pytest.raises(OperationalError, match="deadlock"):
        queue("stats")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("arguments", [["jobs"], ["top", "--every", "0.1"]])
def test_reader_that_has_enough_ends_it_without_a_traceback(arguments: list[str]) -> None:
    tasks.add.enqueue_many([(f"{n} " + "x" * 1000,) for n in range(200)])
    command = [sys.executable, "-m", "django", "queue", *arguments]
    command += ["--limit", "200"] if arguments == ["jobs"] else []
    with subprocess.Popen(
        command,
        env={**os.environ, **address_of_the_test_database()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout and child.stdout.readline()
        child.stdout.close()
        assert child.stderr and not child.stderr.read()
    assert child.returncode == 0
