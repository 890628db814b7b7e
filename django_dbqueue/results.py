"""Results: jobs in the form of Django's Tasks framework."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, overload
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .compat import (
    AnyFrameworkTask,
    BaseResult,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
)
from .core.progress_value import ProgressValue
from .core.serialization import Json
from .engine.unique import Effect
from .exceptions import NotYetVisible
from .models import Execution, Job, Progress
from .models.document import Unreadable
from .models.enums import EnqueueStatus

STATUS: dict[str, TaskResultStatus] = {
    Job.State.SCHEDULED: TaskResultStatus.READY,
    Job.State.BLOCKED: TaskResultStatus.READY,
    Job.State.READY: TaskResultStatus.READY,
    Job.State.RUNNING: TaskResultStatus.RUNNING,
    Job.State.SUCCESSFUL: TaskResultStatus.SUCCESSFUL,
    Job.State.FAILED: TaskResultStatus.FAILED,
    Job.State.DISCARDED: TaskResultStatus.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(BaseResult):  # type: ignore[misc]
    """A TaskResult that also has the job's metadata and progress, and can be waited for.

    enqueued: the outcome of the call if its key already had a job: "created" (a run of its own),
        "merged" (a waiting or running job took the call over), or "ignored" (the existing job is
        unchanged).
    metadata: the metadata from the caller and from the job's attempts so far.
    progress: the last report of the job's last attempt, with ``done``, ``total``, ``note`` and
        ``fraction``; None if it has not reported.
    """

    enqueued: str = "created"
    metadata: dict[str, Json] = field(default_factory=dict)
    progress: ProgressValue | None = None

    def __repr__(self) -> str:
        return f"<JobResult {self.id} {self.status} {self.task.module_path}>"

    def refresh(self) -> None:
        """Read the job again, and update this result.

        Raises TaskResultDoesNotExist if the job was deleted, or is not written yet.
        """
        self._be_like(self.task.get_backend().get_result(self.id))

    async def arefresh(self) -> None:
        """Asynchronous version of ``refresh()``."""
        self._be_like(await self.task.get_backend().aget_result(self.id))

    def _be_like(self, newer: TaskResult[Any, Any]) -> None:
        for each in fields(self):
            if each.name != "task":
                object.__setattr__(self, each.name, getattr(newer, each.name))

    def wait(self, timeout: float | None = None) -> JobResult:
        """Refresh until the job has ended, and return this result.

        timeout: the longest wait, in seconds; None waits without a limit.

        Polls the database, every 5 ms at first and every 0.5 s in the end; inside a transaction, on
        a connection of its own, as the transaction may not see what others commit. Raises
        TimeoutError after the timeout, while the job continues; NotYetVisible inside the
        transaction that enqueued the job, and inside any on SQLite; and TaskResultDoesNotExist if
        the job was deleted.
        """
        with ExitStack() as stack:
            refresh = self.refresh
            for pause in self._pauses(timeout):
                try:
                    refresh()
                except TaskResultDoesNotExist:
                    # If the queue is in another database, the job is written after the commit.
                    if self.enqueued_at is None and any(
                        each.in_atomic_block for each in connections.all(initialized_only=True)
                    ):
                        raise self._not_yet_visible() from None
                    # The snapshot of a transaction may be older than the job.
                    if pause or not (self._is_in_transaction and self._is_committed()):
                        raise
                if self.is_finished:
                    break
                if not pause and self._is_in_transaction:
                    self._must_be_visible()
                    refresh = partial(stack.enter_context(_other_thread()), refresh)
                time.sleep(pause)
        return self

    async def await_(self, timeout: float | None = None) -> JobResult:
        """Asynchronous version of ``wait()``. Does not raise NotYetVisible.

        The name has an underscore because ``await`` is a keyword.
        """
        for pause in self._pauses(timeout):
            await self.arefresh()
            if self.is_finished:
                break
            await asyncio.sleep(pause)
        return self

    def _pauses(self, timeout: float | None) -> Iterator[float]:
        """Yield seconds to sleep between two polls: short at first, then longer, until timeout."""
        if timeout is not None and not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds, not {timeout!r}.")
        pause, end = 0.005, None if timeout is None else time.monotonic() + timeout
        yield 0.0
        while end is None or time.monotonic() < end:
            yield pause if end is None else max(0.0, min(pause, end - time.monotonic()))
            pause = min(pause * 1.5, 0.5)
        raise TimeoutError(
            f"Job {self.id} has not ended within {timeout} s: it is {self.status}. "
            "Is a worker running, and is the job due?"
        )

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        backend: Any = self.task.get_backend()
        return connections[backend.database]

    @property
    def _is_in_transaction(self) -> bool:
        return self._connection.in_atomic_block

    def _is_committed(self) -> bool:
        """Return True if another connection sees the job."""
        other = connections.create_connection(self._connection.alias)
        try:
            with other.cursor() as cursor:
                key = Job._meta.pk.get_db_prep_value(UUID(self.id), other)
                cursor.execute(f"SELECT 1 FROM {Job._meta.db_table} WHERE id = %s", [key])
                return cursor.fetchone() is not None
        finally:
            other.close()

    def _must_be_visible(self) -> None:
        if not self._is_committed():
            raise self._not_yet_visible()
        if self._connection.vendor == "sqlite":
            raise NotYetVisible(
                f"On SQLite no worker can end job {self.id} before this transaction ends. "
                "Wait for it after that."
            )

    def _not_yet_visible(self) -> NotYetVisible:
        return NotYetVisible(
            f"No worker sees job {self.id} before this transaction commits. Wait for it after that."
        )


class Enqueued(Sequence[JobResult]):
    """Lazy sequence of the results of calls that were enqueued together, in their order.

    A result is made on first access, as most results are never accessed.
    """

    def __init__(self, jobs: Sequence[Job], make: Callable[[Job], JobResult]) -> None:
        """Hold the jobs of the calls, and ``make``, which makes the result of a new job."""
        self._jobs, self._make = jobs, make
        self._made: dict[int, JobResult] = {}
        self._met: Mapping[UUID, Effect] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @overload
    def __getitem__(self, place: int) -> JobResult: ...
    @overload
    def __getitem__(self, place: slice) -> list[JobResult]: ...
    def __getitem__(self, place: int | slice) -> JobResult | list[JobResult]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        place = range(len(self))[place]
        if place not in self._made:
            self._made[place] = self._make(self._jobs[place])
            if self._met:
                self._learn(place)
        return self._made[place]

    def __add__(self, others: Iterable[JobResult]) -> list[JobResult]:
        return [*self, *others]

    def __radd__(self, others: Iterable[JobResult]) -> list[JobResult]:
        return [*others, *self]

    def __repr__(self) -> str:
        return f"<{len(self)} results>"

    def written(self, met: Mapping[UUID, Effect]) -> None:
        """Record that the jobs have been written.

        met: the effects of the calls with keys, by the ids of their jobs.
        """
        self._met = met
        for place in self._made:
            self._learn(place)

    def created(self) -> Iterator[JobResult]:
        """Yield the results of the calls that were not ignored."""
        return (result for result in self if result.enqueued != EnqueueStatus.IGNORED)

    def _learn(self, place: int) -> None:
        job = self._jobs[place]
        new = Effect(job, EnqueueStatus.CREATED, begins=True)
        row, fate, _begins = self._met.get(job.pk, new)
        known: dict[str, object] = {
            "id": str(row.pk),
            "enqueued_at": row.enqueued_at,
            "enqueued": fate.value,
        }
        for name, value in known.items():
            object.__setattr__(self._made[place], name, value)


@contextmanager
def _other_thread() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Yield a function that calls another one on a thread, hence on a connection, of its own."""
    with ThreadPoolExecutor(1, "dbqueue-wait") as thread:
        try:
            yield lambda function: thread.submit(function).result()
        finally:
            thread.submit(connections.close_all).result()


