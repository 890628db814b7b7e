"""``shared_task()``: a task of this queue with Celery's options and methods."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, overload

from django.conf import settings
from django.utils import timezone

from ...exceptions import Retried, TimedOut
from ...tasks import Task, task
from ..usual_place import usual_place
from .canvas import Signature, known_tasks
from .options import TIMES, Backoff, last_error, rate_of, settings_of
from .results import AsyncResult
from .subset import Subset, refuse

if TYPE_CHECKING:
    from ...context import JobContext

P = ParamSpec("P")
R = TypeVar("R")

# Raised by ``self.retry()``, and in a task past its time limit.
Retry = Retried
SoftTimeLimitExceeded = TimedOut

# One more is the largest ``max_attempts``.
MOST_RETRIES = 32766


class MaxRetriesExceededError(Exception):
    """Raised by ``retry()`` without ``exc`` in the last attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Celery's options of a task, as far as Task has no equal.

    function: the decorated function, with ``self`` if ``bind``.
    defaults: options of ``apply_async()`` that the decorator sets.
    """

    function: Callable[..., Any]
    bind: bool
    name: str
    max_retries: int
    default_retry_delay: float
    defaults: Mapping[str, Any]


@dataclass(frozen=True)
class Request(Subset):
    """The call of a bound task: ``self.request``.

    args, kwargs: the arguments.
    context: the JobContext, which has progress, metadata and more; None if the task was called
        directly, without the queue.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    context: JobContext | None = None

    @property
    def called_directly(self) -> bool:
        """True if the task was called without the queue."""
        return self.context is None

    @property
    def id(self) -> str | None:
        """The id of the job."""
        return str(self.context.task_result.id) if self.context else None

    @property
    def retries(self) -> int:
        """The number of failed attempts before this one; 0 for the first."""
        # A stand-in backend in tests has no job.
        job: Any = getattr(self.context, "job", None)
        return job.failures if job else 0

    @property
    def task(self) -> str | None:
        """The path of the task."""
        return str(self.context.task_result.task.module_path) if self.context else None

    @property
    def hostname(self) -> str | None:
        """The name of the worker process."""
        return str(self.context.task_result.worker_ids[-1]) if self.context else None

    @property
    def delivery_info(self) -> dict[str, Any]:
        """``routing_key``, the queue, and ``priority``, as ``@task`` has it."""
        if self.context is None:
            return {}
        own = self.context.task_result.task
        return {"exchange": "", "routing_key": own.queue_name, "priority": own.priority}


_request: ContextVar[Request | None] = ContextVar("dbqueue_celery_request", default=None)


