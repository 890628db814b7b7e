"""Decides whether and when a failed job is retried."""

from __future__ import annotations

from ...backoff import Exponential
from ...core.error_reports import is_a
from ...core.options import Options
from ...core.safe_log import logger
from ...core.time_values import LONGEST_WAIT
from ...exceptions import Retried
from ...models import ClaimedJob
from ...results import JobResult
from ...tasks import AnyTask


def wait_before_retry(
    job: ClaimedJob, task: AnyTask, error: BaseException, result: JobResult, options: Options
) -> float | None:
    """Return the seconds until the next attempt, or None for no retry.

    ``job.failures`` counts the failures since the job was enqueued or retried by an operator,
    without the current error. ``result.errors`` contains all errors, including the current one.
    """
    if job.failures + 1 >= job.max_attempts:
        return None
    wait = _wait(task, error, result, options)
    return None if wait is None or job.has_expired(wait) else wait


def _wait(task: AnyTask, error: BaseException, result: JobResult, options: Options) -> float | None:
    """Return the delay of the task's policy. A delay set by the task itself takes precedence."""
    if is_a(error, Retried):
        if error.delay is not None:
            return error.delay
        error = error.__cause__ or error
    elif task.retry_on and not is_a(error, task.retry_on):
        return None
    try:
        wait = (task.backoff or options.backoff)(error, result)
        return None if wait is None else min(max(0.0, float(wait)), LONGEST_WAIT.total_seconds())
    except Exception:
        logger.exception(
            "retry policy: backoff of %s failed; job %s uses the default backoff",
            task.module_path,
            result.id,
        )
        return Exponential()(error, result)
