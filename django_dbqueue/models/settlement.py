"""The end of an attempt, from the moment that its task returns until it is written. No rows: very many of them are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from ..core.error_reports import ErrorReport
from ..core.progress_value import ProgressValue
from .job import Job
from .states import FAILURES, FINISHED, Fence, Outcome, State


@dataclass(kw_only=True, slots=True)
class AttemptResult:
    """How an attempt ended, and what becomes of its job: the next state, and after which wait in seconds, or at which time.

    process: the name of the one that made the attempt.
    erase: nothing of the job is kept.
    recorded: whether the attempt is written to the history. One that ended before it began, again and again, is not.
    then: how the job is at the next stage of its pipeline. children: the new jobs that it has become.
    """

    job: Job
    fence: Fence
    outcome: Outcome
    state: State
    process: str
    started_at: datetime
    finished_at: datetime
    wait: float | datetime = 0.0
    result: Any = None
    error: ErrorReport | None = None
    erase: bool = False
    recorded: bool = True
    then: Job | None = None
    children: Sequence[Job] = ()
    noted: ProgressValue | None = None
    log: str = ""

    @classmethod
    def of(
        cls,
        job: Job,
        outcome: Outcome,
        state: State,
        *,
        started_at: datetime | None = None,
        finished_at: datetime | None = None,
        **rest: Any,
    ) -> AttemptResult:
        """The end, by default now, of the attempt that a claimed job is in."""
        return cls(
            job=job,
            fence=job.fence,
            outcome=outcome,
            state=state,
            process=job.process.name if job.process else "",
            started_at=started_at or job.claimed_at,
            finished_at=finished_at or job.now(),
            **rest,
        )

    @property
    def new(self) -> list[Job]:
        """What is to run after it: the job at its next stage, or the new jobs that it has become."""
        return [self.then, *self.children] if self.then else list(self.children)

    @property
    def continues(self) -> bool:
        """Whether anything runs after this attempt: a retry, the next stage or child jobs."""
        return self.state not in FINISHED or bool(self.new)

    def stopped(self) -> AttemptResult:
        """The same end of the attempt, for a job that an operator has stopped: nothing runs after it."""
        return replace(self, state=State.DISCARDED, then=None, children=(), wait=0.0, erase=False)

    @property
    def is_failure(self) -> bool:
        """Whether it counts as a failed attempt, and belongs to a group of failures."""
        return self.outcome in FAILURES


class Settled(NamedTuple):
    """The outcomes that were written, those whose job somebody else held, and those whose job was lost meanwhile.

    unblocked: the queues of jobs that had waited for a slot, or were asked for again while they ran, and are ready.
    twice: of the lost ones, those whose attempt is made once more under the same number.
    """

    written: list[AttemptResult]
    held: list[AttemptResult]
    lost: list[AttemptResult]
    unblocked: list[str]
    twice: list[AttemptResult]
