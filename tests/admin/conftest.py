"""Users of the admin, and rows of each model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.core.counts import Counts
from django_dbqueue.core.error_reports import ErrorReport
from django_dbqueue.models import (
    Batch,
    Execution,
    Failure,
    Job,
    Operation,
    Queue,
    RecurringTask,
    Semaphore,
    Statistic,
    TaskState,
)
from django_dbqueue.models.operation import STORED
from django_dbqueue.models.statistic import Period, start_of
from tests.conftest import a_process

VIEW = [
    "view_job",
    "view_failure",
    "view_queue",
    "view_process",
    "view_recurringtask",
    "view_batch",
    "view_semaphore",
    "view_operation",
]
OPERATE = [
    *("stop_operation", "undo_operation"),
    *("retry_job", "discard_job", "stop_job", "move_job", "reprioritise_job", "reschedule_job"),
    *(
        "pause_queue",
        "restrict_queue",
        "triage_failure",
        "enable_recurringtask",
        "run_recurringtask",
        "enqueue_taskstate",
        "control_process",
    ),
]
# Recurring tasks are the only rows that can be added, changed and deleted.
EDIT = ["add_recurringtask", "change_recurringtask", "delete_recurringtask"]


@pytest.fixture(autouse=True)
def one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer no choice between the tests' backends: it would be part of each address."""
    monkeypatch.setattr("django_dbqueue.admin.backend_choice.choices", list)


def a_client(name: str, permissions: list[str], **values: Any) -> Client:
    user = User.objects.create_user(name, **{"is_staff": True, **values})
    user.user_permissions.set(
        Permission.objects.filter(content_type__app_label="dbqueue", codename__in=permissions)
    )
    client = Client(enforce_csrf_checks=False)
    client.force_login(user)
    return client


@pytest.fixture
def superuser(db: Any) -> Client:
    return a_client("root", [], is_superuser=True)


@pytest.fixture
def operator(db: Any) -> Client:
    return a_client("operator", VIEW + OPERATE)


@pytest.fixture
def viewer(db: Any) -> Client:
    return a_client("viewer", VIEW)


def a_job(**values: Any) -> Job:
    now = timezone.now()
    state = values.get("state", Job.State.READY)
    given: dict[str, Any] = {"task": "shop.tasks.send_invoice", "queue": "default", "state": state}
    if state in (Job.State.SUCCESSFUL, Job.State.FAILED, Job.State.DISCARDED):
        given |= {
            "started_at": now,
            "finished_at": now,
            "attempt": 1,
            "failures": int(state == Job.State.FAILED),
        }
    if state == Job.State.RUNNING:
        given |= {"started_at": now, "attempt": 1}
    return Job.objects.create(**{**given, **values})


def a_recurring_task(**values: Any) -> RecurringTask:
    given = {
        "name": "nightly",
        "task": "tests.tasks.nothing",
        "cron": "30 2 * * *",
        "timezone": "Europe/Berlin",
    }
    return RecurringTask.objects.create(**{**given, **values})


def a_batch(*jobs: Job, **values: Any) -> Batch:
    """Create a sealed batch of these jobs."""
    batch = Batch.objects.create(
        **{"description": "Prices of May", "sealed_at": timezone.now(), **values}
    )
    Job.objects.filter(pk__in=[job.pk for job in jobs]).update(batch=batch)
    return batch


def an_operation(job: Job, **values: Any) -> Operation:
    """Create an operation that has retried a job, as which the job still waits."""
    given = {"verb": "retry", "actor": "operator", "total": 1, "done": 1, "changed": 1}
    now = timezone.now()
    job.refresh_from_db()  # MySQL's INSERT returns no defaults.
    operation = Operation.objects.create(**{**given, "finished_at": now, **values})
    before = {name: getattr(job, name) for name in STORED}
    before |= {"state": "discarded", "finished_at": now}
    operation.items.create(job=job.pk, changed=True, **before)
    return operation


def a_failure(message: str = "No such customer", **values: Any) -> Failure:
    report = ErrorReport(
        type="shop.errors.NoCustomer",
        message=message,
        traceback="",
        location="shop/tasks.py:send_invoice",
        pattern=message,
    )
    pk = Failure.objects.identify({report.fingerprint: (report, "")})[report.fingerprint]
    Failure.objects.filter(pk=pk).update(**{"count": 1, **values})
    return Failure.objects.get(pk=pk)


def an_execution(job: Job, failure: Failure | None = None, **values: Any) -> Execution:
    now = timezone.now()
    given: dict[str, Any] = {
        "job": job,
        "attempt": job.attempt,
        "outcome": "successful",
        "process": "worker@here:1:abc",
    }
    given |= {"claimed_at": now, "started_at": now, "finished_at": now, "failure": failure}
    if failure:
        given |= {
            "outcome": "failed",
            "error_type": failure.error_type,
            "message": failure.message,
            "traceback": "Traceback …",
        }
    return Execution.objects.create(**{**given, **values})


def a_statistic(hours_ago: int, queue: str = "q", task: str = "t", **counts: Any) -> None:
    start = start_of(Period.HOUR, timezone.now()) - timedelta(hours=hours_ago)
    row = Statistic(period=Period.HOUR, start=start, queue=queue, task=task)
    row.counts = Counts(**counts)
    row.save()


def act(
    client: Client, action: str, pks: list[Any], query: str = "", page: str = "job", **fields: str
) -> Any:
    address = reverse(f"admin:dbqueue_{page}_changelist") + query
    return client.post(
        address,
        {"action": action, "_selected_action": [str(pk) for pk in pks], "index": "0", **fields},
    )


def press(client: Client, page: str, action: str, pk: Any, **fields: str) -> Any:
    return client.post(reverse(f"admin:dbqueue_{page}_{action}", args=[pk]), fields, follow=True)


def states() -> list[str]:
    return list(Job.objects.order_by("pk").values_list("state", flat=True))


@pytest.fixture
def failed(db: Any) -> Callable[..., Job]:
    """Create a failed job with its execution in a failure group."""

    def failed(failure: Failure | None = None, **values: Any) -> Job:
        job = a_job(state=Job.State.FAILED, **values)
        an_execution(job, failure or a_failure())
        return job

    return failed


@pytest.fixture
def rows_by_page(failed: Callable[..., Job]) -> dict[str, Any]:
    """Create one row for each admin page, keyed by the name of the page."""
    job = failed()
    return {
        "job": job,
        "failure": Failure.objects.get(),
        "queue": Queue.objects.create(name="default"),
        "taskstate": TaskState.objects.create(name=job.task),
        "process": a_process("worker@here:1:abc"),
        "recurringtask": a_recurring_task(is_from_code=True),
        "batch": a_batch(job),
        "semaphore": Semaphore.objects.create(key="charge account=17", max_running=2),
        "operation": an_operation(job),
    }
