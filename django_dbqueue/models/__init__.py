"""The nouns of the queue, one to a file, and every statement that changes a job's state."""

from .execution import Execution, Settlement
from .failure import Failure
from .hanged import HangedJob
from .job import Job
from .process import Process
from .queue import Queue
from .stack import Stack

__all__ = ["Execution", "Failure", "HangedJob", "Job", "Process", "Queue", "Settlement", "Stack"]
