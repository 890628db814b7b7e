"""What may run now that other jobs have ended."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ...backend import DatabaseBackend
from ...core.notify import notify_queues
from ...models import Settled
from ...models.states import State


def wake_dependents(settled: Settled, backend: DatabaseBackend, limited: Container[str]) -> bool:
    """Wake workers for what is ready now that jobs are settled, themselves among it. Returns whether anything is.

    ``limited`` are queues of which only so many jobs may run at a time.
    """
    jobs = [outcome.job for outcome in settled.written]
    queues = {*settled.unblocked, *(job.queue for job in jobs if job.queue in limited)}
    queues.update(outcome.job.queue for outcome in settled.written if outcome.state == State.READY and not outcome.then)
    queues.update(new.queue for outcome in settled.written for new in outcome.new)
    return _wake(queues, backend)


def finish_batches(settled: Settled, backend: DatabaseBackend) -> bool:
    """As follow_up, for the batches of settled jobs."""
    batches = {outcome.job.batch_id for outcome in settled.written} - {None}
    return _wake(backend.batches.finish(batches), backend) if batches else False


def _wake(queues: Iterable[str], backend: DatabaseBackend) -> bool:
    found = set(queues)
    notify_queues(backend.database, found)
    return bool(found)