def result_of(
    job: Job,
    alias: str,
    task: AnyFrameworkTask,
    executions: Iterable[Execution] = (),
    progress: Progress | None = None,
) -> JobResult:
    """Return the result for a job and its attempts so far, oldest first."""
    attempts = list(executions)
    running = job.state == Job.State.RUNNING
    result = JobResult(
        task=task,
        id=str(job.pk),
        status=STATUS[job.state],
        enqueued_at=None if job._state.adding else job.enqueued_at,
        started_at=attempts[0].started_at if attempts else job.started_at,
        last_attempted_at=job.started_at if running or not attempts else attempts[-1].started_at,
        finished_at=job.finished_at and (attempts[-1].finished_at if attempts else job.finished_at),
        args=_as_json(job.args),
        kwargs=_as_json(job.kwargs),
        backend=alias,
        errors=[
            TaskError(exception_class_path=e.error_type, traceback=e.traceback)
            for e in attempts
            if e.error_type
        ],
        worker_ids=[e.process for e in attempts]
        + ([job.process.name if job.process else "?"] if running else []),
        metadata=_as_json(job.metadata),
        progress=progress.value if progress else None,
    )
    object.__setattr__(result, "_return_value", _as_json(job.result))
    return result


def _as_json(document: Json) -> Json:
    """Replace a document that cannot be decoded with a text about it.

    TaskResult accepts only JSON.
    """
    return repr(document) if isinstance(document, Unreadable) else document
