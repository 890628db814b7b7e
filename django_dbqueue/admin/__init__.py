"""The pages on which operators see the queue and put it right, in the project's own Django admin."""

from .failures import FailureAdmin
from .hanged import HangedJobAdmin
from .jobs import JobAdmin
from .processes import ProcessAdmin
from .queues import QueueAdmin

__all__ = ["FailureAdmin", "HangedJobAdmin", "JobAdmin", "ProcessAdmin", "QueueAdmin"]
