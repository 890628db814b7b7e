"""Helpers for a project's own tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from .backend import DatabaseBackend
from .compat import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from .core import serialization
from .core.queue_selector import QueueSelector
from .engine.attempt_result import AttemptResult
from .engine.claim import claim, release
from .engine.dispatch import dispatch
from .engine.settle import settle
from .models import ClaimedJob, Job, Process
from .models.expressions import now_plus
from .registry import decide_limits, discover
from .runtime.shutdown import Shutdown
from .runtime.worker import executor
from .runtime.worker.async_pool import is_of_coroutine
from .runtime.worker.run_times import RunTimes
from .runtime.worker.services import WorkerServices
from .runtime.worker.task_call import CoroutineCall, ThreadCall
from .runtime.worker.watchdog import Watchdog
from .tasks import AnyTask, Task

_Call = ThreadCall | CoroutineCall

# The longest difference to an expected time, and the most jobs in a message.
CLOSE, SHOWN = timedelta(seconds=1), 20


def drain(backend: str = DEFAULT_TASK_BACKEND_ALIAS) -> int:
    """Run a backend's due jobs, and the jobs that they enqueue, one by one on this thread.

    backend: the alias in ``TASKS``.

    Returns the number of attempts. Raises TypeError for a backend of another kind. A task's
    exception is the outcome of its job, and is not raised.

    ``drain()`` works inside ``TestCase``, as no other process or connection takes part. Jobs that
    wait for their time, or for a retry, stay unchanged. KeyboardInterrupt ends it and releases the
    current job. A task's timeout is raised in it as in a worker: between two of the task's own
    instructions, not while it waits in C code; in a coroutine at an ``await``.
    """
    queue = _database_backend(backend, "drain()")
    discover(queue.config.task_modules)
    jobs, attempts = ClaimedJob.objects.using(queue.database), 0
    selector = QueueSelector(("*",), frozenset(queue.queues))
    call: list[_Call] = []
    with _process(queue) as process, _watched(queue, call):
        while True:
            dispatch(queue.database)
            lanes = [lane for lane in jobs.lanes() if selector.position(lane.queue) is not None]
            if not lanes:
                return attempts
            lane = max(lanes, key=lambda lane: lane.priority)
            for job in claim(jobs, lane, process, limit=1, decide_limits=decide_limits):
                call[:] = [_call(job)]
                _run(call[0], queue)
                call.clear()
                attempts += 1


def enqueued(
    task: AnyTask,
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    queue: str | None = None,
    key: str | None = None,
    run_after: datetime | timedelta | None = None,
) -> list[Job]:
    """Return the jobs of a task that a test has enqueued, in any state, in the order of their ids.

    args, kwargs: arguments that the calls must have. They are compared by the names of the
        parameters, with defaults, so it does not matter how the call was written; others may
        have any value.
    queue: the name of the queue.
    key: the key of the job, as the task's ``key`` returns it.
    run_after: a time, or a time after the call, to the second.

    Raises TypeError for what is no task, for a backend of another kind, and for arguments that the
    task does not have.
    """
    jobs, wanted = _jobs_of(task), _wanted(task, args, kwargs or {})
    return [
        job
        for job in jobs
        if _has_arguments(job, task, wanted)
        and queue in (None, job.queue)
        and (key is None or job.key == f"{task.module_path} {key}")
        and (run_after is None or _is_due_at(job, run_after))
    ]


def assert_enqueued(task: AnyTask, *, times: int | None = None, **expected: Any) -> list[Job]:
    """Assert that a task was enqueued, and return the jobs.

    times: the number of jobs; None means at least one. All other arguments are as for
        ``enqueued()``.

    Raises AssertionError with the jobs of the task that there are.
    """
    found = enqueued(task, **expected)
    if len(found) != times if times is not None else not found:
        wanted = "a job" if times is None else f"{times} job{'s' * (times != 1)}"
        raise AssertionError(f"Expected {wanted}{_described(task, expected, len(found))}")
    return found


def assert_not_enqueued(task: AnyTask, **expected: Any) -> None:
    """Assert that no such job was enqueued. As ``assert_enqueued(…, times=0)``."""
    assert_enqueued(task, times=0, **expected)


def _database_backend(alias: str, caller: str) -> DatabaseBackend:
    backend = task_backends[alias]
    if not isinstance(backend, DatabaseBackend):
        raise TypeError(
            f"TASKS[{alias!r}] is of {type(backend).__qualname__}; {caller} needs a "
            "DatabaseBackend."
        )
    return backend


def _jobs_of(task: AnyTask) -> list[Job]:
    if not isinstance(task, Task):
        raise TypeError(f"{task!r} is no task of django_dbqueue. Give a function with @task.")
    backend = _database_backend(task.backend, "enqueued()")
    jobs = Job.objects.using(backend.database).filter(task=task.module_path)
    return list(jobs.order_by("pk"))


def _wanted(
    task: AnyTask, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the expected arguments by the names of the parameters, as JSON."""
    signature = serialization.signature_of(task.func)
    bound = signature.bind_partial(*_leading(task), *args, **kwargs).arguments
    return {
        name: serialization.to_json(value, of=f"argument {name!r}")
        for name, value in list(bound.items())[len(_leading(task)) :]
    }


