"""Pipelines: one job that runs several tasks in order.

Each task gets the return value of the task before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async

from .compat import InvalidTask
from .core import serialization
from .tasks import AnyTask, PreparedCall, Task, TaskCall, split

if TYPE_CHECKING:
    from .results import JobResult


# Settings of ``using()`` that a job has once, whatever its stages.
_OF_THE_JOB = ("metadata", "key", "version", "on_conflict", "max_wait", "enqueue")


@dataclass(frozen=True)
class GoTo:
    """Returned by a stage: the job continues at another stage of its pipeline, with ``value``.

    stage: a task of the pipeline. The job continues at the next stage of that task, or at the first
        one if none follows. If the pipeline has no such stage, the attempt fails with ValueError.
    value: the argument of that stage; JSON.
    """

    stage: AnyTask
    value: object = None


@dataclass(frozen=True)
class Finish:
    """Returned by a stage: the job ends here, as successful.

    value: the result of the job; JSON.
    """

    value: object = None


@dataclass(frozen=True)
class FanOut:
    """Returned by a stage: one new job per value continues at the next stage, and this job ends.

    values: the arguments of the new jobs, one for each; JSON.

    The result of this job is the ids of the new jobs. They belong to its batch, if it has one. In
    the last stage, the attempt fails with ValueError.
    """

    values: Sequence[object]


@dataclass(frozen=True)
class Pipeline:
    """Stages, in order, made by ``pipeline()``.

    Each stage has the queue, priority, limits, timeout and retries of its task.
    """

    stages: tuple[AnyTask, ...]

    def using(self, **settings: Any) -> Pipeline:
        """Return the same pipeline with other settings for its jobs.

        The settings are run_after, expires, metadata, key, version, on_conflict, max_wait and
        enqueue, as for ``Task.using()``. Each stage must start before the job expires. Raises
        TypeError for another setting, which belongs to a stage, and InvalidTask for an invalid
        value.
        """
        if unknown := settings.keys() - {*_OF_THE_JOB, "run_after", "expires"}:
            raise TypeError(
                f"{unknown.pop()!r} is a setting of a stage. Give it to the stage, such as "
                "parse.using(queue_name='cpu')."
            )
        return replace(self, stages=(self.stages[0].using(**settings), *self.stages[1:]))

    def enqueue(self, *args: object, **kwargs: object) -> JobResult:
        """Write one job that starts at the first stage with these arguments.

        Raises TypeError or ValueError for arguments that do not fit or are not JSON, and TypeError
        for a backend of another kind.
        """
        return self._enqueue([(args, kwargs)])[0]

    async def aenqueue(self, *args: object, **kwargs: object) -> JobResult:
        """Asynchronous version of ``enqueue()``."""
        return await sync_to_async(self.enqueue, thread_sensitive=True)(*args, **kwargs)

    def enqueue_on_commit(self, *args: object, **kwargs: object) -> None:
        """Enqueue after the caller's open transactions have committed.

        Without an open transaction, enqueue immediately. Raises TypeError or ValueError at once for
        arguments that do not fit or are not JSON.
        """
        self.using(enqueue="on_commit").enqueue(*args, **kwargs)

    def enqueue_many(self, calls: Iterable[TaskCall]) -> Sequence[JobResult]:
        """Write many jobs, all or none.

        Each call is a tuple of positional or a dict of keyword arguments. Return one result for
        each, in their order. Raises TypeError or ValueError as ``enqueue()`` does.
        """
        return self._enqueue(map(split, calls))

    def prepare(self, *args: object, **kwargs: object) -> PreparedCall:
        """Return a call for ``django_dbqueue.enqueue_many()``, which checks and writes it.

        Raises TypeError for a backend of another kind.
        """
        self._backend()
        return PreparedCall(self.stages[0], args, kwargs, self.stages)

    def _enqueue(
        self, calls: Iterable[tuple[Sequence[object], Mapping[str, object]]]
    ) -> Sequence[JobResult]:
        return self._backend().enqueue_many(self.stages[0], calls, stages=self.stages)  # type: ignore[no-any-return]

    def _backend(self) -> Any:
        backend: Any = self.stages[0].get_backend()
        if not hasattr(backend, "enqueue_many"):
            raise TypeError(
                f"A pipeline needs a DatabaseBackend; TASKS[{backend.alias!r}] is a "
                f"{type(backend).__qualname__}."
            )
        return backend


def pipeline(*stages: AnyTask) -> Pipeline:
    """Make a pipeline of tasks; each task gets the return value of the task before it.

    ``pipeline(fetch, parse, index).enqueue(url)`` runs fetch(url), then parse with the return value
    of fetch, then index with the return value of parse.

    Raises InvalidTask for stages that cannot form a pipeline: none at all, a value that is no task,
    tasks of several backends, or a later stage that does not take one argument or has a setting
    of the whole job, such as ``run_after``, ``expires`` or a key of ``using()``.
    """
    if not stages:
        raise InvalidTask("A pipeline needs stages: pipeline(fetch, parse, index).")
    for place, stage in enumerate(stages):
        if not isinstance(stage, Task):
            raise InvalidTask(
                f"{stage!r} is not a task, and cannot be a stage. Decorate it with @task."
            )
        if stage.backend != stages[0].backend:
            raise InvalidTask(
                f"{stage.module_path} has the backend {stage.backend!r}, but the first stage has "
                f"{stages[0].backend!r}. Use one backend for all stages."
            )
        if place:
            _must_follow(stage)
    return Pipeline(stages)


def _must_follow(stage: AnyTask) -> None:
    leading = (None,) if stage.takes_context else ()
    try:
        serialization.signature_of(stage.func).bind(*leading, None)
    except TypeError as error:
        said = (
            f"{stage.module_path} gets one argument, the return value of the stage before it: "
            f"{error}."
        )
        raise InvalidTask(said) from None
    if own := stage.own_options & {"concurrency", "rate"}:
        raise InvalidTask(
            f"{min(own)} of the later stage {stage.module_path} cannot be set for one call. "
            "Give it to @task."
        )
    of_using = {name.removesuffix("_when") for name in stage.own_options}
    if of_the_job := of_using.intersection(_OF_THE_JOB):
        name = min(of_the_job)
        raise InvalidTask(
            f"{name} of the later stage {stage.module_path} is a setting of the whole job. "
            f"Give it to the pipeline: pipeline(...).using({name}=...)."
        )
    if stage.run_after is not None:
        raise InvalidTask(
            f"{stage.module_path} starts when the stage before it ends. Leave its run_after out."
        )
    if stage.expires is not None:
        raise InvalidTask(
            "The stages of a pipeline have one expiry. Leave expires of the later stage "
            f"{stage.module_path} out, and give it to the pipeline: "
            "pipeline(...).using(expires=...)."
        )
