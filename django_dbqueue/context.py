"""Context of a running task: access to its job, and requests to its worker."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NoReturn, Protocol

from asgiref.sync import sync_to_async

from .batches import batch
from .compat import TaskContext
from .core import serialization
from .core.progress_value import ProgressValue
from .core.serialization import Json
from .engine.claim import save_metadata
from .exceptions import JobLost, Retried, Snoozed
from .models import ClaimedJob


class _Call(Protocol):
    """The attempt's call, which the worker interrupts."""

    should_stop: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext(TaskContext):  # type: ignore[misc, type-arg]
    """Context passed to a task with ``takes_context``, as its first argument ``context``.

    It has Django's ``task_result``, and ``attempt``, which is 1 for the first attempt of a run.

    job: the job's row, to be read only.
    call: the attempt, as its worker sees it. Private.
    """

    job: ClaimedJob
    call: _Call

    @property
    def metadata(self) -> dict[str, Json]:
        """Metadata of the job, from its caller and from its attempts so far.

        A dict of JSON values that the task may change; ``save_metadata()`` stores the changes.
        """
        return self.job.metadata  # type: ignore[no-any-return]

    @property
    def batch(self) -> batch | None:
        """The batch of the job, which takes more jobs: ``with context.batch: …``; None without one.

        Reads the batch's row. Raises Batch.DoesNotExist if the row was deleted.
        """
        return batch.of(self.job.batch_id, self.task_result.backend) if self.job.batch_id else None

    @property
    def should_stop(self) -> bool:
        """True if the task must end: save its position, and raise ``Interrupted``.

        The worker is shutting down, an operator has stopped the job, or its timeout has passed.
        """
        return bool(self.call.should_stop)

    def save_metadata(self) -> None:
        """Store ``metadata`` now, for the next attempt.

        Raises TypeError or ValueError for values that are not JSON, and JobLost if the job belongs
        to another process by now.
        """
        self.job.metadata.update(
            serialization.to_json(self.metadata, of=f"metadata of {self.job.task}")
        )
        belongs_to_none = self.job.process_id is None  # ``queue run`` runs it, and writes nothing.
        if not belongs_to_none and not save_metadata(self.job):
            raise JobLost(f"Job {self.job.pk} belongs to another process now.")

    async def asave_metadata(self) -> None:
        """Asynchronous version of ``save_metadata()``."""
        await sync_to_async(self.save_metadata)()

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report progress: ``done`` of ``total``, with a short note.

        done, total: numbers from 0 on, in one unit, such as rows, bytes or seconds; None for an
            unknown total.
        note: text, cut after 200 characters.

        The call itself writes nothing, and so costs nothing, in a coroutine too: the worker writes
        the newest report about once a second. Raises TypeError or ValueError for other values.
        """
        self.job.progress_value = ProgressValue.of(done, total, note)

    def snooze(self, delay: float | timedelta | datetime) -> NoReturn:
        """End this attempt without spending it, and run the job again after ``delay``.

        delay: seconds or a timedelta; or the time to run at, as a datetime.

        Raises TypeError or ValueError for an invalid delay.
        """
        raise Snoozed(delay)

    def retry(self, delay: float | timedelta | None = None, reason: str = "") -> NoReturn:
        """End this attempt as failed, and retry the job after ``delay``.

        delay: seconds or a timedelta; None takes the delay from the backoff.
        reason: recorded with the attempt, as is the exception being handled.

        The job is retried regardless of ``retry_on``, as long as ``max_attempts`` allows. Raises
        TypeError or ValueError for an invalid delay.
        """
        raise Retried(delay, reason) from sys.exc_info()[1]
