"""One class per cause. What is raised says what was wrong, with the value, and what to do."""


class QueueError(Exception):
    """Base of this package's own errors. Not raised itself."""


class InvalidOption(QueueError):
    """An entry of ``TASKS[alias]["OPTIONS"]``, or a flag of ``runqueue``, cannot be used."""


class InvalidTaskPath(QueueError):
    """A job names something that is no task: it was renamed, removed, or never carried ``@task``."""


class NotYetVisible(QueueError):
    """A result was waited for inside the transaction that enqueued it: no worker can see the job before the commit."""


class ProcessLost(QueueError):
    """The process that ran a job died. Recorded with the attempt, never raised."""


class Interruption(BaseException):
    """Ends a task from outside. No Exception: what a task catches to go on must not catch this. Not raised itself."""


class TimedOut(Interruption):
    """Raised in a task that has run for longer than its ``timeout``."""


class Stopped(Interruption):
    """Raised in a task that an operator has stopped: its job is discarded."""


class Interrupted(Interruption):
    """Raised in a task whose worker must end; or by a task that ends since ``context.should_stop``.

    The job is given back, and no attempt is spent.
    """


class JobLost(Interruption):
    """Raised in a task whose job belongs to another process now: what it returns is dropped."""
