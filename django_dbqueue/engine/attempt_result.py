"""Attempt results, from the return of the task until they are written.

Not model instances: very many of them are created.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from ..core.error_reports import ErrorReport
from ..core.progress_value import ProgressValue
from ..core.serialization import Json
from ..models import ClaimedJob, Job
from ..models.enums import FAILURES, FINISHED, Fence, Outcome, State


@dataclass(kw_only=True, slots=True)
class AttemptResult:
    """How an attempt ended, and the next state of its job.

    wait: the delay before the next state in seconds, or the time when it begins.
    process, release: the name of the process that made the attempt, and its release.
    erase: keep nothing of the job.
    recorded: whether the attempt is written to the history. Repeated attempts that ended before
        they began are not.
    starts_over: the job has all its attempts again.
    then: the job at the next stage of its pipeline.
    children: the new jobs that the job has become.
    """

    job: ClaimedJob
    fence: Fence
    outcome: Outcome
    state: State
    process: str
    started_at: datetime
    finished_at: datetime
    wait: float | datetime = 0.0
    result: Json = None
    error: ErrorReport | None = None
    erase: bool = False
    recorded: bool = True
    starts_over: bool = False
    then: Job | None = None
    children: Sequence[Job] = ()
    progress: ProgressValue | None = None
    log: str = ""
    release: str = ""

    @classmethod
    def of(
        cls,
        job: ClaimedJob,
        outcome: Outcome,
        state: State,
        *,
        started_at: datetime | None = None,
        finished_at: datetime | None = None,
        **rest: Any,
    ) -> AttemptResult:
        """Return the result of a claimed job's current attempt. It ends now by default."""
        process = job.process  # Once: Django's descriptor takes 0.5 µs.
        return cls(
            job=job,
            fence=job.fence,
            outcome=outcome,
            state=state,
            process=process.name if process else "",
            release=process.release if process else "",
            started_at=started_at or job.claimed_at,
            finished_at=finished_at or job.now(),
            **rest,
        )

    @property
    def new(self) -> list[Job]:
        """The jobs that run after this attempt: the job at its next stage, or its child jobs."""
        return [self.then, *self.children] if self.then else list(self.children)

    @property
    def continues(self) -> bool:
        """True if anything runs after this attempt: a retry, the next stage or child jobs."""
        return self.state not in FINISHED or bool(self.new)

    def stopped(self) -> AttemptResult:
        """Return the same result for a job that an operator has stopped: nothing runs after it."""
        return replace(self, state=State.DISCARDED, then=None, children=(), wait=0.0, erase=False)

    def retried(self) -> AttemptResult:
        """Return the same result for a job that an operator has stopped to run it again."""
        return replace(self.stopped(), state=State.READY, starts_over=True)

    @property
    def is_failure(self) -> bool:
        """True if the attempt counts as failed, and belongs to a group of failures."""
        return self.outcome in FAILURES


class Settled(NamedTuple):
    """Results of a settlement.

    written: attempt results that were written.
    locked_elsewhere: results whose job is locked by another transaction.
    lost: results whose job was lost meanwhile.
    unblocked: the queues of jobs that are ready now: they waited for a slot, or were enqueued again
        while they ran.
    twice: lost results whose attempt is made again under the same number.
    """

    written: list[AttemptResult]
    locked_elsewhere: list[AttemptResult]
    lost: list[AttemptResult]
    unblocked: list[str]
    twice: list[AttemptResult]
