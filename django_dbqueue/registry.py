"""Registry: find the modules that hold tasks, and the task at a job's path."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING

from django.apps import apps as django_apps
from django.utils.module_loading import module_has_submodule

from . import limits
from .compat import FrameworkTask
from .core.safe_log import logger
from .core.transactions import is_conflict, writing
from .exceptions import InvalidTaskPath
from .tasks import AnyTask, Task, is_coroutine

if TYPE_CHECKING:
    from .models import ClaimedJob, Job


# The modules of ``contrib`` that hold tasks.
READY_MADE = ("tasks", "operations", "mail")


def modules_with_tasks(modules: Iterable[str]) -> list[str]:
    """Return these modules, the ``tasks`` module of each installed app, and the package's own."""
    apps = [
        f"{config.name}.tasks"
        for config in django_apps.get_app_configs()
        if module_has_submodule(config.module, "tasks")
    ]
    return [*(f"django_dbqueue.contrib.{name}" for name in READY_MADE), *apps, *modules]


def discover(modules: Iterable[str]) -> list[str]:
    """Import the modules that hold tasks, including these.

    Returns the modules that cannot be imported; the reason is logged.
    """
    broken = []
    for name in modules_with_tasks(modules):
        try:
            import_module(name)
        except Exception:
            broken.append(name)
            logger.exception(
                "tasks: %s cannot be imported; jobs of its tasks are left to other workers", name
            )
    return broken


def load(path: str) -> AnyTask:
    """Return the task at a job's path.

    Never imports a module: the path comes from a row of a table, and finds only imported modules.
    Raises InvalidTaskPath for anything that does not carry ``@task``.
    """
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if found is None:
        raise InvalidTaskPath(
            f"{path!r} is not known here. Deploy the code that has it, in the module tasks of an "
            "installed app or in one that OPTIONS['task_modules'] names: waiting jobs then run and "
            "a failed job can be retried. Or discard the job."
        )
    if not isinstance(found, FrameworkTask):
        raise InvalidTaskPath(
            f"{path!r} is a {type(found).__name__}, not a task. Decorate it with @task, or discard "
            "the job."
        )
    if isinstance(found, Task):
        return found
    # Made by another backend: this package's defaults apply.
    return Task(**{each.name: getattr(found, each.name) for each in fields(found)})


def tasks_in(modules: Iterable[str]) -> dict[str, AnyTask]:
    """Return the tasks of ``modules_with_tasks(modules)``, as far as imported, by path."""
    loaded = (
        vars(sys.modules[name]) for name in modules_with_tasks(modules) if name in sys.modules
    )
    return {
        each.module_path: each
        for module in loaded
        for each in list(module.values())
        if isinstance(each, Task)
    }


def unlimited_tasks(modules: Iterable[str]) -> list[str]:
    """Return the paths of the imported tasks that have no limits."""
    found = []
    for path in tasks_in(modules):
        # By its path: the module may also hold a variant of the task, made by using().
        with suppress(InvalidTaskPath):
            if not limits.of_task(load(path)):
                found.append(path)
    return found


def coroutine_tasks(modules: Iterable[str]) -> list[str]:
    """Return the paths of the imported tasks that are ``async def`` functions."""
    return [path for path, task in tasks_in(modules).items() if is_coroutine(task.func)]


def decide_limits(job: ClaimedJob) -> None:
    """Set the limits of a claimed job that was enqueued by SQL: the call's, else its task's.

    If they cannot be computed, the job is refused. Raises OperationalError for a conflict with
    another transaction.
    """
    try:
        task = load(job.task)
        if limits.of_task(task) or job.options:
            # A savepoint: a key function that runs a query must not end the claim's transaction.
            with writing(job._state.db):
                job.limits = limits.of_call(task, job.args, job.kwargs, job.options)
    except InvalidTaskPath as error:
        job.refused = error
    except (Exception, SystemExit) as error:
        if is_conflict(error):
            raise
        job.refused = ValueError(
            f"The limits of the job cannot be computed: {type(error).__name__}: {error}"
        )


def task_of(job: Job, alias: str) -> AnyTask:
    """Return the job's task as it was enqueued.

    Raises InvalidTaskPath if its path no longer has a task.
    """
    return _as_enqueued(load(job.task), job, alias)


def task_or_stand_in(job: Job, alias: str) -> AnyTask:
    """Return the job's task, or a stand-in if the task is gone.

    The stand-in has the same path and cannot be called.
    """
    try:
        return task_of(job, alias)
    except InvalidTaskPath:
        return _as_enqueued(_stand_in(job.task), job, alias)


def _as_enqueued(task: AnyTask, job: Job, alias: str) -> AnyTask:
    """Return a copy of the task with the job's settings, made without the constructor.

    The constructor would validate the task, and a job whose queue is gone from ``QUEUES`` could not
    be read.
    """
    wanted: dict[str, object] = {
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


def _stand_in(path: str) -> AnyTask:
    def gone(*args: object, **kwargs: object) -> None:
        load(path)

    gone.__module__, _, gone.__qualname__ = path.rpartition(".")
    gone.__name__ = gone.__qualname__
    task = object.__new__(Task)
    for each in fields(Task):
        object.__setattr__(task, each.name, gone if each.name == "func" else each.default)
    return task
