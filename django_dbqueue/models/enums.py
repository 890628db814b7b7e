"""Enumerations of jobs and executions, and groups of their values."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from django.db import models
from django.utils.translation import gettext_lazy as _

# Position of a ready job in its lane: its ``run_after`` and its id.
Place = tuple[datetime, UUID]
# Fencing token of one attempt: the job's id, the attempt's number, and the id of the process that
# claimed it. An attempt can be claimed twice if a failover has lost the first claim; process ids
# are random, so the tokens still differ.
Fence = tuple[UUID, int, "int | None"]


class Lane(NamedTuple):
    """The ready jobs of one queue and one priority. A claim reads one lane, in index order."""

    queue: str
    priority: int


class State(models.TextChoices):
    # Waits for its ``run_after``.
    SCHEDULED = "scheduled", _("Scheduled")
    # Waits for a slot of a limit.
    BLOCKED = "blocked", _("Blocked")
    # May be claimed.
    READY = "ready", _("Ready")
    # Owned by a process.
    RUNNING = "running", _("Running")
    # Finished without an error.
    SUCCESSFUL = "successful", _("Successful")
    # Not retried automatically.
    FAILED = "failed", _("Failed")
    # Cancelled.
    DISCARDED = "discarded", _("Discarded")


class Outcome(models.TextChoices):
    """How an attempt ended."""

    SUCCESSFUL = "successful", _("Successful")
    FAILED = "failed", _("Failed")
    # Ran longer than its timeout.
    TIMED_OUT = "timed_out", _("Timed out")
    # The process died.
    LOST = "lost", _("Lost")
    # The process was shutting down, and released the job.
    INTERRUPTED = "interrupted", _("Interrupted")
    # The task requested to run again later.
    SNOOZED = "snoozed", _("Snoozed")
    # Was stopped by an operator, to run again.
    STOPPED = "stopped", _("Stopped, runs again")
    # Raised an exception of ``discard_on``, was stopped by an operator, or had expired.
    DISCARDED = "discarded", _("Discarded")


class OnLost(models.TextChoices):
    """Policy for a job whose process died while it ran."""

    RETRY = "retry", _("Retry")
    FAIL = "fail", _("Fail")


class Conflict(models.TextChoices):
    """Policy for an enqueue call whose key already has a job."""

    # A waiting job gets the call's arguments; a running job runs once more afterwards.
    RERUN = "rerun", _("Run again")
    # A waiting or running job stays unchanged.
    SKIP = "skip", _("Skip")
    # The existing job stays unchanged in any state, also when it has finished.
    ONCE = "once", _("Once")
    # As RERUN, and a waiting job also gets the call's time.
    REPLACE = "replace", _("Replace")


class EnqueueStatus(models.TextChoices):
    """Result of an enqueue call."""

    # A separate run: a new job, or a finished one that runs again.
    CREATED = "created", _("Created")
    # Merged into a waiting or running job.
    MERGED = "merged", _("Merged")
    # The existing job is unchanged.
    IGNORED = "ignored", _("Ignored")


HIGHEST_PRIORITY = 100
WAITING = [State.SCHEDULED, State.BLOCKED, State.READY]
UNFINISHED = [*WAITING, State.RUNNING]
FINISHED = [State.SUCCESSFUL, State.FAILED, State.DISCARDED]
UNSUCCESSFUL = [State.FAILED, State.DISCARDED]
# Outcomes that count as failed.
FAILURES = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.LOST)
