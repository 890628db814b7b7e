"""The words that the rows of jobs and executions may have, and what they have in common."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from django.db import models
from django.utils.translation import gettext_lazy as _

# Of a ready job in its lane: its ``run_after`` and its id.
Place = tuple[datetime, UUID]
# The fencing token of one attempt: the job's id, the attempt's number, and the id of the process that claimed it. Two claims of
# one attempt are possible where a failover has lost the first; ids of processes are random, so the tokens still differ.
Fence = tuple[UUID, int, "int | None"]


class Lane(NamedTuple):
    """The ready jobs of one queue and one priority: what one claim reads, in the order of one index."""

    queue: str
    priority: int


class State(models.TextChoices):
    # Waits for its time.
    SCHEDULED = "scheduled", _("Scheduled")
    # Waits for a slot of its concurrency key.
    BLOCKED = "blocked", _("Blocked")
    # May be claimed.
    READY = "ready", _("Ready")
    # Is owned by a process.
    RUNNING = "running", _("Running")
    # Came to its end.
    SUCCESSFUL = "successful", _("Successful")
    # Will not be tried again by itself.
    FAILED = "failed", _("Failed")
    # Was called off.
    DISCARDED = "discarded", _("Discarded")


class Outcome(models.TextChoices):
    """How an attempt ended."""

    SUCCESSFUL = "successful", _("Successful")
    FAILED = "failed", _("Failed")
    # It ran longer than it may.
    TIMED_OUT = "timed_out", _("Timed out")
    # Its process died.
    LOST = "lost", _("Lost")
    # Its process was told to stop, and gave it back.
    INTERRUPTED = "interrupted", _("Interrupted")
    # It asked to be run again later.
    SNOOZED = "snoozed", _("Snoozed")
    # It raised what its task is called off for, an operator stopped it, or it had expired.
    DISCARDED = "discarded", _("Discarded")


class OnLost(models.TextChoices):
    """What becomes of a job whose process died while it ran."""

    RETRY = "retry", _("Try again")
    FAIL = "fail", _("Fail")


class Conflict(models.TextChoices):
    """What a call does whose key has a job already."""

    # The one that waits gets the call's arguments; one that runs is run once more after it.
    RERUN = "rerun", _("Run again")
    # The one that waits or runs stands.
    SKIP = "skip", _("Skip")
    # As rerun, and the time of the one that waits is the call's.
    REPLACE = "replace", _("Replace")


class EnqueueStatus(models.TextChoices):
    """What became of a call."""

    # A run of its own: a new job, or one that had ended and runs again.
    CREATED = "created", _("Created")
    # A job that waits or runs took it over.
    MERGED = "merged", _("Merged")
    # The job that there is stands as it was.
    IGNORED = "ignored", _("Ignored")


HIGHEST_PRIORITY = 100
WAITING = [State.SCHEDULED, State.BLOCKED, State.READY]
UNFINISHED = [*WAITING, State.RUNNING]
FINISHED = [State.SUCCESSFUL, State.FAILED, State.DISCARDED]
UNSUCCESSFUL = [State.FAILED, State.DISCARDED]
# The attempts that count as failed.
FAILURES = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.LOST)
