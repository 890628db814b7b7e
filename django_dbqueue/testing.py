"""Helpers for a project's own tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .backend import DatabaseBackend
from .compat import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from .core.queue_selector import QueueSelector
from .engine.attempt_result import AttemptResult
from .engine.claim import claim, release
from .engine.dispatch import dispatch
from .engine.settle import settle
from .models import ClaimedJob, Process
from .models.expressions import now_plus
from .registry import decide_limits, discover
from .runtime.shutdown import Shutdown
from .runtime.worker import executor
from .runtime.worker.async_pool import is_of_coroutine
from .runtime.worker.run_times import RunTimes
from .runtime.worker.services import WorkerServices
from .runtime.worker.task_call import CoroutineCall, ThreadCall
from .runtime.worker.watchdog import Watchdog

_Call = ThreadCall | CoroutineCall


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
    queue = task_backends[backend]
    if not isinstance(queue, DatabaseBackend):
        raise TypeError(
            f"TASKS[{backend!r}] is of {type(queue).__qualname__}; drain() needs a DatabaseBackend."
        )
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
