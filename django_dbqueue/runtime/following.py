"""What may run now that other jobs have ended."""

from __future__ import annotations

from collections.abc import Container

from ..backend import DatabaseBackend
from ..models.execution import Settled
from ..wakeup import wake


def follow_up(settled: Settled, backend: DatabaseBackend, limited: Container[str]) -> bool:
    """Finish the batches of settled jobs, and wake workers for what has waited for them. Returns whether anything has.

    ``limited`` are queues of which only so many jobs may run at a time.
    """
    jobs = [outcome.execution.job for outcome in settled.written]
    queues = {*settled.unblocked, *(job.queue for job in jobs if job.queue in limited)}
    queues.update(new.queue for outcome in settled.written for new in outcome.new)
    if batches := {job.batch_id for job in jobs if job.batch_id}:
        queues.update(backend.batches.finish(batches))
    for queue in queues:
        wake(backend.database, queue)
    return bool(queues)
