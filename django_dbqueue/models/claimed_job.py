from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from uuid import UUID

from ..core.progress_value import ProgressValue
from .enums import Fence, State
from .job import Job
from .process import Process


class ClaimedJob(Job):
    """A job that this process has claimed and not yet settled: its row, and what its worker knows.

    claimed_at, clock: the database's time and this process's clock at the claim.
    db_now: the database's time, as the claim has read it.
    slot_group: all jobs of one group run one after the other, and share the slots of their limits.
    rated_until: the time of the next start by each of its rates, as its own start has left it.
    waits_since: this process's clock when the job began to wait for a thread. Its claim may have
        taken longer than a job may wait.
    size: bytes of the arguments as JSON, as far as they were counted: small arguments are not.
    not_to_run: the reason why the job is not to run, or "".
    refused: the error with which the job ends as it starts, if its limits cannot be computed.
    progress_value: the progress that the task has reported, until it is written.
    """

    claimed_at: datetime
    clock: float
    db_now: datetime
    slot_group: UUID | None = None
    rated_until: Mapping[str, datetime] = MappingProxyType({})
    waits_since = 0.0
    size = 0
    not_to_run = ""
    refused: Exception | None = None
    progress_value: ProgressValue | None = None

    class Meta:
        proxy = True
        default_permissions = ()

    def belong_to(self, process: Process, now: datetime, clock: float) -> None:
        """Mark the job as claimed for the process, at a time of the database and of the clock."""
        # Past the field descriptors, as in from_db().
        self.__dict__.update(
            state=State.RUNNING,
            process_id=process.id,
            started_at=now,
            claimed_at=now,
            clock=clock,
        )
        self._state.fields_cache["process"] = process

    @property
    def fence(self) -> Fence:
        """The fencing token of the attempt that the job is in."""
        return self.id, self.attempt, self.process_id

    @property
    def log_fields(self) -> dict[str, object]:
        """Structured fields of log lines about the job."""
        process = self.process.log_fields if self.process else {}
        return {
            "job_id": str(self.pk),
            "task": self.task,
            "queue": self.queue,
            "attempt": self.attempt,
            **process,
        }

    def has_expired(self, wait: float = 0.0) -> bool:
        """Return True if it is too late to start the job ``wait`` seconds from now."""
        return (
            self.expires_at is not None and self.now() + timedelta(seconds=wait) >= self.expires_at
        )

    def now(self) -> datetime:
        """Return the database's time: that of the claim, plus the time since by the clock."""
        return self.claimed_at + timedelta(seconds=time.monotonic() - self.clock)
