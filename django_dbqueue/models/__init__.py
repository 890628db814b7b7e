"""Models of the queue: one table a file, with its filters and the operators' actions."""

from .alert import Alert
from .batch import Batch
from .batch_share import BatchShare
from .claimed_job import ClaimedJob
from .execution import Execution
from .failure import Failure
from .job import Job
from .operation import Operation, OperationJob
from .process import Process
from .progress import Progress
from .queue import Queue
from .recurring_execution import RecurringExecution
from .recurring_task import RecurringTask
from .semaphore import Semaphore
from .slot import Slot
from .stack_trace import HangedJob, StackTrace
from .statistic import DatabaseHealth, FailureStatistic, Overview, Statistic, StatisticDelta
from .task_state import TaskState

__all__ = [
    "Alert",
    "Batch",
    "BatchShare",
    "ClaimedJob",
    "DatabaseHealth",
    "Execution",
    "Failure",
    "FailureStatistic",
    "HangedJob",
    "Job",
    "Operation",
    "OperationJob",
    "Overview",
    "Process",
    "Progress",
    "Queue",
    "RecurringExecution",
    "RecurringTask",
    "Semaphore",
    "Slot",
    "StackTrace",
    "Statistic",
    "StatisticDelta",
    "TaskState",
]
