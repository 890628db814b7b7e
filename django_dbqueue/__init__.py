"""Background jobs in the database that your Django project already has."""

from typing import TYPE_CHECKING

from .backoff import Constant, Exponential, Linear
from .batches import batch
from .bulk import aenqueue_many, enqueue_many
from .exceptions import Interrupted, Retried, Snoozed, Stopped, TimedOut
from .limits import Rate, limit
from .pipelines import FanOut, Finish, GoTo, pipeline
from .recurrence.declare import recurring, recurring_command
from .tasks import Task, task

if TYPE_CHECKING:
    from .context import JobContext

__version__ = "0.1.0"
__all__ = [
    "Constant",
    "Exponential",
    "FanOut",
    "Finish",
    "GoTo",
    "Interrupted",
    "JobContext",
    "Linear",
    "Rate",
    "Retried",
    "Snoozed",
    "Stopped",
    "Task",
    "TimedOut",
    "aenqueue_many",
    "batch",
    "enqueue_many",
    "limit",
    "pipeline",
    "recurring",
    "recurring_command",
    "task",
]


def __getattr__(name: str) -> object:
    # Imported on first use: it needs the models, which cannot be imported before the apps are
    # ready, and this package is one of the apps.
    if name == "JobContext":
        from .context import JobContext

        return JobContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
