"""``queue run`` runs a job's task here, and leaves the job as it is."""

from __future__ import annotations

import io
import json
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command

from django_dbqueue.exceptions import Snoozed
from django_dbqueue.models import Execution, Job, Process
from django_dbqueue.models.expressions import now_plus

from .. import tasks, test_middleware, timely
from ..conftest import with_options
from ..models import Run

pytestmark = pytest.mark.django_db(databases=["default", "other"])


def run(pk: Any, *arguments: str) -> str:
    out = io.StringIO()
    call_command("queue", "run", str(pk), *arguments, stdout=out, stderr=out)
    return out.getvalue()


def test_task_runs_here_and_the_job_is_unchanged() -> None:
    pk = tasks.add.enqueue(2, b=3).id

    said = run(pk)

    assert "tests.tasks.add returned 5." in said and "is unchanged: READY" in said
    assert Job.objects.get().state == "ready" and not Execution.objects.exists()


def test_what_it_returned_as_json() -> None:
    pk = tasks.add.enqueue(2, b=3).id

    said = json.loads(run(pk, "--json"))

    assert said == {"id": pk, "task": "tests.tasks.add", "state": "ready", "returned": 5}


def test_job_of_another_database_is_found() -> None:
    pk = tasks.add.using(backend="other").enqueue(2, b=3).id

    assert "returned 5" in run(pk)
    assert "returned 5" in run(pk, "--backend", "other")
    with pytest.raises(CommandError, match="The backend 'default' has no job"):
        run(pk, "--backend", "default")


def test_middleware_sees_the_error_and_the_first_attempt() -> None:
    pk = tasks.fail.enqueue("no such order").id
    test_middleware.log.clear()

    with with_options(middleware=["tests.test_middleware.Noted"]), pytest.raises(ValueError):
        run(pk)

    assert test_middleware.log == [
        ("noted", "enter", 1),
        ("noted", "raised", "ValueError"),
        ("noted", "exit"),
    ]


def test_error_is_raised_without_a_debugger() -> None:
    with pytest.raises(ValueError, match="no such order"):
        run(tasks.fail.enqueue("no such order").id)


def test_debugger_starts_where_the_task_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = []

    def post_mortem(trace: Any) -> None:
        while trace.tb_next:
            trace = trace.tb_next
        frames.append(trace.tb_frame.f_code.co_name)

    monkeypatch.setattr("pdb.post_mortem", post_mortem)

    said = run(tasks.fail.enqueue("no such order").id, "--pdb")

    assert frames == ["fail"]
    assert "no such order" in said and "is unchanged: READY" in said


def test_task_with_a_context_has_it() -> None:
    with pytest.raises(Snoozed):
        run(timely.snooze.enqueue(how=60, times=0).id, "--backend", "default")
        run(timely.snooze.enqueue(how=60).id)
    assert {job.state for job in Job.objects.all()} == {"ready"}


def test_unknown_ids_and_tasks_are_named() -> None:
    pk = uuid4()
    with pytest.raises(CommandError, match=f"has no job {pk}"):
        run(pk)
    with pytest.raises(CommandError, match="invalid UUID"):
        run("nonsense")
    with pytest.raises(CommandError, match="TASKS has no DatabaseBackend nowhere"):
        run(pk, "--backend", "nowhere")
    gone = tasks.add.enqueue(1)
    Job.objects.update(task="tests.tasks.gone")
    with pytest.raises(CommandError, match=r"tests\.tasks\.gone"):
        run(gone.id)


def test_atomic_task_that_fails_leaves_nothing() -> None:
    run(tasks.atomic_row.enqueue("kept").id)
    with pytest.raises(ValueError):
        run(tasks.atomic_row.enqueue("undone", fail=True).id)

    assert list(Run.objects.values_list("job", flat=True)) == ["kept"]


def test_coroutine_runs() -> None:
    with pytest.raises(Snoozed):
        run(timely.snooze_async.enqueue(how=60).id)


def test_metadata_of_a_job_that_runs_elsewhere_stays() -> None:
    pk = tasks.count_to.enqueue(3).id
    process = Process.objects.create(
        name="elsewhere", kind="worker", pid=1, expires_at=now_plus(600)
    )
    Job.objects.update(state="running", process=process, attempt=1, metadata={"done": 1})

    said = run(pk)

    job = Job.objects.get()
    assert "is unchanged: RUNNING" in said
    assert (job.metadata, job.process, job.attempt) == ({"done": 1}, process, 1)
