"""What a running task knows of its job, and can say to its worker."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NoReturn

from asgiref.sync import sync_to_async

from .batches import batch
from .compat import TaskContext
from .core import serialization
from .core.progress_value import ProgressValue
from .exceptions import JobLost, Retried, Snoozed
from .models import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext(TaskContext):  # type: ignore[misc, type-arg]
    """What a task with ``takes_context`` is given. ``call`` is the attempt, as its worker sees it."""

    job: Job
    call: Any

    @property
    def metadata(self) -> dict[str, Any]:
        """What is noted with the job, by its caller and by its attempts so far. ``save_metadata()`` stores its changes."""
        return self.job.metadata  # type: ignore[no-any-return]

    @property
    def batch(self) -> batch | None:
        """The batch that the job belongs to, which takes more jobs: ``with context.batch: …``."""
        return batch.of(self.job.batch_id, self.task_result.backend) if self.job.batch_id else None

    @property
    def should_stop(self) -> bool:
        """Whether the task is to come to an end: save how far it is, and raise ``Interrupted``."""
        return bool(self.call.should_stop)

    def save_metadata(self) -> None:
        """Store ``metadata`` now, for the next attempt. Raises TypeError or ValueError for what is not JSON.

        Raises JobLost if the job belongs to another process by now.
        """
        self.job.metadata.update(serialization.to_json(self.metadata, of=f"metadata of {self.job.task}"))
        if not Job.objects.using(self.job._state.db).save_metadata(self.job):
            raise JobLost(f"Job {self.job.pk} belongs to another process now.")

    async def asave_metadata(self) -> None:
        """``save_metadata()`` for a coroutine."""
        await sync_to_async(self.save_metadata)()

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Note how far the task is: ``done`` of ``total``, and a word on it. Raises TypeError or ValueError for other things.

        It writes nothing itself, and so costs nothing, in a coroutine too: the worker writes the newest about once a second.
        """
        self.job.noted = ProgressValue.of(done, total, note)

    def snooze(self, delay: float | timedelta | datetime) -> NoReturn:
        """End this attempt, and run again after ``delay`` (seconds or a timedelta), or at that time. No attempt is spent.

        Raises TypeError or ValueError for what is no delay.
        """
        raise Snoozed(delay)

    def retry(self, delay: float | timedelta | None = None, reason: str = "") -> NoReturn:
        """End this attempt as failed, and try again after ``delay`` (seconds or a timedelta; None as the back-off says).

        So it is whatever ``retry_on`` says, as long as ``max_attempts`` allows. Raises TypeError or ValueError for what is no
        delay. ``reason``, and the exception that is handled, are recorded with the attempt.
        """
        raise Retried(delay, reason) from sys.exc_info()[1]
