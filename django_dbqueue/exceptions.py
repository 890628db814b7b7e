"""One class per cause. What is raised says what was wrong, with the value, and what to do."""

from __future__ import annotations

from datetime import datetime, timedelta

from .core.time_values import seconds_of, seconds_or_time


class QueueError(Exception):
    """Base of this package's own errors. Not raised itself."""


class InvalidOption(QueueError):
    """An entry of ``TASKS[alias]["OPTIONS"]``, or a flag of ``runqueue``, cannot be used."""


class InvalidTaskPath(QueueError):
    """A job names something that is no task: it was renamed, removed, or never carried ``@task``."""


class InvalidSchedule(QueueError, ValueError):
    """When something is to recur cannot be told: an expression, an interval, a time zone, or what is to be called."""


class NotYetVisible(QueueError):
    """A result was waited for inside the transaction that enqueued it: no worker can see the job before the commit."""


class BatchFinished(QueueError):
    """A job was to be added to a batch whose jobs have all ended."""


class SqlNotAllowed(QueueError):
    """``run_sql`` was given a database that ``OPTIONS["allow_sql"]`` does not name."""


class CommandNotAllowed(QueueError):
    """``call_command`` was given a command that ``OPTIONS["allow_commands"]`` does not name."""


class ProcessLost(QueueError):
    """The process that ran a job died. Recorded with the attempt, never raised."""


class Discarded(QueueError):
    """A job was claimed that is not to run any more. Recorded with the attempt, never raised in a task."""


class Expired(Discarded):
    """A job was not started by the time that its ``expires`` said."""


class Interruption(BaseException):
    """Ends a task from outside, or at its own wish. No Exception: what catches errors must not catch this. Not raised itself."""


class TimedOut(Interruption):
    """Raised in a task that has run for longer than its ``timeout``."""


class Stopped(Interruption):
    """Raised in a task that an operator has stopped: its job is discarded."""


class Interrupted(Interruption):
    """Raised in a task whose worker must end; or by a task that ends since ``context.should_stop``.

    The job is given back, and no attempt is spent.
    """


class Snoozed(Interruption):
    """Raised by ``context.snooze()``: the job is SCHEDULED for ``until``, in seconds from now or a time. No attempt is spent.

    It checks what it is given, so that nothing reaches the database that is no time.
    """

    def __init__(self, delay: float | timedelta | datetime) -> None:
        super().__init__(delay)
        self.until = seconds_or_time(delay, "snooze()")


class Retried(Interruption):
    """Raised by ``context.retry()``: the attempt has failed, and the next one is after ``delay`` seconds; None asks the back-off.

    Its cause is the exception that was handled, if one was.
    """

    def __init__(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        super().__init__(reason)
        self.delay = None if delay is None else seconds_of(delay, "retry()")
        self.reason = str(reason)


class JobLost(Interruption):
    """Raised in a task whose job belongs to another process now: what it returns is dropped."""
