"""A job's history, newest attempt first."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ..models import Execution, Job, Stack
from . import looks

SHOWN = 50


@dataclass(frozen=True)
class Attempt:
    """One attempt as the job's page shows it. ``since`` is when the job began to wait for it."""

    execution: Execution
    since: datetime
    is_open: bool

    @property
    def badge(self) -> str:
        return looks.state(self.execution.get_outcome_display(), self.execution.outcome)

    @property
    def waited(self) -> str:
        return looks.duration(max(self.execution.started_at - self.since, self.since - self.since))

    @property
    def ran(self) -> str:
        return looks.duration(self.execution.finished_at - self.execution.started_at)

    @property
    def ended(self) -> str:
        return looks.moment(self.execution.finished_at)


def stack_of(job: Job) -> Stack | None:
    """Where it was when its worker last looked, if it hangs."""
    if job.state != Job.State.RUNNING:
        return None
    return Stack.objects.filter(job=job, attempt=job.attempt).first()


def attempts_of(job: Job) -> list[Attempt]:
    """The newest of them; the newest that has an error is open."""
    executions = list(job.executions.order_by("-attempt")[: SHOWN + 1])
    ends = [each.finished_at for each in executions] + [job.enqueued_at]
    newest_error = next((each for each in executions if each.error_type), None)
    shown = zip(executions[:SHOWN], ends[1:], strict=False)
    return [Attempt(each, since, each is newest_error) for each, since in shown]
