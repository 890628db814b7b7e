"""Batches: many jobs, and a callback job that is enqueued when all of them have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import connections

from .compat import DEFAULT_TASK_BACKEND_ALIAS, AnyFrameworkTask, InvalidTask, task_backends
from .core.cancellation import run_to_completion
from .core.serialization import Json
from .core.transactions import on_commit_all

if TYPE_CHECKING:
    from .models import Batch, Job


@dataclass(kw_only=True, eq=False)
class Entry:
    """A ``with`` block of a batch.

    added: the jobs enqueued in the block, unless it is the opener's block.
    began: the ids of jobs with keys whose run the opener's block has enqueued.
    met: those of jobs with a waiting or requested run that took over a call of that block.
    waits_for_commit: whether a call in the block has been left for the caller's commit.
    has_failed: whether the block has ended with an exception.
    outer: the block around it.
    token: resets ``current`` in the context that the block began in.
    has_ended: whether the block has ended.
    """

    id: UUID
    database: str
    opens: bool
    added: list[Sequence[Job]] = field(default_factory=list)
    began: set[UUID] = field(default_factory=set)
    met: set[UUID] = field(default_factory=set)
    waits_for_commit: bool = False
    has_failed: bool = False
    outer: Entry | None = field(init=False)
    token: Token[Entry | None] = field(init=False)
    has_ended: bool = False


# The block that newly enqueued jobs belong to.
current: ContextVar[Entry | None] = ContextVar("dbqueue_batch", default=None)


class batch:
    """Group of jobs: jobs enqueued inside ``with batch(on_finish=summarise) as b:`` belong to it.

    on_finish: a task that is enqueued when all jobs of the batch have ended, in any state. Its
        argument is the batch's id.
    on_success: a second such task, enqueued if all jobs were successful.
    description: text for people, cut after 200 characters.
    backend: the alias in ``TASKS`` of the backend whose jobs belong to it.

    ``async with`` works too. A batch can be entered again, by one of its jobs or by any other code,
    and takes more jobs until it has finished; after that, an enqueue call in a block raises
    BatchFinished. A batch does not finish before its first block, the opener's, has ended. An
    exception in that block discards the batch's waiting jobs, and no callback follows; an exception
    in a later block discards the waiting jobs that were added in it. Several coroutines and threads
    may be in blocks of one object at once.

    Raises TypeError for a backend of another kind, and InvalidTask for a callback that is no task
    or cannot be called with the batch's id.
    """

    _backend: Any

    def __init__(
        self,
        *,
        on_finish: AnyFrameworkTask | None = None,
        on_success: AnyFrameworkTask | None = None,
        description: str = "",
        backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    ) -> None:
        self._backend = task_backends[backend]
        self._prepare(is_new=True)
        if not hasattr(self._backend, "columns_of"):
            raise TypeError(
                f"A batch needs a DatabaseBackend; TASKS[{backend!r}] is a "
                f"{type(self._backend).__qualname__}."
            )
        if not isinstance(description, str):
            raise TypeError(f"description must be text, not {description!r}.")
        self._batch: Batch = self._backend.batches.model(description=description[:200])
        self._batch._state.db = self._backend.database
        self._batch.on_finish = self._callback("on_finish", on_finish)
        self._batch.on_success = self._callback("on_success", on_success)

    @classmethod
    def of(cls, pk: UUID | str, backend: str = DEFAULT_TASK_BACKEND_ALIAS) -> batch:
        """Return the batch with an id, to enter it again or to read its progress.

        Raises Batch.DoesNotExist, and ValidationError for text that is no UUID.
        """
        found = object.__new__(cls)
        found._backend = task_backends[backend]
        found._prepare(is_new=False)
        found._batch = found._backend.batches.get(pk=pk)
        return found

    @property
    def id(self) -> UUID:
        """Id of the batch: the argument of its callbacks, and of ``batch.of()``."""
        return self._batch.pk

    def progress(self) -> dict[str, int]:
        """Return the number of the batch's jobs by state, such as ``{"successful": 3}``.

        A state without jobs is left out.
        """
        return dict(self._batch.progress())

    def discard(self) -> int:
        """Discard the batch's waiting jobs, and requested reruns of its jobs. Return their number.

        Running jobs continue, and the batch finishes with them.
        """
        return self._batch.discard()

    def __enter__(self) -> batch:
        self._push(self._open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(self._pop(), error)

    async def __aenter__(self) -> batch:
        # Set the context variable in the caller's own context, not in that of the thread.
        entry, cancellation = await run_to_completion(self._open)
        if cancellation:
            # The block does not begin, and __aexit__() is not called.
            await run_to_completion(partial(self._close, entry, cancellation))
            raise cancellation
        self._push(entry)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        closing = partial(self._close, self._pop(), error)
        _, cancellation = await run_to_completion(closing)
        if cancellation:
            raise cancellation

    def _prepare(self, *, is_new: bool) -> None:
        self._is_new = is_new
        # The blocks that have not ended, of all contexts and threads.
        self._entries: list[Entry] = []
        self._lock = threading.Lock()

    def _open(self) -> Entry:
        # Other threads wait until the opener has written the batch.
        with self._lock:
            entry = Entry(id=self.id, database=self._backend.database, opens=self._is_new)
            if self._is_new:
                self._with_its_jobs(partial(self._backend.open_batch, self._batch))
                self._is_new = False
        return entry

    def _push(self, entry: Entry) -> None:
        entry.outer = current.get()
        entry.token = current.set(entry)
        with self._lock:
            self._entries.append(entry)

    def _pop(self) -> Entry:
        """Return the entry of the block that ends: the newest that began in this context.

        A block can end in another context, such as that of an async generator which the event loop
        closes. It takes the newest entry, so that the opener's is the last.
        """
        innermost = current.get()
        with self._lock:
            entry = next(filter(_began_here, reversed(self._entries)), self._entries[-1])
            self._entries.remove(entry)
        entry.has_ended = True
        while innermost and innermost.has_ended:
            innermost = innermost.outer
        current.set(innermost)
        return entry

    def _close(self, entry: Entry, error: BaseException | None) -> None:
        entry.has_failed = error is not None
        is_to_wait = entry.waits_for_commit and not entry.has_failed
        when = on_commit_all if is_to_wait else self._with_its_jobs
        when(partial(self._leave, entry))

    def _with_its_jobs(self, action: Callable[[], object]) -> None:
        """Run ``action`` when jobs enqueued now are written.

        In a transaction of another database, that is after the transaction's end.
        """
        if connections[self._backend.database].in_atomic_block:
            action()
        else:
            on_commit_all(action)

    def _leave(self, entry: Entry) -> None:
        if entry.has_failed and entry.opens:
            # The jobs enqueued before the error are not the whole batch: none of them may run, and
            # no callback may follow. Others wait for the jobs that were there before.
            self._batch.leave(list(entry.met - entry.began))
            self.discard()
            self._backend.batches.filter(pk=self.id, finished_at=None).update(
                on_finish=None, on_success=None
            )
        elif entry.has_failed:
            self._batch.withdraw([job.pk for jobs in entry.added for job in jobs])
        if entry.opens:
            self._backend.seal_batch(self.id)
        # It finishes now if it had no jobs at all, or if all of them have ended.
        on_commit_all(partial(self._backend.finish_batches, [self.id]))

    def _callback(self, name: str, task: object) -> Json:
        if task is None:
            return None
        if not isinstance(task, self._backend.task_class):
            raise InvalidTask(f"{name} must be a task that takes the batch's id, not {task!r}.")
        if (task.run_after, task.key, task.expires) != (None, None, None):
            raise InvalidTask(
                f"{name} is enqueued when the batch has finished. Leave its run_after, key and "
                "expires out."
            )
        try:
            return self._backend.columns_of(task, [str(self.id)])
        except TypeError as error:
            raise InvalidTask(f"{name} gets one argument, the batch's id: {error}") from None


def _began_here(entry: Entry) -> bool:
    """Test if a block began in this context. Resets ``current`` if it did."""
    try:
        current.reset(entry.token)
    except ValueError:
        return False
    return True
