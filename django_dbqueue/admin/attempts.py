"""Attempts of a job, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils.translation import gettext as _

from ..models import Execution, Job, StackTrace
from ..models.enums import WAITING
from . import columns, formatting
from .charts import Span, timeline

MOST_ATTEMPTS = 50


@dataclass(frozen=True)
class Attempt:
    """An attempt as shown on the job's page.

    since: start of the wait for this attempt.
    is_open: the traceback is unfolded.
    is_earlier: the attempt is of another run, before the job was re-enqueued by its key.
    stage: position in the pipeline, as text.
    """

    execution: Execution
    since: datetime
    is_open: bool
    is_earlier: bool = False
    stage: str = ""

    @property
    def badge(self) -> str:
        return formatting.state(self.execution.get_outcome_display(), self.execution.outcome)

    @property
    def all_alike(self) -> str:
        """A link to the failure."""
        pk = self.execution.failure_id
        return formatting.link("failure", pk, _("All attempts with this failure")) if pk else ""

    @property
    def traceback(self) -> str:
        text = self.execution.traceback
        return formatting.copyable_text(_("Traceback"), text) if text else ""

    @property
    def log(self) -> str:
        return formatting.copyable_text(_("Log"), self.execution.log) if self.execution.log else ""

    @property
    def waited(self) -> str:
        return formatting.duration(max(self.execution.started_at - self.since, timedelta()))

    @property
    def ran(self) -> str:
        return formatting.duration(self.execution.finished_at - self.execution.started_at)

    @property
    def ended(self) -> str:
        return formatting.timestamp(self.execution.finished_at)


def stack_of(job: Job) -> StackTrace | None:
    """Return the stack trace that the worker recorded last, if the job hangs."""
    if job.state != Job.State.RUNNING:
        return None
    return StackTrace.objects.filter(job=job, attempt=job.attempt).first()


def attempts_of(job: Job) -> list[Attempt]:
    """Return the newest attempts. The newest one with an error is open."""
    found = Execution.objects.filter(job=job).order_by("-attempt")
    executions = list(found[: MOST_ATTEMPTS + 1])
    ends = [each.finished_at for each in executions] + [job.enqueued_at]
    newest_error = next((each for each in executions if each.error_type), None)
    shown = zip(executions[:MOST_ATTEMPTS], ends[1:], strict=False)
    return [
        Attempt(
            each,
            since,
            each is newest_error,
            each.attempt <= job.attempts_before,
            _stage(job, each),
        )
        for each, since in shown
    ]


def _stage(job: Job, execution: Execution) -> str:
    """Return the stage of an attempt as text.

    The name is included only for the current run: an earlier run may have had other stages.
    """
    if execution.stage is None:
        return ""
    place, stages = execution.stage, job.stages
    if execution.attempt <= job.attempts_before or place >= len(stages):
        return _("stage %d") % (place + 1)
    name = stages[place]["task"].rpartition(".")[2]
    return _("stage %(place)d of %(stages)d, %(name)s") % {
        "place": place + 1,
        "stages": len(stages),
        "name": name,
    }


def timeline_of(job: Job, attempts: Sequence[Attempt]) -> str:
    """Return a picture of the waits and attempts, from the first that is shown until now."""
    spans: list[Span] = []
    for each in reversed(attempts):
        execution = each.execution
        tone = formatting.tone(execution.outcome)
        spans.append(Span(each.since, execution.started_at, "waits", _("waited %s") % each.waited))
        spans.append(
            Span(execution.started_at, execution.finished_at, tone, _("ran %s") % each.ran)
        )
    since = spans[-1].end if spans else job.enqueued_at
    now = columns.seen_at(job)
    if job.state == Job.State.RUNNING and job.started_at:
        spans.append(Span(since, job.started_at, "waits", _("waited")))
        spans.append(Span(job.started_at, now, "runs", _("running")))
    elif job.state in WAITING:
        spans.append(Span(since, now, "waits", _("waits")))
    return timeline(spans)
