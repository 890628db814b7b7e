"""Background jobs in the database that your Django project already has."""

from .backoff import Constant, Exponential, Linear
from .batch import batch
from .exceptions import Interrupted, Retried, Snoozed, Stopped, TimedOut
from .limits import Rate, limit
from .pipeline import FanOut, Finish, GoTo, pipeline
from .recurring import recurring, recurring_command
from .tasks import Task, task

__version__ = "0.1.0"
__all__ = [
    "Constant",
    "Exponential",
    "FanOut",
    "Finish",
    "GoTo",
    "Interrupted",
    "Linear",
    "Rate",
    "Retried",
    "Snoozed",
    "Stopped",
    "Task",
    "TimedOut",
    "batch",
    "limit",
    "pipeline",
    "recurring",
    "recurring_command",
    "task",
]
