"""Wakes workers for jobs that a settlement made ready."""

from __future__ import annotations

from collections.abc import Container

from ...backend import DatabaseBackend
from ...core.notify import notify_queues
from ...engine.attempt_result import Settled
from ...models.enums import State


def wake_dependents(settled: Settled, backend: DatabaseBackend, limited: Container[str]) -> bool:
    """Wake workers for jobs that a settlement made ready, including the settled jobs themselves.

    Return whether there are any. ``limited`` contains the queues that have a concurrency limit.
    """
    jobs = [result.job for result in settled.written]
    queues = {*settled.unblocked, *(job.queue for job in jobs if job.queue in limited)}
    queues.update(
        result.job.queue
        for result in settled.written
        if result.state == State.READY and not result.then
    )
    queues.update(
        new.queue for result in settled.written for new in result.new if new.state == State.READY
    )
    if queues:
        notify_queues(backend.database, queues)
    return bool(queues)


def finish_batches(settled: Settled, backend: DatabaseBackend) -> bool:
    """Finish the batches of settled jobs, and wake workers for their callbacks.

    Return whether there are any.
    """
    batches = {pk for result in settled.written if (pk := result.job.batch_id)}
    return backend.finish_batches(batches) if batches else False
