"""Celery's names for tasks, calls and results, for code that moves here file by file.

``from django_dbqueue.contrib.celery import shared_task`` replaces ``from celery import
shared_task``. Celery itself is not imported. What is not served raises TypeError, with the value
and the remedy; the import of a name of Celery that is not here, ImportError with the remedy.
``docs/from_celery.md`` has the whole list.
"""

from typing import TYPE_CHECKING, NoReturn

from .canvas import Signature, chain, chord, group
from .missing import refuse_import
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

if not TYPE_CHECKING:  # A type checker then finds such a name itself.

    def __getattr__(name: str) -> NoReturn:
        refuse_import(__name__, name)
