"""Middleware of tasks: what it sees, what it may change, and what its own errors do."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import transaction

from django_dbqueue import Finish, batch, enqueue_many, pipeline, task
from django_dbqueue.compat import task_backends
from django_dbqueue.context import JobContext
from django_dbqueue.middleware import Ending, EnqueueCall, TaskMiddleware
from django_dbqueue.models import Execution, Job, Process, RecurringTask
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.recurrence import target
from django_dbqueue.runtime import announcer, recovery
from django_dbqueue.testing import drain

from . import tasks
from .conftest import LONG, log_of, with_options

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

tenant: ContextVar[str] = ContextVar("tenant", default="")
log: list[Any] = []


class Noted(TaskMiddleware):
    """Notes each call, and carries a context variable from the caller to the task."""

    name = "noted"

    @contextmanager
    def enqueue(self, call: EnqueueCall) -> Iterator[None]:
        log.append((self.name, "enqueue", call.task.name, call.many, call.in_batch, call.recurring))
        call.metadata["tenant"] = tenant.get()
        yield
        log.append((self.name, "enqueued"))

    @contextmanager
    def run(self, context: JobContext) -> Iterator[None]:
        log.append((self.name, "enter", context.attempt))
        token = tenant.set(str(context.metadata.get("tenant", "")))
        try:
            yield
        except Exception as error:
            log.append((self.name, "raised", type(error).__name__))
            raise
        finally:
            tenant.reset(token)
            log.append((self.name, "exit"))

    def ended(self, context: JobContext, ending: Ending) -> None:
        error = type(ending.error).__name__ if ending.error else None
        log.append((self.name, "ended", ending.outcome.value, ending.state.value, error))

    def failed_outside_run(self, job: Job, ending: Ending) -> None:
        log.append((self.name, "failed", job.attempt, ending.outcome.value, str(ending.error)))


class Outer(Noted):
    name = "outer"


class Suppresses(TaskMiddleware):
    @contextmanager
    def run(self, context: JobContext) -> Iterator[None]:
        try:
            yield
        except ValueError:
            log.append("suppressed")


class Broken(TaskMiddleware):
    """Fails where its class attribute says."""

    where = ""

    def enqueue(self, call: EnqueueCall) -> AbstractContextManager[object]:
        if self.where == "enqueue":
            raise RuntimeError("no tenant")
        return super().enqueue(call)

    @contextmanager
    def run(self, context: JobContext) -> Iterator[None]:
        if self.where == "enter":
            raise RuntimeError("no tenant")
        yield
        if self.where == "exit":
            raise SystemExit("no tenant")

    def ended(self, context: JobContext, ending: Ending) -> None:
        if self.where == "ended":
            raise RuntimeError("no tenant")

    def failed_outside_run(self, job: Job, ending: Ending) -> None:
        if self.where == "failed_outside_run":
            raise SystemExit("no tenant")


noted = Noted()
NOTHING = 1


@pytest.fixture(autouse=True)
def _clean() -> None:
    log.clear()


def middleware(*names: str) -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = with_options(
        middleware=[f"{__name__}.{name}" for name in names]
    )
    return context


@task
def tenant_of() -> str:
    return tenant.get()


@task
async def tenant_of_coroutine() -> str:
    return tenant.get()


@task(atomic=True)
def tenant_of_atomic() -> str:
    return tenant.get()


@task(max_attempts=2, retry_on=(ValueError,), backoff=lambda error, result: 0.0)
def fails() -> None:
    raise ValueError("wrong")


@task(discard_on=(KeyError,))
def is_discarded() -> None:
    raise KeyError("gone")


@task(takes_context=True)
def snoozes(context: JobContext) -> None:
    if context.attempt == 1:
        context.snooze(0)


@task(key=lambda name: name)
def keyed(name: str) -> None:
    pass


def ended() -> list[tuple[str, str, str | None]]:
    return [entry[2:] for entry in log if entry[1] == "ended"]


class TestRun:
    @pytest.mark.parametrize("function", [tenant_of, tenant_of_coroutine, tenant_of_atomic])
    def test_a_value_of_the_caller_reaches_the_task(self, function: Any) -> None:
        with middleware("Noted"):
            tenant.set("north")
            result = function.enqueue()
            tenant.set("")
            drain()

        result.refresh()
        assert result.return_value == "north"
        assert tenant.get() == ""
        assert ended() == [("successful", "successful", None)]

    def test_the_first_is_the_outermost(self) -> None:
        with middleware("Outer", "noted"):
            tasks.nothing.enqueue()
            drain()

        assert [entry[:2] for entry in log] == [
            ("outer", "enqueue"),
            ("noted", "enqueue"),
            ("noted", "enqueued"),
            ("outer", "enqueued"),
            ("outer", "enter"),
            ("noted", "enter"),
            ("noted", "ended"),
            ("noted", "exit"),
            ("outer", "ended"),
            ("outer", "exit"),
        ]

    def test_a_retry_and_the_last_failure_are_told_apart(self) -> None:
        with middleware("Noted"):
            fails.enqueue()
            drain()

        assert ended() == [
            ("failed", "ready", "ValueError"),
            ("failed", "failed", "ValueError"),
        ]
        assert [entry[2] for entry in log if entry[1] == "enter"] == [1, 2]
        assert [entry[2] for entry in log if entry[1] == "raised"] == ["ValueError"] * 2

    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            (is_discarded, [("discarded", "discarded", "KeyError")]),
            (snoozes, [("snoozed", "ready", "Snoozed"), ("successful", "successful", None)]),
        ],
    )
    def test_other_outcomes(self, function: Any, expected: list[Any]) -> None:
        with middleware("Noted"):
            function.enqueue()
            drain()

        assert ended() == expected

    def test_which_failures_are_the_last(self) -> None:
        states = Job.State
        ending = Ending(outcome=Execution.Outcome.FAILED, state=states.SCHEDULED, error=None)
        assert (ending.is_failure, ending.is_last_failure) == (True, False)
        ending = Ending(outcome=Execution.Outcome.TIMED_OUT, state=states.FAILED, error=None)
        assert (ending.is_failure, ending.is_last_failure) == (True, True)
        ending = Ending(outcome=Execution.Outcome.INTERRUPTED, state=states.READY, error=None)
        assert (ending.is_failure, ending.is_last_failure) == (False, False)

    def test_suppressed_exception_fails_the_attempt_all_the_same(self) -> None:
        with middleware("Suppresses"):
            result = fails.using(max_attempts=1).enqueue()
            drain()

        result.refresh()
        assert (result.status, log) == ("FAILED", ["suppressed"])

    def test_stage_of_a_pipeline_and_jobs_from_a_task(self) -> None:
        with middleware("Noted"):
            tenant.set("north")
            pipeline(tasks.add, keeps_tenant).enqueue(1, 2)
            tenant.set("")
            drain()

        assert Job.objects.get(stage=1).result == [3, "north"]


@task
def keeps_tenant(value: int) -> object:
    return Finish([value, tenant.get()])


class TestEnqueue:
    def calls(self) -> list[Any]:
        return [entry[2:] for entry in log if entry[1] == "enqueue"]

    def test_metadata_of_the_call_is_kept(self) -> None:
        with middleware("Noted"):
            tenant.set("north")
            tasks.nothing.using(metadata={"order": 7, "tenant": "old"}).enqueue()

        assert Job.objects.get().metadata == {"order": 7, "tenant": "north"}
        assert self.calls() == [("nothing", False, False, "")]

    def test_many_jobs_of_one_task_are_one_call(self) -> None:
        with middleware("Noted"):
            tenant.set("north")
            tasks.add.enqueue_many([(n,) for n in range(3)])
            keyed.enqueue_many([("a",), ("b",)])

        assert {job.metadata["tenant"] for job in Job.objects.all()} == {"north"}
        assert self.calls() == [("add", True, False, ""), ("keyed", True, False, "")]

    def test_a_bulk_of_several_tasks_enters_once_for_each_task(self) -> None:
        with middleware("Noted"):
            tenant.set("north")
            enqueue_many([tasks.add.prepare(1), tasks.nothing.prepare(), tasks.add.prepare(2)])

        assert [job.metadata for job in Job.objects.all()] == [{"tenant": "north"}] * 3
        assert self.calls() == [("add", True, False, ""), ("nothing", True, False, "")]
        assert [entry[1] for entry in log[-2:]] == ["enqueued"] * 2

    def test_batch_and_its_callback(self) -> None:
        with middleware("Noted"):
            tenant.set("north")
            with batch(on_success=takes_batch):
                tasks.nothing.enqueue()
            tenant.set("")
            drain()

        assert ("nothing", False, True, "") in self.calls()
        assert Job.objects.get(task__endswith="takes_batch").result == "north"

    def test_recurring_task_is_named(self) -> None:
        with middleware("Noted"):
            row = RecurringTask.objects.create(
                name="nightly", task=tasks.nothing.module_path, cron="0 3 * * *"
            )
            target.enqueue(row, timedelta())

        assert self.calls() == [("nothing", False, False, "nightly")]

    def test_jobs_that_wait_for_the_commit_have_metadata(self) -> None:
        with middleware("Noted"):
            with transaction.atomic():
                tenant.set("north")
                tasks.nothing.using(enqueue="on_commit").enqueue()
                assert not Job.objects.exists()
            tenant.set("")

        assert Job.objects.get().metadata == {"tenant": "north"}

    @pytest.mark.parametrize(
        "enqueue",
        [
            lambda: tasks.nothing.enqueue(),
            lambda: tasks.add.enqueue_many([(1,), (2,)]),
            lambda: enqueue_many([tasks.add.prepare(1), tasks.nothing.prepare()]),
        ],
    )
    def test_an_error_enqueues_nothing(
        self, monkeypatch: pytest.MonkeyPatch, enqueue: Callable[[], object]
    ) -> None:
        monkeypatch.setattr(Broken, "where", "enqueue")
        with middleware("Noted", "Broken"), pytest.raises(RuntimeError, match="no tenant"):
            enqueue()

        assert not Job.objects.exists()

    def test_value_that_is_not_json_is_refused(self) -> None:
        with (
            middleware("Noted"),
            pytest.raises(TypeError, match="Unsupported type"),
        ):
            tenant.set(object())  # type: ignore[arg-type]
            try:
                tasks.nothing.enqueue()
            finally:
                tenant.set("")


@task
def takes_batch(pk: str) -> str:
    return tenant.get()


class TestErrors:
    def test_error_on_entering_fails_the_attempt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Broken, "where", "enter")
        with middleware("Noted", "Broken"):
            result = tasks.nothing.enqueue()
            drain()

        result.refresh()
        assert result.status == "FAILED"
        assert "no tenant" in result.errors[0].traceback
        assert ended() == [("failed", "failed", "RuntimeError")]

    @pytest.mark.parametrize("function", [tenant_of, tenant_of_coroutine])
    @pytest.mark.parametrize("where", ["exit", "ended"])
    def test_error_afterwards_is_logged_and_changes_nothing(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        where: str,
        function: Any,
    ) -> None:
        monkeypatch.setattr(Broken, "where", where)
        with middleware("Noted", "Broken"):
            result = function.enqueue()
            drain()

        result.refresh()
        assert result.status == "SUCCESSFUL"
        assert "Broken failed after the task: no tenant" in caplog.text
        assert ended() == [("successful", "successful", None)]

    def test_error_of_the_hook_for_lost_jobs_is_logged_and_others_are_called(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, process: Any
    ) -> None:
        monkeypatch.setattr(Broken, "where", "failed_outside_run")
        result = tasks.nothing.enqueue()
        last = {"attempt": 3, "failures": 2, "started_at": now_plus(-9)}
        Job.objects.update(state="running", process=process, **last)
        with middleware("Noted", "Broken"):
            backend: Any = task_backends["default"]
            dead, how = Process.objects.all(), recovery.ExitReason(how="was killed")
            recovery.recover(backend, dead, how, partial(announcer.announce, backend))

        assert "Broken failed: no tenant" in caplog.text
        why = f"It was lost: its process, {process.name}, was killed."
        assert log[-1] == ("noted", "failed", 3, "lost", why)
        result.refresh()
        assert result.status == "FAILED"

    def test_error_of_the_hook_for_jobs_that_cannot_start_is_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(Broken, "where", "failed_outside_run")
        with middleware("Noted", "Broken"):
            result = tasks.nothing.enqueue()
            Job.objects.update(options={"timeout": "soon"})
            drain()

        result.refresh()
        assert result.status == "FAILED"
        assert "Broken failed after the task: no tenant" in caplog.text
        assert [each[:4] for each in log[2:]] == [("noted", "failed", 1, "failed")]


class Large:
    """A value of a task that fails."""


alive: list[weakref.ref[Large]] = []


@task
def fails_with_a_large_value() -> None:
    value = Large()
    alive[:] = [weakref.ref(value)]
    raise ValueError("wrong")


@pytest.mark.parametrize("names", [[], ["Noted"]])
def test_values_of_a_failed_task_are_freed_at_once(names: list[str]) -> None:
    with middleware(*names):
        fails_with_a_large_value.enqueue()
        gc.disable()
        logging.disable()  # The log that a test captures keeps the exception.
        try:
            drain()
            assert alive[0]() is None
        finally:
            logging.disable(logging.NOTSET)
            gc.enable()


class TestChecks:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("Missing", "cannot be used: ImportError: Module"),
            ("NOTHING", "is 1, and not a subclass of TaskMiddleware"),
            ("tenant_of", "not a subclass of TaskMiddleware"),
        ],
    )
    def test_unusable_middleware_is_an_error(self, name: str, said: str) -> None:
        with middleware(name):
            (found,) = (each for each in run_checks() if each.id == "dbqueue.E011")

        assert name in found.msg
        assert said in found.msg

    @pytest.mark.parametrize("given", [3, [3], ["shop"], "shop.x,3"])
    def test_invalid_path_is_an_error(self, given: object) -> None:
        with with_options(middleware=given):
            (found,) = task_backends["default"].check()

        assert "middleware" in found.msg


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "dbqueue.E011"),
        (["--skip-checks"], "middleware cannot be used; see manage.py check"),
    ],
)
def test_runqueue_does_not_start_with_middleware_that_cannot_be_imported(
    runqueue: Any, arguments: list[str], said: str
) -> None:
    tasks.add.enqueue(1)
    options = json.dumps({"middleware": ["tests.missing.Middleware"]})

    child = runqueue(*arguments, DBQUEUE_OPTIONS=options)

    assert child.wait(LONG) == 1
    assert said in log_of(child)
    assert Job.objects.get().state == "ready"


def test_a_real_worker_enters_it(runqueue: Any) -> None:
    with middleware("Noted"):
        tenant.set("north")
        results = [tenant_of.enqueue(), tenant_of_coroutine.enqueue(), tenant_of_atomic.enqueue()]
        tenant.set("")
    options = json.dumps({"middleware": [f"{__name__}.Noted"], "task_modules": [__name__]})

    assert runqueue("--drain", DBQUEUE_OPTIONS=options).wait(LONG) == 0

    for result in results:
        result.refresh()
    assert [result.return_value for result in results] == ["north"] * 3
