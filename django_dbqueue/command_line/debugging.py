"""Run the task of a job in this process, for a debugger."""

from __future__ import annotations

import pdb  # noqa: T100
import traceback
from contextlib import nullcontext
from typing import Any
from uuid import UUID

from asgiref.sync import async_to_sync
from django.core.management.base import CommandError, OutputWrapper
from django.db import transaction
from django.utils import timezone

from ..backend import DatabaseBackend
from ..exceptions import InvalidTaskPath
from ..models import ClaimedJob
from ..models.enums import State
from ..registry import load
from ..runtime.worker.attempt import Attempt
from ..runtime.worker.task_call import ThreadCall
from ..tasks import is_coroutine
from .output import Row
from .selection import missing


def run(pk: UUID, backend: DatabaseBackend, debugged: OutputWrapper | None) -> Row:
    """Run the task of a job, inside the project's middleware. Return what it ``returned``, if so.

    The middleware's ``ended()`` is not called, as the job has not ended.

    debugged: where to write the traceback of a task that fails, before the debugger starts there;
        None raises its exception.

    Raises CommandError for an unknown job or task.
    """
    rows: Any = ClaimedJob.objects.using(backend.database)
    if not (job := rows.filter(pk=pk).first()):
        raise CommandError(missing([pk], backend))
    unchanged = {"id": str(job.pk), "task": job.task, "state": job.state}
    job.claimed_at, job.process = timezone.now(), None
    # As if it ran, for the number of the attempt.
    job.state = State.RUNNING
    attempt = Attempt(ThreadCall(job), backend)
    attempt.earlier = list(attempt.executions.of_this_stage(job))
    try:
        attempt.task = load(job.task)
    except InvalidTaskPath as error:
        raise CommandError(str(error)) from error
    try:
        attempt.enter_middleware()
        function: Any = attempt.function()
        call = async_to_sync(function) if is_coroutine(function.func) else function
        with transaction.atomic(backend.database) if attempt.task.atomic else nullcontext():
            value = call()
    except BaseException as error:  # Also the task's request to run again later.
        attempt.error = error
        if not debugged or isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        debugged.write("".join(traceback.format_exception(error)))
        pdb.post_mortem(error.__traceback__)
        return unchanged
    finally:
        attempt.leave_middleware()
    return {**unchanged, "returned": value}
