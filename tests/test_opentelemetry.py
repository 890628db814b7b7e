"""Traces, with OpenTelemetry's own SDK and its exporter in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from django_dbqueue import batch, enqueue_many, pipeline, task
from django_dbqueue.contrib.opentelemetry import KEY, OpenTelemetryMiddleware
from django_dbqueue.models import Job
from django_dbqueue.testing import drain

from . import tasks
from .conftest import LONG, with_options

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
middleware = OpenTelemetryMiddleware(tracer_provider=provider)
tracer = provider.get_tracer("tests")
OPTIONS = {"middleware": [f"{__name__}.middleware"]}


@pytest.fixture(autouse=True)
def _with_middleware() -> Iterator[None]:
    exporter.clear()
    with with_options(**OPTIONS):
        yield


@task(max_attempts=2, backoff=lambda error, result: 0.0)
def fails() -> None:
    raise ValueError("wrong")


@task
def has_a_span() -> None:
    with tracer.start_as_current_span("inside"):
        pass


@task
async def has_a_span_in_a_coroutine() -> None:
    with tracer.start_as_current_span("inside"):
        pass


@task
def trace_of() -> str:
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")


@task(takes_context=True)
def is_interrupted(context: Any) -> None:
    if context.attempt == 1:
        context.snooze(0)


def spans(name: str = "") -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name.startswith(name)]


def one(name: str) -> ReadableSpan:
    (span,) = spans(name)
    return span


def test_job_continues_the_trace_of_its_caller() -> None:
    with tracer.start_as_current_span("request") as request:
        result = tasks.nothing.using(queue_name="mail").enqueue()
    drain()

    producer, consumer = one("enqueue"), one("process")
    assert producer.parent.span_id == request.get_span_context().span_id
    assert consumer.parent.span_id == producer.context.span_id
    assert consumer.context.trace_id == request.get_span_context().trace_id
    assert (producer.kind, consumer.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(producer.attributes) == {
        "messaging.system": "django_dbqueue",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
        "messaging.destination.name": "mail",
        "code.function.name": "tests.tasks.nothing",
    }
    assert dict(consumer.attributes) == {
        "messaging.system": "django_dbqueue",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mail",
        "code.function.name": "tests.tasks.nothing",
        "messaging.message.id": result.id,
        "django_dbqueue.attempt": 1,
        "django_dbqueue.outcome": "successful",
    }
    assert consumer.name == "process tests.tasks.nothing"
    assert consumer.status.status_code == StatusCode.UNSET


@pytest.mark.parametrize("function", [has_a_span, has_a_span_in_a_coroutine])
def test_spans_of_the_task_are_inside(function: Any) -> None:
    function.enqueue()
    drain()

    assert one("inside").parent.span_id == one("process").context.span_id
    assert not trace.get_current_span().get_span_context().is_valid


def test_each_failed_attempt_has_its_error() -> None:
    fails.enqueue()
    drain()

    first, second = spans("process")
    assert first.context.trace_id == second.context.trace_id
    assert [span.attributes["django_dbqueue.attempt"] for span in (first, second)] == [1, 2]
    for span in (first, second):
        assert span.status.status_code == StatusCode.ERROR
        assert span.status.description == "wrong"
        assert span.attributes["error.type"] == "builtins.ValueError"
        (event,) = span.events
        assert event.attributes["exception.type"] == "ValueError"
        assert event.attributes["exception.message"] == "wrong"
        assert "raise ValueError" in event.attributes["exception.stacktrace"]


def test_error_whose_text_cannot_be_made_is_recorded() -> None:
    tasks.fail_without_text.enqueue()
    drain()

    (span,) = spans("process")
    assert span.status.status_code == StatusCode.ERROR
    assert span.attributes["error.type"] == "tests.timely.NoText"
    (event,) = span.events
    assert event.name == "exception"
    assert event.attributes["exception.message"] == "<str() of it raised RuntimeError>"
    assert "raise timely.NoText" in event.attributes["exception.stacktrace"]


def test_a_snoozed_attempt_is_no_error() -> None:
    is_interrupted.enqueue()
    drain()

    first, second = spans("process")
    assert first.attributes["django_dbqueue.outcome"] == "snoozed"
    assert [span.status.status_code for span in (first, second)] == [StatusCode.UNSET] * 2
    assert not first.events


@pytest.mark.parametrize("how", ["many", "bulk", "batch"])
def test_jobs_of_one_call_begin_traces_and_have_links(how: str) -> None:
    with tracer.start_as_current_span("request"):
        if how == "many":
            tasks.add.enqueue_many([(1,), (2,)])
        elif how == "bulk":
            enqueue_many([tasks.add.prepare(1), tasks.add.prepare(2)])
        else:
            with batch():
                tasks.add.enqueue(1)
                tasks.add.enqueue(2)
    drain()

    producers, consumers = spans("enqueue"), spans("process")
    assert len(consumers) == 2
    assert all(consumer.parent is None for consumer in consumers)
    assert len({span.context.trace_id for span in consumers} | {producers[0].context.trace_id}) == 3
    linked = {link.context.span_id for span in consumers for link in span.links}
    assert linked == {span.context.span_id for span in producers}


def test_stages_of_a_pipeline_are_in_one_trace() -> None:
    pipeline(tasks.add, tasks.add).enqueue(1, 2)
    drain()

    assert len({span.context.trace_id for span in spans()}) == 1
    assert len(spans("process")) == 2


def test_job_that_a_task_enqueues_is_in_its_trace() -> None:
    enqueues.enqueue()
    drain()

    outer, inner = one("process tests.test_opentelemetry.enqueues"), one("process tests.tasks.add")
    assert outer.context.trace_id == inner.context.trace_id


@task
def enqueues() -> None:
    tasks.add.enqueue(1)


@pytest.mark.parametrize("stored", ["nonsense", 3, None, {"traceparent": "x"}, {"linked": True}])
def test_unreadable_trace_context_begins_a_new_trace(stored: object) -> None:
    tasks.nothing.enqueue()
    Job.objects.update(metadata={KEY: stored})
    drain()

    assert one("process").parent is None
    assert Job.objects.get().state == "successful"


def test_without_an_sdk_jobs_run_as_ever() -> None:
    with with_options(middleware=["django_dbqueue.contrib.opentelemetry.OpenTelemetryMiddleware"]):
        result = tasks.add.enqueue(1)
        drain()

    result.refresh()
    assert result.return_value == 1
    assert Job.objects.get().metadata == {}


def test_a_real_worker_continues_the_trace(runqueue: Any) -> None:
    with tracer.start_as_current_span("request") as request:
        result = trace_of.enqueue()
    options = json.dumps({**OPTIONS, "task_modules": [__name__]})

    assert runqueue("--drain", DBQUEUE_OPTIONS=options).wait(LONG) == 0

    result.refresh()
    expected = trace.format_trace_id(request.get_span_context().trace_id)
    assert result.return_value.split("-")[1] == expected
