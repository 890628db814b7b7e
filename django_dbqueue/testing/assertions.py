"""Assertions about the jobs that a test has enqueued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db import connections

from ..core import serialization
from ..core.transactions import CommitHook
from ..models import Job
from ..tasks import AnyTask, Task
from .run import database_backend, run_commit_hooks

# The longest difference to an expected time, and the most jobs in a message.
CLOSE, SHOWN = timedelta(seconds=1), 20


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
    run_commit_hooks()
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

    Raises AssertionError with the jobs of the task that there are, or else with those of other
    tasks.
    """
    found = enqueued(task, **expected)
    if len(found) != times if times is not None else not found:
        wanted = "a job" if times is None else f"{times} job{'s' * (times != 1)}"
        raise AssertionError(f"Expected {wanted}{_described(task, expected, len(found))}")
    return found


def assert_not_enqueued(task: AnyTask, **expected: Any) -> None:
    """Assert that no such job was enqueued. As ``assert_enqueued(…, times=0)``."""
    assert_enqueued(task, times=0, **expected)


def _jobs_of(task: AnyTask) -> list[Job]:
    if not isinstance(task, Task):
        raise TypeError(f"{task!r} is no task of django_dbqueue. Give a function with @task.")
    backend = database_backend(task.backend, "enqueued()")
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
    said = f" of {task.module_path}{' with ' if wanted else ''}{wanted}, and found {number}."
    if own := _jobs_of(task):
        said += f" The jobs of the task are:\n{_listed(own)}"
    else:
        database = database_backend(task.backend, "enqueued()").database
        others = _listed(list(Job.objects.using(database).order_by("pk")))
        said += f" The task has no jobs; the backend {task.backend!r} has:\n{others}"
    if hooks := sum(map(_hooks_of_the_project, connections.all(initialized_only=True))):
        said += (
            f"\nHooks of on_commit() that have not run: {hooks}. "
            "captureOnCommitCallbacks(execute=True) runs them."
        )
    return said


def _hooks_of_the_project(connection: Any) -> int:
    return sum(not isinstance(hook[1], CommitHook) for hook in connection.run_on_commit)


def _listed(jobs: Sequence[Job]) -> str:
    lines = [f"  {_one_line(job)}" for job in jobs[:SHOWN]]
    if len(jobs) > SHOWN:
        lines.append(f"  and {len(jobs) - SHOWN} more")
    return "\n".join(lines) or "  none"


def _one_line(job: Job) -> str:
    given = [*map(repr, job.args), *(f"{name}={value!r}" for name, value in job.kwargs.items())]
    key = f", key {job.key.partition(' ')[2]!r}" if job.key else ""
    return (
        f"{job.task}({', '.join(given)}): {job.state}, queue {job.queue!r}{key}, "
        f"run_after {job.run_after:%Y-%m-%d %H:%M:%S}"
    )
