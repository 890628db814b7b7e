"""Recovery of the jobs of dead processes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from ..backend import DatabaseBackend
from ..core.error_reports import ErrorReport
from ..core.notify import notify_queues
from ..core.safe_log import logger
from ..core.transactions import writing
from ..engine.attempt_result import AttemptResult, Settled
from ..engine.claim import release
from ..engine.settle import settle
from ..exceptions import ProcessLost, Stopped, TimedOut
from ..models import ClaimedJob, Process, StackTrace
from ..models.enums import FINISHED, OnLost, Outcome, State
from ..models.expressions import Now
from ..models.locking import lock_first
from ..models.process import ProcessQuerySet
from .shared_status import SharedStatus, not_started_of
from .worker.thread_pool import ThreadPool

# The minimum number of attempts before a job counts as the cause of its processes' deaths.
LEAST_ATTEMPTS = 3
BATCH = 500
# Time limit, and delay between two tries, for releasing jobs that have not started and whose rows
# other transactions have locked. In seconds.
LOCKED, PAUSE = 1.0, 0.05


@dataclass(frozen=True, kw_only=True)
class ExitReason:
    """The reason why processes died.

    how: the end of the sentence "the process …".
    innocent: no job can be the cause, except one that should have ended before.
    not_started: jobs that were claimed and certainly not started.
    silent: the death was not observed. Nothing is known of their jobs after the last heartbeat.
    clock: the time of death by this process's clock, as the jobs may be recovered much later.
    Ignored if silent.
    """

    how: str
    innocent: bool = False
    not_started: frozenset[UUID] = field(default=frozenset())
    silent: bool = False
    clock: float = field(default_factory=time.monotonic)


def recover(
    backend: DatabaseBackend,
    dead: ProcessQuerySet,
    death: ExitReason,
    announce: Callable[[list[UUID]], object],
) -> int:
    """Deregister dead processes, and settle the jobs that they or earlier ones were running.

    Returns the number of jobs. ``announce`` is called with the ids of jobs that are not retried, to
    send ``task_finished``.

    A process is deregistered in the transaction that settles its jobs: no other process finds these
    jobs without knowing how it died.
    """
    database = backend.database
    processes: dict[int, Process] = {}
    left: list[ClaimedJob] = []
    released = 0 if death.silent else _release(database, dead, death.not_started)
    if dead.using(database).exists():
        with writing(database):
            processes = _deregister_dead(dead.using(database), death)
            statuses = [str(each.facts.get("shared_status", "")) for each in processes.values()]
            death = replace(
                death, not_started=death.not_started.union(*map(not_started_of, statuses))
            )
            left, unblocked = _settle(
                database, _jobs(database).filter(process__in=list(processes)), processes, death
            )
            notify_queues(database, [*unblocked, *_ready(left)])
        for status in statuses:
            SharedStatus.remove(status)
        announce(_finished(left))
    # Jobs of earlier dead processes, and jobs that were locked at that moment. Locked rows are
    # skipped: they delay no others.
    with writing(database):
        orphans, more = _settle(
            database, lock_first(_jobs(database).orphaned(), BATCH), processes, death
        )
    announce(_finished(orphans))
    notify_queues(database, [*more, *_ready(orphans)])
    return released + len(left) + len(orphans)


def _release(database: str, dead: ProcessQuerySet, not_started: frozenset[UUID]) -> int:
    """Release jobs that have not started, while their processes have rows.

    Afterwards, it is unknown that they have not started. Returns the number of released jobs. A row
    that stays locked is left to the recovery of all other jobs.
    """
    owners = list(dead.using(database).values_list("pk", flat=True))
    jobs = list(_jobs(database).filter(process__in=owners, pk__in=not_started))
    number, end = len(jobs), time.monotonic() + LOCKED
    while jobs:
        done = release(database, jobs)
        jobs = [job for job in jobs if job.pk not in done]
        if not jobs or time.monotonic() > end:
            break
        time.sleep(PAUSE)
    return number - len(jobs)


def _finished(jobs: Iterable[ClaimedJob]) -> list[UUID]:
    return [job.pk for job in jobs if job.state in FINISHED]


def _ready(jobs: Iterable[ClaimedJob]) -> Iterator[str]:
    return (job.queue for job in jobs if job.state == State.READY)


def _jobs(database: str) -> Any:
    return ClaimedJob.objects.using(database).running().annotate(seen_at=Now())


def _deregister_dead(dead: ProcessQuerySet, death: ExitReason) -> dict[int, Process]:
    names = {process.pk: process for process in dead}
    # The DELETE repeats the condition: a process that sent a heartbeat meanwhile is alive and keeps
    # its jobs.
    dead.filter(pk__in=list(names)).erase()
    still = set(
        Process.objects.using(dead.db).filter(pk__in=list(names)).values_list("pk", flat=True)
    )
    deregistered = {pk: process for pk, process in names.items() if pk not in still}
    if deregistered:
        logger.warning(
            "recovery: declared dead: %s (%s).",
            ", ".join(each.name for each in deregistered.values()),
            death.how,
        )
    return deregistered


def _settle(
    database: str, rows: Iterable[ClaimedJob], processes: Mapping[int, Process], death: ExitReason
) -> tuple[list[ClaimedJob], list[str]]:
    """Settle the jobs of dead processes.

    Returns the settled jobs, and the queues of jobs that had waited for one of them.
    """
    deaths = [
        (job, death if job.process_id in processes else ExitReason(how="is gone", silent=True))
        for job in rows
    ]
    not_started = [job for job, death in deaths if _has_not_started(job, death)]
    ran = [(job, death) for job, death in deaths if not _has_not_started(job, death)]
    stacks = StackTrace.objects.using(database).of(job for job, _death in ran)
    lost = [
        _result(job, processes.get(job.process_id or 0), end, stacks.get(job.pk, ""))
        for job, end in ran
    ]
    done = release(database, not_started)
    not_started = [job for job in not_started if job.pk in done]
    for job in not_started:
        job.state = State.READY
    settled = settle(database, lost) if lost else Settled([], [], [], [], [])
    for result in settled.written:
        job, why = result.job, result.error.message if result.error else ""
        # An operator may have stopped the job since it was read.
        job.state = result.state
        logger.warning(
            "recovery: job %s of %s: %s It is now %s.",
            job.pk,
            job.task,
            why,
            result.state.value,
            extra=job.log_fields,
        )
    return not_started + [result.job for result in settled.written], settled.unblocked


def _has_not_started(job: ClaimedJob, death: ExitReason) -> bool:
    return job.pk in death.not_started or (job.on_lost == OnLost.FAIL and not job.has_begun)


def _result(job: Any, process: Process | None, death: ExitReason, stack: str) -> AttemptResult:
    seen_at, job.claimed_at = job.seen_at, job.started_at
    job.clock = time.monotonic() - (seen_at - job.claimed_at).total_seconds()
    job.process = process or Process(pk=job.process_id, name=f"#{job.process_id}")
    outcome, state, error = _verdict(job, death)
    message = str(error)
    # The same pattern for all processes of a kind: jobs lost in the same way form one group.
    pattern = message.replace(job.process.name, "#")
    report = ErrorReport(
        type=f"{type(error).__module__}.{type(error).__qualname__}",
        message=message,
        traceback=f"{stack}{message}",
        location=job.task,
        pattern=pattern,
    )
    job.state = state
    # Spread the retries, so that a job that killed its process does not kill the same neighbours
    # again.
    wait = random.uniform(1.0, 3.0) * 3 ** min(job.failures, 6) if state == State.SCHEDULED else 0.0
    return AttemptResult.of(job, outcome, state, wait=wait, error=report)


def _ran_for(job: Any, death: ExitReason) -> timedelta:
    """Return the minimum run time of the job.

    Time after the last sign of life of its process is not run time.
    """
    until = (
        job.process.heartbeat_at
        if death.silent
        else job.seen_at - timedelta(seconds=time.monotonic() - death.clock)
    )
    # A worker or supervisor that ends because a job has timed out knows that the job runs.
    # Other processes may have kept it waiting for a while.
    waited = timedelta() if death.innocent else timedelta(seconds=ThreadPool.LATE)
    # A heartbeat in the future was written while the database's clock was ahead. It proves nothing.
    is_known = isinstance(until, datetime) and until <= job.seen_at
    return until - job.started_at - waited if is_known else timedelta()


def _verdict(job: Any, death: ExitReason) -> tuple[Outcome, State, BaseException]:
    """Return the consequence of a process's death for a job that has, or may have, started."""
    process = f"its process, {job.process.name}, {death.how}"
    if job.retry_requested:
        why = f"It was stopped by an operator, to run again; {process}."
        return Outcome.STOPPED, State.READY, Stopped(why)
    if job.stop_requested_at:
        return (
            Outcome.DISCARDED,
            State.DISCARDED,
            Stopped(f"It was stopped by an operator; {process}."),
        )
    if job.timeout and _ran_for(job, death) > job.timeout:
        seconds = job.timeout.total_seconds()
        last = job.failures + 1 >= job.max_attempts
        error = TimedOut(f"It ran longer than its timeout of {seconds:g} s; {process}.")
        return Outcome.TIMED_OUT, State.FAILED if last else State.SCHEDULED, error
    if death.innocent and job.on_lost == OnLost.RETRY:
        return Outcome.INTERRUPTED, State.READY, ProcessLost(f"It was interrupted: {process}.")
    last = job.on_lost == OnLost.FAIL or job.failures + 1 >= max(LEAST_ATTEMPTS, job.max_attempts)
    return (
        Outcome.LOST,
        State.FAILED if last else State.SCHEDULED,
        ProcessLost(f"It was lost: {process}."),
    )
