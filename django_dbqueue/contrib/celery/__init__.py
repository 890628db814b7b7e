"""Celery's names for tasks, calls and results, for code that moves here file by file.

``from django_dbqueue.contrib.celery import shared_task`` replaces ``from celery import
shared_task``. Celery itself is not imported. What is not served raises TypeError, with the value
and the remedy. ``docs/from_celery.md`` has the whole list.
"""

from .canvas import Signature, chain, chord, group
from .options import crontab
from .results import AsyncResult, GroupResult, TaskFailed, TaskRevokedError
from .tasks import MaxRetriesExceededError, Retry, SharedTask, SoftTimeLimitExceeded, shared_task

__all__ = [
    "AsyncResult",
    "GroupResult",
    "MaxRetriesExceededError",
    "Retry",
    "SharedTask",
    "Signature",
    "SoftTimeLimitExceeded",
    "TaskFailed",
    "TaskRevokedError",
    "chain",
    "chord",
    "crontab",
    "group",
    "shared_task",
]
