"""Exceptions, one class per cause. A message states the error, the value and the remedy."""

from __future__ import annotations

from datetime import datetime, timedelta

from .core.time_values import seconds_of, seconds_or_time


class QueueError(Exception):
    """Base of this package's own errors. Not raised itself."""


class InvalidOption(QueueError):
    """An entry of ``TASKS[alias]["OPTIONS"]``, or a flag of ``runqueue``, is invalid."""


class InvalidTaskPath(QueueError):
    """A job's path names no task: it was renamed, removed, or never carried ``@task``."""


class InvalidSchedule(QueueError, ValueError):
    """A schedule is invalid: its cron expression, interval, time zone or target."""


class NotYetVisible(QueueError):
    """A result was waited for inside the transaction that enqueued its job.

    No worker can see the job before the commit. On SQLite this holds for any transaction: no worker
    can end a job before it ends.
    """


class BatchFinished(QueueError):
    """A job cannot be added to a batch, because the batch has finished: all its jobs have ended."""


class SqlNotAllowed(QueueError):
    """``run_sql`` was given a database that ``OPTIONS["allow_sql"]`` does not name."""


class CommandNotAllowed(QueueError):
    """``call_command`` was given a command that ``OPTIONS["allow_commands"]`` does not name.

    Commands that ``recurring_command`` or ``OPTIONS["recurring"]`` declares are allowed too, with
    exactly these arguments.
    """


class InvalidMessage(QueueError):
    """A message cannot be stored in a job by ``contrib.mail.EmailBackend``, or read from one."""


class ProcessLost(QueueError):
    """The process that ran a job died. Recorded with the attempt, never raised."""


class Discarded(QueueError):
    """A claimed job must not run any more. Recorded with the attempt, never raised in a task."""


class Expired(Discarded):
    """A job was not started by the time that its ``expires`` gives."""


class Interruption(BaseException):
    """Base of control-flow exceptions, which end a task from outside or at its own request.

    A BaseException, so that ``except Exception`` does not swallow it. Not raised itself.
    """


class TimedOut(Interruption):
    """Raised in a task that has run for longer than its ``timeout``, in seconds.

    The attempt has failed, and counts towards ``max_attempts``.
    """


class Stopped(Interruption):
    """Raised in a task that an operator has stopped. The job is discarded."""


class Interrupted(Interruption):
    """Raised in a task whose worker must end, or by a task that ends on ``context.should_stop``.

    The job is released, and no attempt is spent.
    """


class Snoozed(Interruption):
    """Raised by ``context.snooze()``: the job is SCHEDULED for ``until``, and no attempt is spent.

    until: seconds from now, or a time.

    The constructor validates the delay, so that no invalid time reaches the database. Raises
    TypeError or ValueError for an invalid delay.
    """

    def __init__(self, delay: float | timedelta | datetime) -> None:
        super().__init__(delay)
        self.until = seconds_or_time(delay, "snooze()")


class Retried(Interruption):
    """Raised by ``context.retry()``: the attempt has failed, and the job is retried.

    delay: seconds until the next attempt; None takes the delay from the backoff.
    reason: text recorded with the attempt.

    The cause is the exception that was being handled, if any. Raises TypeError or ValueError for an
    invalid delay.
    """

    def __init__(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        super().__init__(reason)
        self.delay = None if delay is None else seconds_of(delay, "retry()")
        self.reason = str(reason)


class JobLost(Interruption):
    """Raised in a task whose job belongs to another process now.

    The attempt's result is dropped: the new owner's stands.
    """
