"""What the parts of a worker need of each other."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from ...engine.attempt_result import Settled
from ...engine.settle import keeps_none
from ...models import ClaimedJob
from .task_call import Call


@dataclass(frozen=True, kw_only=True)
class WorkerServices:
    """Functions of a worker that its parts call. The defaults do nothing.

    wake: end the worker's pause, as there may be work.
    running: the calls of the running jobs.
    owns: whether the process may still own the jobs that it has claimed.
    settled: handle the results that have been written.
    limited_queues: the queues that have a concurrency limit.
    has_room: whether a thread is free for another job.
    keeps_slot: whether another claimed job of the same slot group keeps the job's slot.
    """

    wake: Callable[[], None] = lambda: None
    running: Callable[[], Sequence[Call]] = tuple
    owns: Callable[[], bool] = lambda: True
    settled: Callable[[Settled], None] = lambda settled: None
    limited_queues: Callable[[], Container[str]] = tuple
    has_room: Callable[[], bool] = lambda: True
    keeps_slot: Callable[[ClaimedJob], bool] = keeps_none


DEFAULT = WorkerServices()
