"""Sentry's own SDK, with a transport that keeps what it would send."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.django import DjangoIntegration
from sentry_sdk.transport import Transport

from django_dbqueue import task
from django_dbqueue.compat import InvalidTask, task_backends
from django_dbqueue.contrib.sentry import KEY, SentryMiddleware
from django_dbqueue.exceptions import Stopped
from django_dbqueue.models import Job, Process, RecurringTask
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.recurrence import target
from django_dbqueue.runtime import announcer, recovery
from django_dbqueue.testing import drain

from . import tasks
from .conftest import LONG, a_process, with_options

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

MIDDLEWARE = "django_dbqueue.contrib.sentry.SentryMiddleware"
every_failure = SentryMiddleware(every_failure=True)


class Kept(Transport):
    def __init__(self) -> None:
        super().__init__()
        self.items: list[tuple[str, dict[str, Any]]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.items += [(item.type, item.payload.json) for item in envelope.items]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [payload for of, payload in self.items if of == kind]


class Written(Transport):
    """Writes what it would send, a line for each, to a file."""

    def capture_envelope(self, envelope: Envelope) -> None:
        # Several threads do this at a time.
        text = "".join(f"{json.dumps((each.type, each.payload.json))}\n" for each in envelope.items)
        with Path(os.environ["WRITE_EVENTS_TO"]).open("a") as file:
            file.write(text)


def init(transport: Transport, **options: Any) -> None:
    sentry_sdk.init(
        dsn="https://key@sentry.invalid/1", transport=transport, traces_sample_rate=1.0, **options
    )


# In the worker that a test has started, which imports this module for its tasks.
if "WRITE_EVENTS_TO" in os.environ:
    init(Written())


@pytest.fixture
def sent() -> Iterator[Kept]:
    kept = Kept()
    # Its patches of Django would remain in this process, for the tests that follow.
    init(kept, disabled_integrations=[DjangoIntegration()])
    with with_options(middleware=[MIDDLEWARE]):
        yield kept
    sentry_sdk.get_client().close()
    # Not init(): a client without an address reads all values in the frames of an error, and so
    # opens connections on the threads that log one.
    sentry_sdk.get_global_scope().set_client(None)


@task(max_attempts=2, backoff=lambda error, result: 0.0, queue_name="mail")
def fails(password: str = "") -> None:
    logging.getLogger("shop").warning("before")
    raise ValueError("wrong")


@task(discard_on=(KeyError,))
def is_discarded() -> None:
    raise KeyError("gone")


@task
def is_stopped() -> None:
    raise Stopped("by an operator")


@task
async def fails_in_a_coroutine() -> None:
    raise ValueError("wrong")


@task
def makes_a_span() -> None:
    with sentry_sdk.start_span(op="http.client", name="GET"):
        pass


@task
def trace_of() -> str:
    return sentry_sdk.get_traceparent() or ""


def test_a_job_that_fails_is_one_event_after_all_its_attempts(sent: Kept) -> None:
    result = fails.enqueue("p4ss")
    drain()

    (event,) = sent.of("event")
    assert event["transaction"] == "tests.test_sentry.fails"
    assert event["tags"] == {"queue": "mail", "job_id": result.id, "attempt": 2}
    (value,) = event["exception"]["values"]
    assert (value["type"], value["value"]) == ("ValueError", "wrong")
    assert value["mechanism"] == {"type": "django_dbqueue", "handled": False}
    assert value["stacktrace"]["frames"][-1]["function"] == "fails"
    assert [crumb["message"] for crumb in event["breadcrumbs"]["values"]].count("before") == 1
    assert event["level"] == "error"


def test_each_failure_is_an_event_where_that_is_wanted(sent: Kept) -> None:
    with with_options(middleware=[f"{__name__}.every_failure"]):
        fails.enqueue()
        drain()

    assert [event["tags"]["attempt"] for event in sent.of("event")] == [1, 2]


@pytest.mark.parametrize(
    ("function", "events", "status"),
    [
        (tasks.nothing, 0, "ok"),
        (is_discarded, 0, "aborted"),
        (fails_in_a_coroutine, 1, "internal_error"),
        (tasks.fail_without_text, 1, "internal_error"),
    ],
)
def test_transaction_and_events_by_outcome(
    sent: Kept, function: Any, events: int, status: str
) -> None:
    function.enqueue()
    drain()

    (transaction,) = sent.of("transaction")
    assert transaction["contexts"]["trace"]["status"] == status
    assert len(sent.of("event")) == events


def test_transactions_are_in_the_trace_of_the_caller(sent: Kept) -> None:
    with sentry_sdk.start_transaction(op="http.server", name="request"):
        result = makes_a_span.using(queue_name="mail").enqueue()
    drain()

    request, attempt = sent.of("transaction")
    (publish,) = (span for span in request["spans"] if span["op"] == "queue.publish")
    assert publish["data"]["messaging.destination.name"] == "mail"
    assert attempt["transaction"] == "tests.test_sentry.makes_a_span"
    assert attempt["transaction_info"] == {"source": "task"}
    trace = attempt["contexts"]["trace"]
    assert trace["trace_id"] == request["contexts"]["trace"]["trace_id"]
    assert trace["parent_span_id"] == publish["span_id"]
    process, inside = attempt["spans"]
    assert (process["op"], inside["op"]) == ("queue.process", "http.client")
    assert inside["parent_span_id"] == process["span_id"]
    assert process["data"]["messaging.message.id"] == result.id
    assert process["data"]["messaging.message.retry.count"] == 0
    assert 0 <= process["data"]["messaging.message.receive.latency"] < 60_000


def test_arguments_are_not_sent(sent: Kept) -> None:
    fails.enqueue("p4ss-unseen")
    drain()

    (event,) = sent.of("event")
    for value in event["exception"]["values"]:
        for frame in value["stacktrace"]["frames"]:
            frame.pop("vars", None)
    assert "p4ss-unseen" not in json.dumps(event)


@pytest.mark.parametrize(
    ("values", "config"),
    [
        (
            {"cron": "0 3 * * *", "timezone": "Europe/Berlin"},
            {
                "schedule": {"type": "crontab", "value": "0 3 * * *"},
                "timezone": "Europe/Berlin",
            },
        ),
        (
            {"every": timedelta(minutes=5)},
            {
                "schedule": {"type": "interval", "value": 5, "unit": "minute"},
                "timezone": "Asia/Kathmandu",
            },
        ),
    ],
)
@pytest.mark.parametrize(
    ("function", "status"),
    [(tasks.nothing, "ok"), (fails, "error"), (is_discarded, "ok"), (is_stopped, "error")],
)
def test_recurring_tasks_check_in(
    sent: Kept, function: Any, status: str, values: dict[str, Any], config: dict[str, Any]
) -> None:
    row = RecurringTask.objects.create(name="Nightly run", task=function.module_path, **values)
    target.enqueue(row, timedelta())
    drain()

    began, *again, ended = sent.of("check_in")
    assert (began["monitor_slug"], began["status"]) == ("nightly-run", "in_progress")
    assert began["monitor_config"] == config
    assert ended["status"] == status
    assert {each["check_in_id"] for each in (began, *again, ended)} == {Job.objects.get().pk.hex}


LONG_NAME = "backoffice.subscriptions.renewals.tasks.send_renewal_"


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("clean_up", "clean_up"),
        ("shop.tasks.Clean up", "shop-tasks-clean-up"),
        (f"{LONG_NAME}invoices", "backoffice-subscriptions-renewals-tasks-s-6ab1ab84"),
        (f"{LONG_NAME}reminders", "backoffice-subscriptions-renewals-tasks-s-44243820"),
        ("夜間", "task-341feabb"),
        ("朝", "task-419c7453"),
        ("a+b", "ab-300273da"),
        ("ab", "ab"),
        ("2026", "2026-158a323a"),
    ],
)
def test_monitor_of_each_name_has_a_slug_of_its_own(sent: Kept, name: str, slug: str) -> None:
    row = RecurringTask.objects.create(name=name, task=tasks.nothing.module_path, cron="0 3 * * *")
    target.enqueue(row, timedelta())
    drain()

    assert {each["monitor_slug"] for each in sent.of("check_in")} == {slug}


def lose(**values: Any) -> None:
    """Lose the job that is there: its process is killed during its first or a later attempt."""
    process = a_process("worker@web1:1:abc")
    Job.objects.update(
        **{
            "state": "running",
            "process": process,
            "attempt": 1,
            "started_at": now_plus(-60),
            **values,
        }
    )
    backend: Any = task_backends["default"]
    recovery.recover(
        backend,
        Process.objects.filter(pk=process.pk),
        recovery.ExitReason(how="was killed by signal 9"),
        partial(announcer.announce, backend),
    )


@pytest.mark.parametrize(
    ("values", "kind", "why"),
    [
        ({"on_lost": "fail", "has_begun": True}, "ProcessLost", "It was lost: "),
        ({"attempt": 3, "failures": 2}, "ProcessLost", "It was lost: "),
        ({"timeout": timedelta(seconds=1), "max_attempts": 1}, "TimedOut", "It ran longer than "),
    ],
)
def test_a_job_that_fails_by_the_death_of_its_process_is_one_event(
    sent: Kept, values: dict[str, Any], kind: str, why: str
) -> None:
    result = fails.enqueue()

    # The trace of the process that recovers the job is not that of the job.
    with sentry_sdk.start_transaction(op="http.server", name="request"):
        lose(**values)

    (event,) = sent.of("event")
    assert event["transaction"] == "tests.test_sentry.fails"
    assert event["tags"] == {
        "queue": "mail",
        "job_id": result.id,
        "attempt": values.get("attempt", 1),
    }
    assert event["level"] == "error"
    assert event["fingerprint"] == ["tests.test_sentry.fails", kind]
    (value,) = event["exception"]["values"]
    assert value["type"] == kind
    assert value["value"].startswith(why)
    assert value["value"].endswith("its process, worker@web1:1:abc, was killed by signal 9.")
    assert [each["transaction"] for each in sent.of("transaction")] == ["request"]


@pytest.mark.parametrize("values", [{"attempt": 1}, {"stop_requested_at": now_plus(0)}])
def test_a_lost_job_that_has_not_failed_for_good_is_no_event(
    sent: Kept, values: dict[str, Any]
) -> None:
    fails.enqueue()
    lose(**values)

    assert sent.of("event") == []


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"task": "tests.test_sentry.is_gone"}, "InvalidTaskPath"),
        ({"options": {"timeout": "soon"}}, InvalidTask.__name__),
    ],
)
def test_a_job_that_cannot_start_is_one_event(
    sent: Kept, values: dict[str, Any], kind: str
) -> None:
    result = fails.enqueue()
    Job.objects.update(**values)
    with with_options(middleware=[MIDDLEWARE], unknown_task_after=0.001):
        drain()
        Job.objects.filter(state="scheduled").update(state="ready")
        drain()

    result.refresh()
    (event,) = sent.of("event")
    assert result.status == "FAILED"
    assert event["transaction"] == values.get("task", "tests.test_sentry.fails")
    assert event["tags"] == {"queue": "mail", "job_id": result.id, "attempt": result.attempts}
    assert event["level"] == "error"
    assert event["exception"]["values"][-1]["type"] == kind


def test_a_recurring_task_that_is_lost_checks_in_as_failed(sent: Kept) -> None:
    row = RecurringTask.objects.create(
        name="Nightly run", task=tasks.nothing.module_path, every=timedelta(minutes=5)
    )
    target.enqueue(row, timedelta())
    lose(on_lost="fail", has_begun=True)

    (ended,) = sent.of("check_in")
    assert (ended["monitor_slug"], ended["status"]) == ("nightly-run", "error")
    assert ended["check_in_id"] == Job.objects.get().pk.hex


@pytest.mark.parametrize("stored", ["x", None, {"sentry-trace": 3, "monitor": "m"}, {"baggage": 1}])
def test_unreadable_metadata_is_ignored(sent: Kept, stored: object) -> None:
    tasks.nothing.enqueue()
    Job.objects.update(metadata={KEY: stored})
    drain()

    assert Job.objects.get().state == "successful"
    assert len(sent.of("transaction")) == 1


def test_scopes_of_jobs_do_not_mix(sent: Kept) -> None:
    tags.enqueue()
    fails.using(max_attempts=1).enqueue()
    drain()

    (event,) = sent.of("event")
    assert "customer" not in event["tags"]


@task(priority=1)
def tags() -> None:
    sentry_sdk.set_tag("customer", "7")


def test_without_init_jobs_run_as_ever() -> None:
    with with_options(middleware=[MIDDLEWARE]):
        result = fails.enqueue()
        drain()

    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 2)


def test_a_real_worker_continues_the_trace_and_reports_once(
    sent: Kept, runqueue: Any, tmp_path: Path
) -> None:
    with sentry_sdk.start_transaction(op="http.server", name="request"):
        ran, failed = trace_of.enqueue(), fails.enqueue()
    options = json.dumps({"middleware": [MIDDLEWARE], "task_modules": [__name__]})
    events = tmp_path / "events"

    child = runqueue("--drain", DBQUEUE_OPTIONS=options, WRITE_EVENTS_TO=str(events))

    assert child.wait(LONG) == 1, "A job has failed."
    ran.refresh()
    (request,) = sent.of("transaction")
    assert ran.return_value.split("-")[0] == request["contexts"]["trace"]["trace_id"]
    written = [json.loads(line) for line in events.read_text().splitlines()]
    (event,) = (payload for kind, payload in written if kind == "event")
    assert event["tags"] == {"queue": "mail", "job_id": failed.id, "attempt": 2}
    assert [kind for kind, _payload in written].count("transaction") == 3