@contextmanager
def _during(request: Request) -> Iterator[None]:
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTask(Subset, Task[P, R]):
    """A Task that also has Celery's methods, made by ``shared_task()``."""

    celery: _Options = field(repr=False, hash=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the task here and now, without the queue."""
        with _during(Request(list(args), kwargs)):
            leading = (self,) if self.celery.bind else ()
            return self.celery.function(*leading, *args, **kwargs)  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """Celery's name of the task. Its jobs have its path."""
        return self.celery.name

    @property
    def max_retries(self) -> int:
        """The number of attempts after the first."""
        return self.celery.max_retries

    @property
    def request(self) -> Request:
        """The call that runs. Raises TypeError without ``bind=True``."""
        if not self.celery.bind:
            refuse(self.module_path, "request", None, "Give @shared_task bind=True.")
        return _request.get() or Request([], {})

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult:
        """Enqueue a job, in the caller's transaction."""
        return self.apply_async(args, kwargs)

    def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Enqueue a job after the caller's open transactions have committed."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async(
        self,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Enqueue a job.

        options: countdown and expires, in seconds from now; eta, an aware datetime; expires as a
            datetime; queue; priority; soft_time_limit and time_limit, in seconds.

        Raises TypeError for another option, and InvalidTask for an invalid value.
        """
        result = self._with(options).enqueue(*(args or ()), **(kwargs or {}))
        return AsyncResult(str(result.id))

    def apply_async_on_commit(
        self,
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """``apply_async()`` after the caller's open transactions have committed."""
        self._with(options).enqueue_on_commit(*(args or ()), **(kwargs or {}))

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """Return a signature of the task: a call to be made later."""
        return Signature(self, args, kwargs)

    def si(self, *args: Any, **kwargs: Any) -> Signature:
        """Return an immutable signature: one that takes no further arguments."""
        return Signature(self, args, kwargs, immutable=True)

    def retry(
        self,
        *,
        exc: BaseException | type[BaseException] | None = None,
        countdown: float | None = None,
        eta: datetime | None = None,
        max_retries: int | None = None,
        **others: Any,
    ) -> NoReturn:
        """End this attempt as failed, and run the job again.

        exc: the exception that ends the last attempt; default: MaxRetriesExceededError.
        countdown, eta: seconds until the next attempt, or its time, an aware datetime; at once if
            that is past. Default: the task's ``default_retry_delay``.
        max_retries: a lower limit than the task's.

        Raises Retry; in the last attempt ``exc``; and TypeError for a value that is not served.
        """
        request, error = self.request, sys.exc_info()[1]
        where = f"retry() of {self.module_path}"
        exc = exc() if isinstance(exc, type) else exc
        for name, value in others.items():
            refuse(where, name, value)
        if request.called_directly:
            raise exc or Retry(reason="Task can be retried") from error
        limit = self.max_retries if max_retries is None else max_retries
        if limit > self.max_retries:
            remedy = "Give it to @shared_task, which stores it with the job."
            refuse(where, "max_retries", max_retries, remedy)
        if request.retries >= limit:
            last = exc or MaxRetriesExceededError(f"{self.name}[{request.id}] has no retries left.")
            last_error.set(last)
            raise last from (None if last is error else error)
        delay = self.celery.default_retry_delay if countdown is None else countdown
        if eta is not None:
            if timezone.is_aware(eta) != settings.USE_TZ:
                refuse(where, "eta", eta, "Take the time from django.utils.timezone.")
            delay = (eta - timezone.now()).total_seconds()
        is_past = isinstance(delay, int | float) and delay < 0
        raise Retry(0.0 if is_past else delay) from (exc or error)

    def _with(self, options: Mapping[str, Any]) -> SharedTask[P, R]:
        """Return the task with the options of one call."""
        where = f"apply_async() of {self.module_path}"
        given = {**self.celery.defaults, **options}
        return self.using(**settings_of(given, where))  # type: ignore[return-value]


@overload
def shared_task(function: Callable[P, R], /) -> SharedTask[P, R]: ...
@overload
def shared_task(
    *, bind: Literal[True], **options: Any
) -> Callable[[Callable[Concatenate[Any, P], R]], SharedTask[P, R]]: ...
@overload
def shared_task(
    *, bind: Literal[False] = False, **options: Any
) -> Callable[[Callable[P, R]], SharedTask[P, R]]: ...
def shared_task(
    function: Callable[..., Any] | None = None, *, bind: bool = False, **options: Any
) -> Any:
    """Make a function a task, with the options of Celery's ``@shared_task``.

    bind: the function's first argument is the task, with ``request`` and ``retry()``.
    autoretry_for, dont_autoretry_for: exceptions after which a job is retried, or not.
    max_retries: attempts after the first; default 3, None for the most that there can be.
    default_retry_delay: seconds before a retry; default 180.
    retry_backoff, retry_backoff_max, retry_jitter: the delay of automatic retries: see
        docs/from_celery.md.
    retry_kwargs: ``max_retries`` and ``countdown`` of automatic retries.
    queue, priority, expires, soft_time_limit, time_limit: as for ``apply_async()``.
    rate_limit: a number of starts per second, or text such as "100/m"; over all hosts.
    acks_late: False for a task that must not run again if its process dies.
    name: for ``task.name``.

    Raises TypeError for an option that is not served, and InvalidTask for an invalid value.
    """
    if function is not None:
        return _shared(function, bind, options)
    return lambda each: _shared(each, bind, dict(options))


def _shared(function: Callable[..., Any], bind: bool, options: dict[str, Any]) -> Any:
    path = f"{function.__module__}.{function.__qualname__}"
    if inspect.iscoroutinefunction(function):
        refuse(path, "function", function, "Use @task of django_dbqueue, which takes coroutines.")
    name = options.pop("name", None) or path
    again = dict(options.pop("retry_kwargs", {}))
    max_retries = options.pop("max_retries", 3)
    max_retries = again.pop("max_retries", max_retries)
    max_retries = MOST_RETRIES if max_retries is None else max_retries
    delay = options.pop("default_retry_delay", 180)
    retry_for = tuple(options.pop("autoretry_for", ()))
    if options.get("soft_time_limit") and Exception in retry_for:
        retry_for += (SoftTimeLimitExceeded,)  # An Exception in Celery.
    factor = options.pop("retry_backoff", False)
    backoff = Backoff(
        delay=again.pop("countdown", delay),
        factor=factor and max(1, int(factor)),
        longest=int(options.pop("retry_backoff_max", 600)),
        jitter=bool(options.pop("retry_jitter", True)),
        never_for=tuple(options.pop("dont_autoretry_for", ())),
    )
    for unknown, value in again.items():
        refuse(path, f"retry_kwargs[{unknown!r}]", value)
    early = options.pop("acks_late", True) is False
    own: dict[str, Any] = {
        # Never empty, which would mean all: Celery retries only these.
        "retry_on": (*retry_for, Retry),
        "backoff": backoff,
        "max_attempts": max_retries + 1,
        "on_lost": "fail" if early and not options.get("retry_on_worker_lost") else "retry",
        "rate": rate_of(options.pop("rate_limit", None), path),
    }
    defaults = {each: options[each] for each in TIMES if options.get(each) is not None}
    own = {**usual_place(), **own, **settings_of(options, f"@shared_task of {path}")}
    celery = _Options(
        function=function,
        bind=bind,
        name=name,
        max_retries=max_retries,
        default_retry_delay=delay,
        defaults=defaults,
    )
    if bind:
        function = _bound(function)
    plain = task(takes_context=bind, **own)(function)  # type: ignore[call-overload]
    made: Any = SharedTask(
        **{each.name: getattr(plain, each.name) for each in fields(plain)}, celery=celery
    )
    if bind:
        function.task = made  # type: ignore[attr-defined]
    known_tasks[path] = made
    return made


def _bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the job's context as first argument, in the place of ``self``."""

    @functools.wraps(function)
    def bound(context: Any, /, *args: Any, **kwargs: Any) -> Any:
        with _during(Request(list(args), kwargs, context)):
            return function(bound.task, *args, **kwargs)  # type: ignore[attr-defined]

    own = list(inspect.signature(function).parameters.values())[1:]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_ONLY)
    if any(each.name == "context" for each in own):
        # Two parameters of a signature cannot have one name. Arguments are checked when it runs.
        args = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        own = [args, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    bound.__signature__ = inspect.Signature([context, *own])  # type: ignore[attr-defined]
    return bound
