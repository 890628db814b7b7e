"""Models of the queue, one per file, and every statement that changes a job's state."""

from .batch import Batch
from .batch_share import BatchShare
from .execution import Execution
from .failure import Failure
from .hanged import HangedJob
from .job import Job
from .known_task import KnownTask
from .process import Process
from .progress import Progress
from .queue import Queue
from .recurring import RecurringTask
from .recurring_execution import RecurringExecution
from .semaphore import Semaphore
from .settlement import AttemptResult, Settled
from .slot import Slot
from .stack import Stack

__all__ = [
    "AttemptResult",
    "Batch",
    "BatchShare",
    "Execution",
    "Failure",
    "HangedJob",
    "Job",
    "KnownTask",
    "Process",
    "Progress",
    "Queue",
    "RecurringExecution",
    "RecurringTask",
    "Semaphore",
    "Settled",
    "Slot",
    "Stack",
]
