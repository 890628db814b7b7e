"""Whether and when a failed job is tried again."""

from __future__ import annotations

import logging
from typing import Any

from ...backoff import Exponential
from ...core.options import Options
from ...core.time_values import LONGEST_WAIT
from ...exceptions import Retried
from ...models import Job
from ...results import JobResult

logger = logging.getLogger("django_dbqueue")


def wait_before_retry(job: Job, task: Any, error: BaseException, result: JobResult, options: Options) -> float | None:
    """Seconds until the next attempt; None if there is none.

    ``job.failures`` are those since it was enqueued, or retried by an operator, before the error at hand; ``result.errors``
    are all, with it.
    """
    if job.failures + 1 >= job.max_attempts:
        return None
    wait = _wait(task, error, result, options)
    return None if wait is None or job.has_expired(wait) else wait


def _wait(task: Any, error: BaseException, result: JobResult, options: Options) -> float | None:
    """What the task's policy says; what the task itself has asked for goes before."""
    if isinstance(error, Retried):
        if error.delay is not None:
            return error.delay
        error = error.__cause__ or error
    elif task.retry_on and not isinstance(error, task.retry_on):
        return None
    try:
        wait = (task.backoff or options.backoff)(error, result)
        return None if wait is None else min(max(0.0, float(wait)), LONGEST_WAIT.total_seconds())
    except Exception:
        logger.exception("The backoff of %s raised; its job %s waits as by default.", task.module_path, result.id)
        return Exponential()(error, result)
