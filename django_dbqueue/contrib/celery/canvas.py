"""Signatures, chains, groups and chords: pipelines and batches, by Celery's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from ...batches import batch
from ...bulk import enqueue_many
from ...core import serialization
from ...pipelines import pipeline
from ...tasks import PreparedCall, task
from ..usual_place import usual_place
from .results import AsyncResult, GroupResult, TaskFailed, jobs
from .subset import Subset, refuse

if TYPE_CHECKING:
    from ...context import JobContext

# The tasks of the modules imported so far, by path. Each is a SharedTask.
known_tasks: dict[str, Any] = {}


@dataclass(frozen=True)
class Signature(Subset):
    """A call of a task to be made later, made by ``task.s()`` or ``task.si()``."""

    task: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    immutable: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """This signature, as a chain of one."""
        return (self,)

    def set(self, **options: Any) -> Signature:
        """Return the signature with options of ``apply_async()``."""
        return replace(self, options={**self.options, **options})

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Enqueue a job. Further arguments come before those of the signature."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        """Enqueue a job, with further arguments and options."""
        own = self._called_with(*args, **(kwargs or {})).set(**options)
        result: AsyncResult = own.task.apply_async(own.args, own.kwargs, **own.options)
        return result

    def _called_with(self, *args: Any, **kwargs: Any) -> Signature:
        """Return the signature with further arguments, which an immutable one does not take."""
        if self.immutable:
            return self
        return replace(self, args=(*args, *self.args), kwargs={**self.kwargs, **kwargs})

    def __or__(self, other: Signature | chain) -> chain:
        return chain(self, other)


class chain(Subset):
    """Tasks that run one after the other, each with the return value of the one before.

    A chain is a pipeline: one job. Raises TypeError for signatures after the first that have
    arguments or are immutable, and InvalidTask for a task that does not take one argument.
    """

    signatures: tuple[Signature, ...]

    def __init__(self, *signatures: Any) -> None:
        steps = _flat(signatures)
        for each in steps:
            if not isinstance(each, (Signature, chain)):
                refuse("chain()", "task", each, "Give signatures of tasks. For a group: chord().")
        self.signatures = tuple(own for step in steps for own in step.signatures)
        for each in self.signatures[1:]:
            where = f"chain(): {each.task.module_path}"
            if each.immutable or each.args or each.kwargs:
                remedy = "A task of a chain gets one argument, the value before it. Return it there"
                refuse(where, "args", (each.args, each.kwargs), f"{remedy}, and write .s().")
            options = {**each.task.celery.defaults, **each.options}
            for name in options.keys() & {"countdown", "eta", "expires"}:
                refuse(where, name, options[name], "Give it to the first task.")

    def __call__(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Enqueue the chain. Further arguments go to its first task."""
        return self.apply_async(args, kwargs)

    delay = __call__

    def apply_async(
        self, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        """Enqueue the chain, with options of ``apply_async()`` for its first task."""
        first, *rest = self.signatures
        first = first._called_with(*args, **(kwargs or {})).set(**options)
        return AsyncResult(str(enqueue_many([_prepared((first, *rest))])[0].id))

    def __or__(self, other: Signature | chain) -> chain:
        return chain(self, other)


class group(Subset):
    """Tasks that run beside one another. Their jobs are written all or none."""

    def __init__(self, *members: Any) -> None:
        self.members = _flat(members)
        for each in self.members:
            if not isinstance(each, (Signature, chain)):
                refuse("group()", "task", each, "Give signatures of tasks, or chains.")

    def __call__(self) -> GroupResult:
        """Enqueue the jobs."""
        results = enqueue_many([_prepared(each.signatures) for each in self.members])
        return GroupResult([AsyncResult(str(each.id)) for each in results])

    apply_async = delay = __call__

    def __or__(self, body: Signature) -> chord:
        return chord(self, body)


class chord(Subset):
    """A task that runs when all tasks of a group were successful, with the list of their results.

    The group is a batch. If a task of it fails, the body does not run.
    """

    def __init__(self, header: Any, body: Signature | None = None) -> None:
        self.header = header if isinstance(header, group) else group(header)
        self.body = body

    def __call__(self, body: Signature | None = None) -> AsyncResult:
        """Enqueue the jobs of the header. Raises TypeError for a body that is no signature."""
        body = body or self.body
        if not isinstance(body, Signature):
            refuse("chord()", "body", body, "Give the signature of one task.")
        own = body._called_with([])
        serialization.bind(own.task.func, own.task.takes_context, own.args, own.kwargs)
        if not self.header.members:
            return own.apply_async()
        about = {
            "task": body.task.module_path,
            "args": list(body.args),
            "kwargs": body.kwargs,
            "immutable": body.immutable,
            "options": {name: _as_text(value) for name, value in body.options.items()},
            "size": len(self.header.members),
        }
        queue = own.task._with(body.options).queue_name
        finish = _finish_chord().using(queue_name=queue, metadata={"body": about})
        title = f"chord of {body.task.module_path}"
        with batch(on_success=finish, description=title, backend=own.task.backend) as header:
            enqueue_many(
                _prepared(each.signatures, {"place": place})
                for place, each in enumerate(self.header.members)
            )
        return AsyncResult(str(header.id))

    apply_async = delay = __call__


def finish_chord(context: JobContext, batch_id: str) -> str:
    """Enqueue the body of a chord with the results of its header, and return the job's id."""
    rows = jobs().filter(batch__pk=batch_id).values_list("metadata", "result")
    header = sorted(rows, key=lambda each: each[0]["place"])
    about: Any = context.metadata["body"]
    if len(header) != about["size"]:
        raise TaskFailed("Some results of the chord's header were deleted. Enqueue it again.")
    body = Signature(
        known_tasks[about["task"]],
        tuple(about["args"]),
        about["kwargs"],
        about["immutable"],
        {name: _of_text(name, value) for name, value in about["options"].items()},
    )._called_with([result for _, result in header])
    # Once, even if this job runs twice.
    once = body.task._with(body.options).using(
        key=f"chord {batch_id}", on_conflict="once", delete_on_success=False
    )
    return str(once.enqueue(*body.args, **body.kwargs).id)


_finish_chord_function = finish_chord
del finish_chord


@cache
def _finish_chord() -> Any:
    options: Any = {"max_attempts": 5, "delete_on_success": False, **usual_place()}
    return task(takes_context=True, **options)(_finish_chord_function)


def __getattr__(name: str) -> Any:
    # A task since the first use and not since the import: @task reads TASKS, and the settings
    # themselves may import this package for crontab().
    if name == "finish_chord":
        return _finish_chord()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _as_text(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _of_text(name: str, value: Any) -> Any:
    is_time = name in ("eta", "expires") and isinstance(value, str)
    return datetime.fromisoformat(value) if is_time else value


def _flat(given: tuple[Any, ...]) -> list[Any]:
    """Return the given signatures, or those of the one list or generator that was given."""
    if len(given) == 1 and isinstance(given[0], Iterable):
        return list(given[0])
    return list(given)


def _prepared(
    signatures: Iterable[Signature], metadata: Mapping[str, Any] | None = None
) -> PreparedCall:
    """Return the call of a signature or chain; with metadata if it belongs to a chord."""
    first, *rest = signatures
    stages: list[Any] = [each.task._with(each.options) for each in (first, *rest)]
    if metadata:
        stages = [each.using(delete_on_success=False) for each in stages]
        stages[0] = stages[0].using(metadata=metadata)
    if rest:
        return pipeline(*stages).prepare(*first.args, **first.kwargs)
    return stages[0].prepare(*first.args, **first.kwargs)  # type: ignore[no-any-return]
