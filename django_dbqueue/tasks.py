"""The ``@task`` decorator, and Task: a function that can be enqueued."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache, partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from asgiref.sync import sync_to_async
from django.db.models import Model

from . import task_options
from .backoff import Backoff, Constant, Exponential, Linear
from .compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_PRIORITY,
    DEFAULT_TASK_QUEUE_NAME,
    BaseTask,
    InvalidTask,
    task_backends,
)
from .core import serialization
from .core.transactions import on_commit_all
from .limits import Limit, Rate

if TYPE_CHECKING:
    from types import CoroutineType

    from typing_extensions import TypedDict, Unpack

    from .context import JobContext
    from .results import JobResult

    Enqueue = Literal["in_transaction", "on_commit"]

    class TaskOptions(TypedDict, total=False):
        """Options of ``@task``; Task describes them."""

        priority: int
        queue_name: str
        backend: str
        max_attempts: int | None
        backoff: Backoff | None
        retry_on: tuple[type[BaseException], ...]
        discard_on: tuple[type[BaseException], ...]
        timeout: float | None
        on_lost: Literal["retry", "fail"]
        atomic: bool
        delete_on_success: bool | None
        key: str | Callable[..., object] | None
        version: int | Callable[..., int | None] | None
        on_conflict: Literal["rerun", "skip", "once", "replace"]
        max_wait: timedelta | None
        concurrency: Limit | tuple[Limit, ...]
        rate: Rate | tuple[Rate, ...]
        enqueue: Enqueue
        expires: timedelta | None
        metadata: Mapping[str, object]


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
C = TypeVar("C")
Exceptions = tuple[type[BaseException], ...]
# A call for ``enqueue_many()``: its positional arguments, or its keyword arguments.
TaskCall = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(BaseTask[P, R], Generic[P, R]):
    """Task with this queue's options. For options that are None, the backend's ``OPTIONS`` apply.

    max_attempts: the number of attempts before a job is FAILED.
    backoff: the delay before the next attempt, in seconds, as
        ``(exception, task_result) -> seconds | None``.
    retry_on: the only exceptions after which a job is retried; empty means all.
    discard_on: exceptions that discard the job: no retry, no failure.
    timeout: the seconds that it may run; then it is stopped and has failed.
    on_lost: the action for a job whose process died while it ran: "retry" (at least three
        attempts), or "fail" for jobs that must not run twice.
    atomic: the task runs in a transaction of the queue's database that also settles the job: the
        task's effects there and its success are committed together or not at all.
    delete_on_success: keep nothing of a job that succeeded.
    key: the unique key: the task's jobs with one key share one row. Text, a saved model instance
        (its key is ``app.model:pk``), or a function of some of the call's arguments, by name.
    version: a call with a lower version than its key has already had does nothing. A whole number,
        or a function of some of the call's arguments, by name.
    on_conflict: the effect of a call whose key has a job: "rerun" (a waiting job gets the
        arguments, a running job is run once more afterwards), "skip" (a waiting or running job
        stands), "once" (the existing job stands, also when it has finished), or "replace" (like
        "rerun", and the job also gets the time).
    max_wait: with "replace", the longest time that a job can be postponed, counted from its first
        enqueue.
    concurrency: a limit(), or several: the number of its jobs with something in common that run at
        a time, over all hosts.
    rate: a Rate, or several: the rate at which such jobs start.
    enqueue_when: the option ``enqueue`` of ``@task`` and ``using()``: "in_transaction" (a job is
        written in the caller's transaction of the queue's database), or "on_commit" (once all of
        the caller's open transactions have committed).
    expires: the time by which a job must start, or it is discarded: a timedelta from the earliest
        time it may run; or, for one call, an aware datetime.
    run_after: the earliest time it may start: an aware datetime, or a timedelta from the enqueue.
    metadata: the caller's notes on a job; JSON, never passed to the function.
    own_options: the names of the options that ``using()`` has set for some calls.
    """

    run_after: datetime | timedelta | None = None  # type: ignore[assignment]
    max_attempts: int | None = None
    backoff: Backoff | None = None
    retry_on: Exceptions = ()
    discard_on: Exceptions = ()
    timeout: float | None = None
    on_lost: Literal["retry", "fail"] = "retry"
    atomic: bool = False
    delete_on_success: bool | None = None
    key: str | Model | Callable[..., object] | None = None
    version: int | Callable[..., int | None] | None = None
    on_conflict: Literal["rerun", "skip", "once", "replace"] = "rerun"
    max_wait: timedelta | None = None
    concurrency: Limit | tuple[Limit, ...] = ()
    rate: Rate | tuple[Rate, ...] = ()
    enqueue_when: Enqueue | None = None
    expires: timedelta | datetime | None = None
    metadata: Mapping[str, object] = field(default_factory=dict, hash=False)
    own_options: frozenset[str] = field(default=frozenset(), repr=False)

    if TYPE_CHECKING:
        # The framework's methods, with other return types and with docstrings for editors.
        def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobResult:  # type: ignore[override]
            """Write one job that calls the task with these arguments.

            The job is written in the caller's transaction, or with ``enqueue="on_commit"`` after
            it. The result has the job's id at once.
            """

        async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobResult:  # type: ignore[override]
            """Asynchronous version of ``enqueue()``."""

        def get_result(self, result_id: str) -> JobResult:  # type: ignore[override]
            """Return the result of the job with that id.

            Raises TaskResultDoesNotExist, and TaskResultMismatch for a job of another task.
            """

        async def aget_result(self, result_id: str) -> JobResult:  # type: ignore[override]
            """Asynchronous version of ``get_result()``."""

        # A coroutine function returns a Coroutine to mypy, and a CoroutineType to pyright.
        @overload
        def call(self: Task[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T: ...
        @overload
        def call(
            self: Task[P, CoroutineType[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
        ) -> T: ...
        @overload
        def call(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
        def call(self, *args: P.args, **kwargs: P.kwargs) -> object:
            """Run the task here and now, without the queue, and return its return value."""

        @overload
        async def acall(
            self: Task[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
        ) -> T: ...
        @overload
        async def acall(
            self: Task[P, CoroutineType[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
        ) -> T: ...
        @overload
        async def acall(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
        async def acall(self, *args: P.args, **kwargs: P.kwargs) -> object:
            """Asynchronous version of ``call()``."""

    def __post_init__(self) -> None:
        # By name: in a slotted dataclass, super() finds the class from before the slots were added.
        BaseTask.__post_init__(self)
        task_options.check(self)

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | timedelta | None = None,
        expires: datetime | timedelta | None = None,
        backend: str | None = None,
        metadata: Mapping[str, object] | None = None,
        key: str | Model | None = None,
        version: int | None = None,
        on_conflict: Literal["rerun", "skip", "once", "replace"] | None = None,
        max_wait: timedelta | None = None,
        max_attempts: int | None = None,
        backoff: Constant | Linear | Exponential | None = None,
        timeout: float | None = None,
        on_lost: Literal["retry", "fail"] | None = None,
        delete_on_success: bool | None = None,
        concurrency: Limit | tuple[Limit, ...] | None = None,
        rate: Rate | tuple[Rate, ...] | None = None,
        enqueue: Enqueue | None = None,
    ) -> Task[P, R]:
        """Return the same task with other settings for the jobs enqueued through it.

        None leaves a setting as it is. Raises InvalidTask for an invalid value.
        """
        changes: dict[str, Any] = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "expires": expires,
            "backend": backend,
            "metadata": metadata,
            "key": key,
            "version": version,
            "on_conflict": on_conflict,
            "max_wait": max_wait,
            "max_attempts": max_attempts,
            "backoff": backoff,
            "timeout": timeout,
            "on_lost": on_lost,
            "delete_on_success": delete_on_success,
            "concurrency": concurrency,
            "rate": rate,
            "enqueue_when": enqueue,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        if backend is not None:
            task_options.check_backend(backend)
        return replace(self, own_options=self.own_options | given.keys(), **given)

    def enqueue_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Enqueue after the caller's open transactions have committed.

        Without an open transaction, enqueue immediately. Raises TypeError or ValueError at once for
        arguments that do not fit or are not JSON.
        """
        if hasattr(self.get_backend(), "waits_for_commit"):
            self.using(enqueue="on_commit").enqueue(*args, **kwargs)
        else:  # Django's own backends ignore the option.
            serialization.bind(self.func, self.takes_context, args, kwargs)
            on_commit_all(partial(self.enqueue, *args, **kwargs))

    def enqueue_many(self, calls: Iterable[TaskCall]) -> Sequence[JobResult]:
        """Enqueue many jobs with a few statements, all or none.

        Each call is a tuple of positional or a dict of keyword arguments.
        """
        backend: Any = self.get_backend()
        if not isinstance(calls, Iterable):
            raise TypeError(f"{calls!r} is not a list of calls. Give a list, such as [(1,), (2,)].")
        pairs = map(split, calls)
        if not hasattr(backend, "enqueue_many"):  # Django's own backends, stand-ins in tests.
            return [backend.enqueue(self, args, kwargs) for args, kwargs in pairs]
        return backend.enqueue_many(self, pairs)  # type: ignore[no-any-return]

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> PreparedCall:
        """Return a call for ``django_dbqueue.enqueue_many()``, which checks and writes it."""
        return PreparedCall(self, args, kwargs)

    async def aenqueue_many(self, calls: Iterable[TaskCall]) -> Sequence[JobResult]:
        """Asynchronous version of ``enqueue_many()``."""
        return await sync_to_async(self.enqueue_many)(calls)


AnyTask = Task[..., Any]


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call for ``enqueue_many()``, made by ``Task.prepare()`` or ``Pipeline.prepare()``."""

    task: AnyTask
    args: tuple[object, ...]
    kwargs: dict[str, object]
    stages: tuple[AnyTask, ...] = ()


@lru_cache(maxsize=1000)
def is_coroutine(function: Callable[..., object]) -> bool:
    """Return True if a task's function is an ``async def``.

    Cached, as a worker needs it twice per job.
    """
    return iscoroutinefunction(function)


@overload
def task(function: Callable[P, R], /) -> Task[P, R]: ...
@overload
def task(
    *, takes_context: Literal[True], **options: Unpack[TaskOptions]
) -> Callable[[Callable[Concatenate[JobContext, P], R]], Task[P, R]]: ...
@overload
def task(
    *, takes_context: Literal[False] = False, **options: Unpack[TaskOptions]
) -> Callable[[Callable[P, R]], Task[P, R]]: ...
def task(
    function: Callable[..., object] | None = None,
    *,
    priority: int = DEFAULT_TASK_PRIORITY,
    queue_name: str = DEFAULT_TASK_QUEUE_NAME,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: bool = False,
    **options: Any,
) -> object:
    """Make a module-level function a task.

    This is Django's own decorator, which also takes Task's options on every version of Django.
    Raises InvalidTask for a value that the backend cannot serve, TypeError for an unknown option.
    """
    if "run_after" in options:
        raise TypeError(
            "run_after cannot be defined statically with the @task decorator. "
            "Use .using(run_after=...) to set it dynamically."
        )

    for name in ("own_options", "enqueue_when"):
        if name in options:
            raise TypeError(f"{name} is not an option of the @task decorator. Leave it out.")
    options["enqueue_when"] = options.pop("enqueue", None)
    if isinstance(options.get("expires"), datetime):
        raise InvalidTask(
            "expires of a task must be a timedelta: all jobs after that time would be discarded. "
            "Use .using()."
        )

    task_options.check_backend(backend)

    def decorate(func: Callable[..., object]) -> Task[..., object]:
        task_class = task_backends[backend].task_class
        if not issubclass(task_class, Task):
            task_class = Task  # A stand-in backend, as in tests, must still accept the options.
        return task_class(
            func=func,
            priority=priority,
            queue_name=queue_name,
            backend=backend,
            takes_context=takes_context,
            **options,
        )

    return decorate(function) if function else decorate


def build_each(calls: Iterable[C], build: Callable[[C], T]) -> list[T]:
    """Build something of each call. The error for a call names its place: ``calls[499]: ...``."""
    built: list[T] = []
    try:
        for call in calls:
            built.append(build(call))  # noqa: PERF401 - its length is the place.
    except Exception as error:
        error.args = (f"calls[{len(built)}]: {error}",)
        raise
    return built


def split(call: TaskCall) -> tuple[Sequence[object], Mapping[str, object]]:
    """Return the positional and the keyword arguments of a call.

    Raises TypeError for a value that is not a call.
    """
    match call:
        case tuple():
            return call, {}
        case dict():
            return (), call
        case _:
            raise TypeError(
                f"{call!r} is not a call. Give a tuple of positional or a dict of keyword "
                f"arguments, such as ({call!r},)."
            )
