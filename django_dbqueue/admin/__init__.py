"""Pages in the project's own Django admin for operators to inspect and repair the queue."""

from .batches import BatchAdmin
from .database import DatabaseAdmin
from .failures import FailureAdmin
from .hanged_jobs import HangedJobAdmin
from .jobs import JobAdmin
from .limits import SemaphoreAdmin
from .operations import OperationAdmin
from .overview import OverviewAdmin
from .processes import ProcessAdmin
from .queues import QueueAdmin
from .recurring import RecurringTaskAdmin
from .tasks import TaskStateAdmin

__all__ = [
    "BatchAdmin",
    "DatabaseAdmin",
    "FailureAdmin",
    "HangedJobAdmin",
    "JobAdmin",
    "OperationAdmin",
    "OverviewAdmin",
    "ProcessAdmin",
    "QueueAdmin",
    "RecurringTaskAdmin",
    "SemaphoreAdmin",
    "TaskStateAdmin",
]
