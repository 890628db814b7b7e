"""Background jobs in the database that your Django project already has."""

from .backoff import Constant, Exponential, Linear
from .exceptions import Interrupted, Stopped, TimedOut
from .tasks import Task, task

__version__ = "0.1.0"
__all__ = ["Constant", "Exponential", "Interrupted", "Linear", "Stopped", "Task", "TimedOut", "task"]
