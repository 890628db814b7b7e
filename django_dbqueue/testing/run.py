"""Run the jobs of a test, one by one on its thread, and let time pass."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from operator import itemgetter
from typing import Any

from django.db import connections, transaction
from django.db.models import DateTimeField, F, Model, Value
from django.utils import timezone

from ..backend import DatabaseBackend
from ..compat import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from ..core.queue_selector import QueueSelector
from ..core.transactions import CommitHook
from ..engine.attempt_result import AttemptResult
from ..engine.claim import claim, release
from ..engine.dispatch import dispatch
from ..engine.limit_sweeps import reserve_times
from ..engine.recurring import enqueue_once
from ..engine.settle import settle
from ..models import (
    Batch,
    ClaimedJob,
    Execution,
    Failure,
    Job,
    Process,
    Queue,
    RecurringTask,
    Semaphore,
    TaskState,
)
from ..models.enums import Lane
from ..models.expressions import now_plus
from ..models.job import JobQuerySet
from ..models.recurring_task import aware
from ..recurrence.target import enqueue
from ..registry import decide_limits, discover
from ..results import JobResult
from ..runtime.scheduler import Scheduler
from ..runtime.shutdown import Shutdown
from ..runtime.worker import executor
from ..runtime.worker.async_pool import is_of_coroutine
from ..runtime.worker.run_times import RunTimes
from ..runtime.worker.services import WorkerServices
from ..runtime.worker.task_call import CoroutineCall, ThreadCall
from ..runtime.worker.watchdog import Watchdog
from .savepoints import CoroutineCallInTest, ThreadCallInTest

# The tables whose times are those of jobs. Statistics are about whole minutes and hours.
MOVED: tuple[type[Model], ...] = (
    Job,
    Execution,
    Batch,
    Failure,
    Queue,
    TaskState,
    Semaphore,
)
# The row that holds how much time has passed in a test: it is rolled back with the test.
CLOCK = "django_dbqueue.testing: time that has passed"
# Maximum number of times of a recurring task in one call.
MOST_TIMES = 1000
_Call = ThreadCall | CoroutineCall


def drain(backend: str = DEFAULT_TASK_BACKEND_ALIAS) -> int:
    """Run a backend's due jobs, and the jobs that they enqueue, one by one on this thread.

    backend: the alias in ``TASKS``.

    Returns the number of attempts. Raises TypeError for a backend of another kind. A task's
    exception is the outcome of its job, and is not raised.

    ``drain()`` works inside ``TestCase``, as no other process or connection takes part. If a task
    ends with an error of the database, what it has written may be rolled back there. Jobs that
    wait for their time, for a retry, or for the end of a pause, stay unchanged. KeyboardInterrupt
    ends it and releases the current job. Jobs that wait for a commit, which a ``TestCase`` never
    makes, are enqueued first.

    A task's timeout is raised in it as in a worker: between two of the task's own instructions, not
    while it waits in C code; in a coroutine at an ``await``.
    """
    run_commit_hooks()
    queue = database_backend(backend, "drain()")
    discover(queue.config.task_modules)
    jobs, attempts = ClaimedJob.objects.using(queue.database), 0
    selector = QueueSelector(("*",), frozenset(queue.queues))
    call: list[_Call] = []
    with _process(queue) as process, _watched(queue, call):
        while True:
            dispatch(queue.database)
            wanted, lanes = _not_paused(jobs)
            lanes = [lane for lane in lanes if selector.position(lane.queue) is not None]
            if not lanes:
                reserve_times(queue.database)  # For jobs that wait for a rate.
                if not dispatch(queue.database):
                    return attempts
                continue
            lane = max(lanes, key=lambda lane: lane.priority)
            for job in claim(wanted, lane, process, limit=1, decide_limits=decide_limits):
                call[:] = [_call(job)]
                _run(call[0], queue)
                call.clear()
                attempts += 1
            run_commit_hooks()


def _not_paused(jobs: JobQuerySet) -> tuple[JobQuerySet, list[Lane]]:
    """Return the jobs whose tasks are not paused, and their lanes in queues that are not."""
    queues = Queue.objects.using(jobs.db).names_of_paused()
    lanes = [lane for lane in jobs.lanes() if lane.queue not in queues]
    if not (tasks := TaskState.objects.using(jobs.db).names_of_paused()):
        return jobs, lanes
    wanted = jobs.exclude(task__in=tasks)
    return wanted, [lane for lane in lanes if wanted.of_lane(lane).exists()]


def run_job(result: JobResult | Job) -> JobResult:
    """Run a waiting job of a test now, even if its time has not come, and return its new result.

    result: what ``enqueue()`` returned, or the job.

    Other jobs stay as they are, those that it enqueues too. A task's exception is the outcome of
    its job, as with ``drain()``. Raises ValueError for a job that does not wait, and for one that
    waits for a slot of a limit or for its rate.
    """
    run_commit_hooks()
    pk = result.pk if isinstance(result, Job) else result.id
    queue = _backend_of(result)
    discover(queue.config.task_modules)
    jobs = ClaimedJob.objects.using(queue.database).filter(pk=pk)
    Job.objects.using(queue.database).filter(pk=pk).run_now()
    if not (row := jobs.ready().first()):
        state = jobs.values_list("state", flat=True).first()
        raise ValueError(
            f"run_job(): the job {pk} is {state or 'deleted'}. Give one that is ready or scheduled."
        )
    call: list[_Call] = []
    with _process(queue) as process, _watched(queue, call):
        lane = Lane(row.queue, row.priority)
        if not (found := claim(jobs, lane, process, limit=1, decide_limits=decide_limits)):
            raise ValueError(
                f"run_job(): a limit of the job {pk} refuses it now. Let the jobs that hold its "
                "slots end first, or call advance()."
            )
        call[:] = [_call(found[0])]
        _run(call[0], queue)
    return queue.get_result(str(pk))


def advance(
    *,
    recurring: Collection[str] = (),
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    **time: float,
) -> None:
    """Let time pass for the waiting jobs of a test: ``advance(minutes=5)``.

    recurring: names of recurring tasks that are enqueued for each of their times that passes, as
        if a dispatcher ran.
    time: the keyword arguments of timedelta.

    Retries and delayed jobs become due, jobs expire, pauses and rates end. The times of the queue's
    rows are moved into the past: the clocks of Python and of the database stay. Raises TypeError or
    ValueError for another value than a positive time, and ValueError for the name of no enabled
    recurring task.
    """
    delta = timedelta(**time)
    if delta <= timedelta():
        raise ValueError(f"advance(): {delta} is no positive time. Give such as minutes=5.")
    run_commit_hooks()
    queue = database_backend(backend, "advance()")
    database = queue.database
    with transaction.atomic(database):
        since = aware(timezone.now()) + _passed(database, delta)
        _enqueue_recurring(queue, recurring, since, since + delta)
        for model in MOVED:
            columns = [each.name for each in model._meta.fields if isinstance(each, DateTimeField)]
            rows = model._base_manager.using(database)
            rows.update(**{name: F(name) - Value(delta) for name in columns})


def _passed(database: str, more: timedelta) -> timedelta:
    """Return the time that has passed before in this test, and add to it."""
    clock, _created = Semaphore.objects.using(database).get_or_create(key=CLOCK)
    before = clock.interval or timedelta()
    clock.interval = before + more
    clock.save(using=database)
    return before


def _enqueue_recurring(
    queue: DatabaseBackend, names: Collection[str], since: datetime, until: datetime
) -> None:
    """Enqueue recurring tasks for their times after ``since``, in the order of the times."""
    if not names:
        return
    discover(queue.config.task_modules)
    Scheduler(queue).declare()
    rows = RecurringTask.objects.using(queue.database).enabled()
    found = list(rows.filter(name__in=names))
    if unknown := set(names).difference(row.name for row in found):
        known = ", ".join(sorted(rows.values_list("name", flat=True))) or "none"
        raise ValueError(
            f"advance(): {min(unknown)!r} is no enabled recurring task. There are: {known}."
        )
    due: list[tuple[datetime, RecurringTask]] = []
    for row in found:
        times = row.next_times(MOST_TIMES + 1, since, until)
        if len(times) > MOST_TIMES:
            raise ValueError(
                f"advance(): more than {MOST_TIMES:,} times of {row} pass. Give less time."
            )
        due += [(time, row) for time in times]
    for time, row in sorted(due, key=itemgetter(0)):
        enqueue_once(queue.database, row, time, partial(enqueue, backend=queue.alias), timedelta())


def run_commit_hooks() -> None:
    """Enqueue the jobs that wait for a commit, which does not come inside ``TestCase``.

    Only those that no transaction of the code under test still holds. Each is enqueued once, even
    if the test runs the hooks of ``on_commit()`` itself.
    """
    for connection in connections.all(initialized_only=True):
        blocks: list[Any] = connection.atomic_blocks
        if blocks and all(block._from_testcase for block in blocks):
            for hook in [each[1] for each in connection.run_on_commit]:
                if isinstance(hook, CommitHook):
                    hook()


def _backend_of(result: JobResult | Job) -> DatabaseBackend:
    if isinstance(result, JobResult):
        return database_backend(result.backend, "run_job()")
    for alias in task_backends:
        backend = task_backends[alias]
        if isinstance(backend, DatabaseBackend) and backend.database == result._state.db:
            return backend
    raise TypeError(f"run_job(): {result!r} is no job of a DatabaseBackend.")


def database_backend(alias: str, caller: str) -> DatabaseBackend:
    backend = task_backends[alias]
    if not isinstance(backend, DatabaseBackend):
        raise TypeError(
            f"TASKS[{alias!r}] is of {type(backend).__qualname__}; {caller} needs a "
            "DatabaseBackend."
        )
    return backend


def _call(job: ClaimedJob) -> _Call:
    return CoroutineCallInTest(job) if is_of_coroutine(job) else ThreadCallInTest(job)


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
