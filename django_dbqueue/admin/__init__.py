"""The pages on which operators see the queue and put it right, in the project's own Django admin."""

from .batches import BatchAdmin
from .failures import FailureAdmin
from .hanged import HangedJobAdmin
from .jobs import JobAdmin
from .known_tasks import KnownTaskAdmin
from .processes import ProcessAdmin
from .queues import QueueAdmin
from .recurring import RecurringTaskAdmin
from .semaphores import SemaphoreAdmin

__all__ = [
    "BatchAdmin",
    "FailureAdmin",
    "HangedJobAdmin",
    "JobAdmin",
    "KnownTaskAdmin",
    "ProcessAdmin",
    "QueueAdmin",
    "RecurringTaskAdmin",
    "SemaphoreAdmin",
]
