"""Background jobs in the database that your Django project already has."""

from .backoff import Constant, Exponential, Linear
from .tasks import Task, task

__version__ = "0.1.0"
__all__ = ["Constant", "Exponential", "Linear", "Task", "task"]