def _has_arguments(job: Job, task: AnyTask, wanted: Mapping[str, object]) -> bool:
    try:
        signature = serialization.signature_of(task.func)
        has = signature.bind(*_leading(task), *job.args, **job.kwargs)
    except TypeError:  # Enqueued by code with another signature.
        return False
    has.apply_defaults()
    return all(_as_json(has.arguments[name]) == value for name, value in wanted.items())


def _leading(task: AnyTask) -> tuple[None, ...]:
    """Return a place for the task's context, which is no argument of the call."""
    return (None,) if task.takes_context else ()


def _as_json(value: object) -> object:
    try:
        return serialization.to_json(value)
    except (TypeError, ValueError):  # A default that no call could have.
        return value


def _is_due_at(job: Job, run_after: datetime | timedelta) -> bool:
    at = job.enqueued_at + run_after if isinstance(run_after, timedelta) else run_after
    return abs(job.run_after - at) <= CLOSE


def _described(task: AnyTask, expected: Mapping[str, object], number: int) -> str:
    wanted = ", ".join(f"{name}={value!r}" for name, value in expected.items())
    there = _jobs_of(task)
    lines = [f"  {_one_line(job)}" for job in there[:SHOWN]]
    if len(there) > SHOWN:
        lines.append(f"  and {len(there) - SHOWN} more")
    jobs = "\n".join(lines) or "  none"
    return (
        f" of {task.module_path}{' with ' if wanted else ''}{wanted}, and found {number}. "
        f"The jobs of the task are:\n{jobs}"
    )


def _one_line(job: Job) -> str:
    given = [*map(repr, job.args), *(f"{name}={value!r}" for name, value in job.kwargs.items())]
    key = f", key {job.key.partition(' ')[2]!r}" if job.key else ""
    return (
        f"{job.task}({', '.join(given)}): {job.state}, queue {job.queue!r}{key}, "
        f"run_after {job.run_after:%Y-%m-%d %H:%M:%S}"
    )


def _call(job: ClaimedJob) -> _Call:
    return CoroutineCall(job) if is_of_coroutine(job, lambda task: None) else ThreadCall(job)


def _run(call: _Call, queue: DatabaseBackend) -> None:
    job = call.job
    try:
        outcome = executor.run(call, queue)
        if isinstance(outcome, AttemptResult):
            settle(queue.database, [outcome])
        if job.batch_id:
            queue.finish_batches([job.batch_id])
    except BaseException:
        release(queue.database, [job])
        raise


@contextmanager
def _watched(queue: DatabaseBackend, call: list[_Call]) -> Iterator[None]:
    """End the current call when its timeout has passed."""
    ended = Shutdown()
    services = WorkerServices(running=lambda: tuple(call))
    Watchdog(queue, float("inf"), RunTimes(), services).start(ended)
    try:
        yield
    finally:
        ended.request()


@contextmanager
def _process(queue: DatabaseBackend) -> Iterator[Process]:
    process = Process(
        name=f"drain:{os.getpid()}:{os.urandom(3).hex()}",
        kind=Process.Kind.WORKER,
        hostname="",
        pid=os.getpid(),
        release=queue.config.current_release,
        # No heartbeat follows: no other process may take its jobs while a test inspects them.
        expires_at=now_plus(86_400),
    )
    processes = Process.objects.using(queue.database)
    processes.register(process)
    try:
        yield process
    finally:
        processes.filter(pk=process.pk).erase()
