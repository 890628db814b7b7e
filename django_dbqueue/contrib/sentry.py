"""Errors, traces and monitors of recurring tasks for Sentry."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import sentry_sdk
from django.conf import settings
from django.utils.text import slugify
from sentry_sdk.crons import capture_checkin
from sentry_sdk.integrations.logging import ignore_logger
from sentry_sdk.utils import event_from_exception

from ..compat import signals
from ..context import JobContext
from ..core.serialization import Json
from ..exceptions import Stopped
from ..middleware import Ending, EnqueueCall, TaskMiddleware
from ..models import Job, RecurringTask
from ..models.enums import Outcome, State

# The key in the metadata of a job under which its trace and its monitor are stored.
KEY = "sentry"
ORIGIN = "auto.queue.django_dbqueue"
SECONDS_OF_A_MINUTE, FIELDS_OF_CRON, LONGEST_SLUG = 60, 5, 50
SEPARATORS = re.compile(r"[-\s./:]+")
STATUS = {
    Outcome.SUCCESSFUL: "ok",
    Outcome.SNOOZED: "ok",
    Outcome.FAILED: "internal_error",
    Outcome.TIMED_OUT: "deadline_exceeded",
}


class SentryMiddleware(TaskMiddleware):
    """A transaction for each attempt, an event for each job that fails, and check-ins.

    every_failure: report an event for each failed attempt, those that are retried included.
    monitors: check in for recurring tasks, under slugs made from their names. Sentry creates their
        monitors, with the schedule and the time zone of the task.

    Events and transactions have the name of the task, and the tags ``queue``, ``job_id`` and
    ``attempt``. Spans have the operations ``queue.publish`` and ``queue.process``. Arguments are
    not sent. The project calls ``sentry_sdk.init()`` in its settings, as for its web processes.
    """

    def __init__(self, *, every_failure: bool = False, monitors: bool = True) -> None:
        self._every_failure, self._monitors = every_failure, monitors
        # It logs each failed job as an error, which would be a second event.
        ignore_logger(signals.logger.name)

    @contextmanager
    def enqueue(self, call: EnqueueCall) -> Iterator[None]:
        """Record a span, and store its trace with the jobs, and the monitor of a recurring task."""
        with sentry_sdk.start_span(
            op="queue.publish", name=call.task.module_path, origin=ORIGIN
        ) as span:
            span.set_data("messaging.system", "django_dbqueue")
            span.set_data("messaging.destination.name", call.task.queue_name)
            found = {
                "sentry-trace": sentry_sdk.get_traceparent(),
                "baggage": sentry_sdk.get_baggage(),
                "monitor": _monitor(call) if call.recurring and self._monitors else None,
            }
            call.metadata[KEY] = {name: value for name, value in found.items() if value}
            yield

    @contextmanager
    def run(self, context: JobContext) -> Iterator[None]:
        """Record a transaction around the task and the decision about its result."""
        job, stored = context.job, _stored(context.metadata)
        headers = {name: stored.get(name) for name in ("sentry-trace", "baggage")}
        with sentry_sdk.isolation_scope() as scope:
            scope.clear_breadcrumbs()
            scope.set_tags(_tags(job))
            transaction = sentry_sdk.continue_trace(
                {name: value for name, value in headers.items() if isinstance(value, str)},
                op="queue.task.django_dbqueue",
                name=job.task,
                source="task",
                origin=ORIGIN,
            )
            with (
                sentry_sdk.start_transaction(transaction),
                sentry_sdk.start_span(op="queue.process", name=job.task, origin=ORIGIN) as span,
            ):
                waited = (job.claimed_at - job.run_after).total_seconds()
                span.set_data("messaging.system", "django_dbqueue")
                span.set_data("messaging.destination.name", job.queue)
                span.set_data("messaging.message.id", str(job.pk))
                span.set_data("messaging.message.retry.count", job.attempt - 1)
                span.set_data("messaging.message.receive.latency", max(0.0, waited) * 1000)
                self._check_in(job, "in_progress")
                # An exception of the task is a status of the spans, which ended() sets.
                with suppress(BaseException):
                    yield

    def ended(self, context: JobContext, ending: Ending) -> None:
        """Set the status of the spans; report the error, and the end of a recurring task."""
        status = STATUS.get(ending.outcome, "aborted")
        if span := sentry_sdk.get_current_span():
            span.set_status(status)
            if transaction := span.containing_transaction:
                transaction.set_status(status)
        is_reported = ending.is_last_failure or (ending.is_failure and self._every_failure)
        if is_reported and ending.error:
            _report(ending.error)
        if ending.outcome == Outcome.SUCCESSFUL:
            self._check_in(context.job, "ok")
        elif ending.is_last_failure:
            self._check_in(context.job, "error")
        elif ending.state == State.DISCARDED:
            # The task has found that there is nothing to do, or an operator has stopped it.
            self._check_in(context.job, "error" if isinstance(ending.error, Stopped) else "ok")

    def failed_outside_run(self, job: Job, ending: Ending) -> None:
        """Report a job that failed without ``ended()``, and the end of a recurring task.

        A hook, and not a filter of log records: the supervisor logs the recovery, and it has no
        middleware that could install a filter.
        """
        with sentry_sdk.isolation_scope() as scope:
            scope.clear_breadcrumbs()
            scope.set_tags(_tags(job))
            if ending.error:
                _report(ending.error, job)
            self._check_in(job, "error")

    def _check_in(self, job: Job, status: str) -> None:
        monitor = _stored(job.metadata).get("monitor")
        if self._monitors and isinstance(monitor, dict):
            # All check-ins of a job are about the same run of the monitor.
            capture_checkin(
                monitor_slug=monitor.get("slug"),
                check_in_id=job.pk.hex,
                status=status,
                monitor_config=monitor.get("config"),
            )


def _tags(job: Job) -> dict[str, Any]:
    return {"queue": job.queue, "job_id": str(job.pk), "attempt": job.attempt}


def _report(error: BaseException, job: Job | None = None) -> None:
    """Capture an event. With a job, it gets its transaction from the job, and not from a span."""
    event, hint = event_from_exception(
        error,
        client_options=sentry_sdk.get_client().options,
        mechanism={"type": "django_dbqueue", "handled": False},
    )
    if job:
        event["transaction"], event["transaction_info"] = job.task, {"source": "task"}
        if error.__traceback__ is None:
            # The message has the name of the process: Sentry would make an issue of each.
            event["fingerprint"] = [job.task, type(error).__qualname__]
    sentry_sdk.capture_event(event, hint)


def _stored(metadata: Mapping[str, Json]) -> Mapping[str, Json]:
    found = metadata.get(KEY)
    return found if isinstance(found, Mapping) else {}


def _monitor(call: EnqueueCall) -> dict[str, Json]:
    """Return the monitor of a recurring task, with its schedule if Sentry can have such a one."""
    backend: Any = call.task.get_backend()
    row = RecurringTask.objects.using(backend.database).get(name=call.recurring)
    slug: dict[str, Json] = {"slug": _slug(call.recurring)}
    if row.every:
        minutes = max(1, round(row.every.total_seconds() / SECONDS_OF_A_MINUTE))
        schedule: dict[str, Json] = {"type": "interval", "value": minutes, "unit": "minute"}
    elif len(row.cron.split()) == FIELDS_OF_CRON:
        schedule = {"type": "crontab", "value": row.cron}
    else:
        return slug
    timezone = row.timezone or settings.TIME_ZONE
    return {**slug, "config": {"schedule": schedule, "timezone": timezone}}


def _slug(name: str) -> str:
    """Return Sentry's identifier of a monitor: at most 50 characters, and not digits alone.

    Only names that differ in nothing but case and separators share one.
    """
    text = SEPARATORS.sub("-", name.lower())
    slug = slugify(text)
    if slug == text and len(slug) <= LONGEST_SLUG and not slug.isdecimal():
        return slug
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{slug[: LONGEST_SLUG - 9] or 'task'}-{digest}"
