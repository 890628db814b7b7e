"""What becomes of the jobs of a process that died."""

from __future__ import annotations

import logging
import random
import time

from ..errors import ErrorReport
from ..exceptions import ProcessLost
from ..models import Execution, Job, Process, Settlement
from ..models.expressions import Now
from ..models.process import ProcessQuerySet

logger = logging.getLogger("django_dbqueue")

# A job is tried so often at least before it is taken for the cause of its processes' deaths.
LEAST_ATTEMPTS = 3
BATCH = 500


def recover(database: str, dead: ProcessQuerySet) -> int:
    """Sign off dead processes, and settle as lost what they, or others before them, were running. Returns how many jobs."""
    names = _bury(dead.using(database))
    jobs = list(Job.objects.using(database).orphaned().annotate(seen_at=Now())[:BATCH])
    if not jobs:
        return 0
    lost = [_lost(job, names.get(job.process_id or 0, "a process")) for job in jobs]
    return len(Execution.objects.using(database).settle(lost).written)


def _bury(dead: ProcessQuerySet) -> dict[int, str]:
    names = dict(dead.values_list("pk", "name"))
    if names:
        # The condition holds once more as they are deleted: one that beat meanwhile lives, and keeps its jobs.
        dead.filter(pk__in=list(names)).delete()
        logger.warning("Taken for dead: %s.", ", ".join(names.values()))
    return names


def _lost(job: Job, name: str) -> Settlement:
    state = Job.State.FAILED if job.failures + 1 >= max(LEAST_ATTEMPTS, job.max_attempts) else Job.State.SCHEDULED
    seen_at, job.claimed_at = job.seen_at, job.started_at  # type: ignore[attr-defined, assignment]
    job.clock = time.monotonic() - (seen_at - job.claimed_at).total_seconds()
    job.process = Process(pk=job.process_id, name=name)
    logger.warning("Job %s of %s was lost with %s; it is now %s.", job.pk, job.task, name, state.value, extra=job.log_fields)
    message = f"{name!r} died while it ran this job."
    error = ErrorReport(
        type=f"{ProcessLost.__module__}.{ProcessLost.__qualname__}", message=message, traceback=message, location=job.task
    )
    # Apart from each other, so that the one that killed its process does not take the same neighbours along again.
    wait = random.uniform(0.1, 3.0) * 3 ** min(job.failures, 6)
    return Settlement.of(job, Execution.Outcome.LOST, state, wait=wait, error=error)
