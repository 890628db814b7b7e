"""A job as Django's Tasks framework shows it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, NoReturn
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import connections

from . import arguments
from .batch import batch
from .compat import TaskContext, TaskError, TaskResult, TaskResultStatus
from .exceptions import InvalidTaskPath, JobLost, NotYetVisible, Retried, Snoozed
from .models import Execution, Job, Progress
from .models.noted import Noted
from .tasks import Task, load

STATUS = {
    Job.State.SCHEDULED: TaskResultStatus.READY,
    Job.State.BLOCKED: TaskResultStatus.READY,
    Job.State.READY: TaskResultStatus.READY,
    Job.State.RUNNING: TaskResultStatus.RUNNING,
    Job.State.SUCCESSFUL: TaskResultStatus.SUCCESSFUL,
    Job.State.FAILED: TaskResultStatus.FAILED,
    Job.State.DISCARDED: TaskResultStatus.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(TaskResult):  # type: ignore[misc, type-arg]
    """A TaskResult that also has the job's ``metadata`` and ``progress``, and can be waited for.

    enqueued: what became of the call, if its key had a job already: "created" (a run of its own), "merged" (one that waits or
        runs took it over), or "ignored" (that one stands as it was).
    """

    enqueued: str = "created"
    metadata: dict[str, Any] = field(default_factory=dict)
    progress: Noted | None = None

    def refresh(self) -> None:
        self._be_like(self.task.get_backend().get_result(self.id))

    async def arefresh(self) -> None:
        self._be_like(await self.task.get_backend().aget_result(self.id))

    def _be_like(self, newer: TaskResult[Any, Any]) -> None:
        for each in fields(self):
            if each.name != "task":
                object.__setattr__(self, each.name, getattr(newer, each.name))

    def wait(self, timeout: float | None = None) -> JobResult:
        """Refresh until the job has ended, ``timeout`` seconds at most, and return this result.

        Raises TimeoutError, and NotYetVisible inside the transaction that enqueued the job.
        """
        for pause in self._pauses(timeout):
            self.refresh()
            if self.is_finished:
                break
            if not pause:
                self._must_be_visible()
            time.sleep(pause)
        return self

    async def await_(self, timeout: float | None = None) -> JobResult:
        """``wait()`` for a coroutine; the underscore is there because the name with an ``a`` in front is a keyword."""
        for pause in self._pauses(timeout):
            await self.arefresh()
            if self.is_finished:
                break
            await asyncio.sleep(pause)
        return self

    def _pauses(self, timeout: float | None) -> Iterator[float]:
        """Seconds to sleep between two looks: short at first, then longer, until the time is over."""
        pause, end = 0.005, None if timeout is None else time.monotonic() + timeout
        yield 0.0
        while end is None or time.monotonic() < end:
            yield pause if end is None else max(0.0, min(pause, end - time.monotonic()))
            pause = min(pause * 1.5, 0.5)
        raise TimeoutError(f"Job {self.id} has not ended within {timeout} s: it is {self.status}. Is a worker running?")

    def _must_be_visible(self) -> None:
        backend: Any = self.task.get_backend()
        if connections[backend.database].in_atomic_block and not _is_committed(self.id, backend.database):
            raise NotYetVisible(f"No worker sees job {self.id} before this transaction commits. Wait for it after that.")


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
        self.job.metadata.update(arguments.to_json(self.metadata, of=f"metadata of {self.job.task}"))
        if not Job.objects.using(self.job._state.db).save_metadata(self.job):
            raise JobLost(f"Job {self.job.pk} belongs to another process now.")

    async def asave_metadata(self) -> None:
        await sync_to_async(self.save_metadata)()

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Note how far the task is: ``done`` of ``total``, and a word on it. Raises TypeError or ValueError for other things.

        It writes nothing itself, and so costs nothing, in a coroutine too: the worker writes the newest about once a second.
        """
        self.job.noted = Noted.of(done, total, note)

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


def _is_committed(result_id: str, database: str) -> bool:
    """Whether another connection sees the job."""
    other: Any = connections.create_connection(database)
    try:
        with other.cursor() as cursor:
            key = Job._meta.pk.get_db_prep_value(UUID(result_id), other)
            cursor.execute(f"SELECT 1 FROM {Job._meta.db_table} WHERE id = %s", [key])
            return cursor.fetchone() is not None
    finally:
        other.close()


def result_of(
    job: Job, alias: str, task: Task[..., Any], executions: Iterable[Execution] = (), progress: Progress | None = None
) -> JobResult:
    """The result for a job and its attempts so far, oldest first."""
    attempts = list(executions)
    running = job.state == Job.State.RUNNING
    result = JobResult(
        task=task,
        id=str(job.pk),
        status=STATUS[Job.State(job.state)],
        enqueued_at=None if job._state.adding else job.enqueued_at,
        started_at=attempts[0].started_at if attempts else job.started_at,
        last_attempted_at=job.started_at if running or not attempts else attempts[-1].started_at,
        finished_at=job.finished_at and (attempts[-1].finished_at if attempts else job.finished_at),
        args=job.args,
        kwargs=job.kwargs,
        backend=alias,
        errors=[TaskError(exception_class_path=e.error_type, traceback=e.traceback) for e in attempts if e.error_type],
        worker_ids=[e.process for e in attempts] + ([job.process.name if job.process else "?"] if running else []),
        metadata=job.metadata,
        progress=progress.noted if progress else None,
    )
    object.__setattr__(result, "_return_value", job.result)
    return result


def task_of(job: Job, alias: str) -> Task[..., Any]:
    """The job's task as it was enqueued. Raises InvalidTaskPath if there is none at its path any more."""
    return _as_enqueued(load(job.task), job, alias)


def task_or_stand_in(job: Job, alias: str) -> Task[..., Any]:
    """The job's task; for one that is gone, a stand-in of the same path that cannot be called."""
    try:
        return task_of(job, alias)
    except InvalidTaskPath:
        return _as_enqueued(_stand_in(job.task), job, alias)


def _as_enqueued(task: Task[..., Any], job: Job, alias: str) -> Task[..., Any]:
    """A copy, not made anew: that would check it, and a job whose queue is gone from ``QUEUES`` could not be read."""
    wanted: dict[str, Any] = {
        "priority": job.priority,
        "queue_name": job.queue,
        "run_after": None if job.run_after == job.enqueued_at else job.run_after,
        "expires": job.expires_at,
        "backend": alias,
        "metadata": job.metadata,
    }
    if all(getattr(task, name) == value for name, value in wanted.items()):
        return task
    enqueued = object.__new__(type(task))
    for each in fields(task):
        object.__setattr__(enqueued, each.name, wanted.get(each.name, getattr(task, each.name)))
    return enqueued


def _stand_in(path: str) -> Task[..., Any]:
    def gone(*args: Any, **kwargs: Any) -> None:
        load(path)

    gone.__module__, _, gone.__qualname__ = path.rpartition(".")
    gone.__name__ = gone.__qualname__
    task = object.__new__(Task)
    for each in fields(Task):
        object.__setattr__(task, each.name, gone if each.name == "func" else each.default)
    return task
