"""Traces by OpenTelemetry, through its API alone, by its conventions for messaging.

https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as contexts
from opentelemetry import propagate, trace

from .. import __version__
from ..context import JobContext
from ..core import error_reports
from ..core.serialization import Json
from ..middleware import Ending, EnqueueCall, TaskMiddleware

# The key in the metadata of a job under which its trace context is stored.
KEY = "opentelemetry"
SYSTEM = "django_dbqueue"


class OpenTelemetryMiddleware(TaskMiddleware):
    """A producer span for each call that enqueues jobs, and a consumer span for each attempt.

    An attempt is a part of the trace in which its job was enqueued. If the call may have enqueued
    many jobs, or if the job is a member of a batch, the attempt begins a trace of its own, with a
    link to the call: a trace of a hundred thousand spans is of no use.

    Errors are recorded, retries included. The spans of statements and requests inside tasks are
    those of their own instrumentations.
    """

    def __init__(self, tracer_provider: trace.TracerProvider | None = None) -> None:
        """Set up the tracer of a provider; None takes the process's own."""
        self._tracer = trace.get_tracer(SYSTEM, __version__, tracer_provider)

    @contextmanager
    def enqueue(self, call: EnqueueCall) -> Iterator[None]:
        """Record a producer span, and store its context with the jobs."""
        task = call.task
        with self._tracer.start_as_current_span(
            f"enqueue {task.module_path}",
            kind=trace.SpanKind.PRODUCER,
            attributes=_attributes("enqueue", "send", task.queue_name, task.module_path),
        ):
            carrier: dict[str, Json] = {}
            propagate.inject(carrier)
            if carrier:
                is_linked = call.many or call.in_batch
                call.metadata[KEY] = {**carrier, **({"linked": True} if is_linked else {})}
            yield

    @contextmanager
    def run(self, context: JobContext) -> Iterator[None]:
        """Record a consumer span around the task and the decision about its result."""
        job, stored = context.job, _stored(context.metadata)
        parent = propagate.extract(stored)
        links = []
        if stored.get("linked"):
            links = [trace.Link(trace.get_current_span(parent).get_span_context())]
            parent = trace.set_span_in_context(trace.INVALID_SPAN, parent)
        span = self._tracer.start_span(
            f"process {job.task}",
            context=parent,
            kind=trace.SpanKind.CONSUMER,
            links=links,
            attributes={
                **_attributes("process", "process", job.queue, job.task),
                "messaging.message.id": str(job.pk),
                "django_dbqueue.attempt": job.attempt,
            },
        )
        token = contexts.attach(trace.set_span_in_context(span, parent))
        try:
            yield
        finally:
            contexts.detach(token)
            span.end()

    def ended(self, context: JobContext, ending: Ending) -> None:
        """Record the outcome, and the error if the attempt has failed."""
        span = trace.get_current_span()
        span.set_attribute("django_dbqueue.outcome", ending.outcome.value)
        if ending.is_failure and ending.error:
            # Not by record_exception(), which fails if the exception's str() does.
            error = error_reports.report(ending.error, error_reports.traceback_of(ending.error))
            span.set_status(trace.StatusCode.ERROR, error.message)
            span.set_attribute("error.type", error.type)
            about = {
                "exception.type": error.type.removeprefix("builtins."),
                "exception.message": error.message,
                "exception.stacktrace": error.traceback,
            }
            span.add_event("exception", about)


def _attributes(name: str, kind: str, queue: str, task: str) -> dict[str, str]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": queue,
        "code.function.name": task,
    }


def _stored(metadata: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return the trace context of a job; empty if there is none, or something else."""
    found = metadata.get(KEY)
    return found if isinstance(found, Mapping) else {}
