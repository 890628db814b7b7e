"""The engine's functions on the default database."""

from __future__ import annotations

from typing import Any

from django_dbqueue.engine import batches, limit_sweeps, recurring, retention
from django_dbqueue.engine import claim as claiming
from django_dbqueue.engine import dispatch as dispatching
from django_dbqueue.engine import settle as settling
from django_dbqueue.engine.attempt_result import AttemptResult, Settled
from django_dbqueue.engine.ready_jobs import ReadyJobs
from django_dbqueue.models import ClaimedJob, Job, RecurringTask

DATABASE = "default"
mark_started, save_metadata, save_policy = (
    claiming.mark_started,
    claiming.save_metadata,
    claiming.save_policy,
)


def claim(*args: Any, jobs: Any = None, **kwargs: Any) -> list[ClaimedJob]:
    return claiming.claim(ClaimedJob.objects.all() if jobs is None else jobs, *args, **kwargs)


def claim_behind(
    member: ClaimedJob, process: Any, *args: Any, jobs: Any = None
) -> list[ClaimedJob]:
    wanted = ClaimedJob.objects.all() if jobs is None else jobs
    return claiming.claim_behind(wanted, process, member, *args)


def release(jobs: Any) -> set[Any]:
    return claiming.release(DATABASE, jobs)


def queue_room(queue: str, limit: int) -> int:
    return claiming.queue_room(DATABASE, queue, limit)


def settle(outcomes: list[AttemptResult], *args: Any) -> Settled:
    return settling.settle(DATABASE, outcomes, *args)


def dispatch(limit: int = 1000) -> list[str]:
    return dispatching.dispatch(DATABASE, limit)


def erase(ids: list[Any]) -> int:
    return retention.erase(DATABASE, ids)


def prune_jobs(*args: Any) -> int:
    return retention.prune_jobs(Job.objects.all(), *args)


def prune_batches(older_than: float) -> None:
    retention.prune_batches(DATABASE, older_than)


def prune_semaphores(limit: int) -> int:
    return retention.prune_semaphores(DATABASE, limit)


def finish_batches(ids: Any = None) -> list[str]:
    return batches.finish(DATABASE, ids)


def seal_abandoned() -> list[Any]:
    return batches.seal_abandoned(DATABASE)


def sweep(limit: int) -> list[str]:
    return limit_sweeps.sweep(DATABASE, limit, ReadyJobs(DATABASE))


def unblock_orphans(limit: int) -> list[str]:
    return limit_sweeps.unblock_orphans(DATABASE, limit, ReadyJobs(DATABASE))


def reserve_times() -> bool:
    return limit_sweeps.reserve_times(DATABASE)


def run_now(enqueue: Any) -> int:
    return recurring.run_now(RecurringTask.objects.all(), enqueue)
