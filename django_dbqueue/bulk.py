"""Bulk enqueue: calls of several tasks and pipelines, written together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from asgiref.sync import sync_to_async

from .compat import task_backends
from .tasks import AnyTask, PreparedCall, build_each

if TYPE_CHECKING:
    from .results import JobResult

# An alias in TASKS, and whether its jobs wait for the caller's commit.
Group = tuple[str, bool]


def enqueue_many(calls: Iterable[PreparedCall]) -> Sequence[JobResult]:
    """Enqueue calls of several tasks with a few statements, all or none.

    calls: those of ``prepare()``: ``[confirm.prepare(17), report.prepare("north", year=2027)]``.

    Returns one result for each call, in their order. Calls of backends in several databases are
    written in one transaction for each, which are committed one after the other. Calls of a backend
    of another kind, such as Django's ImmediateBackend, follow one by one. Raises the exceptions of
    ``enqueue()``, and TypeError for a value that is not a call; the message begins
    with the place of the call, such as ``calls[499]``, and nothing is enqueued.
    """
    if not isinstance(calls, Iterable):
        raise TypeError(
            f"{calls!r} is not a list of calls. Give a list, such as [task.prepare(1)]."
        )
    with ExitStack() as surroundings:
        bulk = _Bulk(surroundings)
        places = build_each(calls, bulk.add)
        results = bulk.enqueue()
    if len(results) == 1:
        return next(iter(results.values()))
    return [results[group][place] for group, place in places]


async def aenqueue_many(calls: Iterable[PreparedCall]) -> Sequence[JobResult]:
    """Asynchronous version of ``enqueue_many()``."""
    return await sync_to_async(enqueue_many)(calls)


class _Bulk:
    """The jobs of a bulk, in the groups that are written together.

    surroundings: enters the middleware around them.
    """

    def __init__(self, surroundings: ExitStack) -> None:
        self._surroundings = surroundings
        self._jobs: dict[Group, list[Any]] = {}
        self._tasks: dict[UUID, AnyTask] = {}
        self._blanks: dict[tuple[int, int], tuple[PreparedCall, Any]] = {}
        # Calls for Django's own backends, and for stand-ins in tests.
        self._others: dict[str, list[PreparedCall]] = {}

    def add(self, call: PreparedCall) -> tuple[Group, int]:
        """Check a call and build its job. Return its group, and its place there."""
        if not isinstance(call, PreparedCall):
            raise TypeError(
                f"{call!r} is not a call. Give those of prepare(), such as task.prepare(17)."
            )
        task, backend = call.task, cast(Any, call.task.get_backend())
        if not hasattr(backend, "insert_of"):
            group, calls = (task.backend, False), self._others.setdefault(task.backend, [])
            calls.append(call)
            return group, len(calls) - 1
        group = task.backend, backend.waits_for_commit(task)
        jobs = self._jobs.setdefault(group, [])
        jobs.append(backend.called(self._blank(backend, call), task, call.args, call.kwargs))
        self._tasks[jobs[-1].pk] = task
        return group, len(jobs) - 1

    def enqueue(self) -> dict[Group, Sequence[JobResult]]:
        """Write all jobs. Return the results of each group."""
        # The engine needs the models, which cannot be imported with the package.
        from .engine.enqueue import run_inserts

        found: dict[Group, Sequence[JobResult]] = {}
        inserts = []
        for group, jobs in self._jobs.items():
            of_group = cast(Any, task_backends[group[0]]).insert_of(jobs, self._task_of)
            found[group], insert = of_group
            inserts.append(insert)
        run_inserts(inserts)
        # Last: they may run at once, which no rollback undoes.
        for alias, calls in self._others.items():
            backend = cast(Any, task_backends[alias])
            found[alias, False] = [
                backend.enqueue(call.task, call.args, call.kwargs) for call in calls
            ]
        return found

    def _blank(self, backend: Any, call: PreparedCall) -> Any:
        # By identity: most calls share their task and its stages. The kept call keeps both alive.
        key = id(call.task), id(call.stages)
        if key not in self._blanks:
            blank = backend.blank(call.task, call.stages, self._surroundings)
            self._blanks[key] = call, blank
        return self._blanks[key][1]

    def _task_of(self, job: Any) -> AnyTask:
        return self._tasks[job.pk]
