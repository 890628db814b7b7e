"""Settle attempts: record how they ended, and move their jobs on, in one transaction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import F

from ..core.transactions import writing
from ..models import ClaimedJob, Execution, Failure, Job, Progress
from ..models.enums import FINISHED, Outcome, State
from ..models.expressions import Among, Now, Sql, now_plus
from ..models.job import JobQuerySet
from ..models.locking import by_primary_key, lock
from .attempt_result import AttemptResult, Settled
from .batches import EndedRun, close_shares, pass_shares_on
from .enqueue import write
from .fast_sql import insert, set_json, update
from .limits import block_surplus, release_slots
from .retention import erase
from .statistics import count_enqueued, insert_of_attempts
from .unique import restart_run

# Attempts kept of the earlier runs of a keyed job: at least this many, at most twice as many.
KEPT = 100
# The columns that are written for an attempt.
COLUMNS = [
    *["job", "attempt", "stage", "outcome", "process", "release"],
    *["claimed_at", "started_at", "finished_at"],
    *["error_type", "message", "traceback", "log", "failure"],
]
# Columns of a pipeline's stage, equal for all jobs that enter it; each job has its own arguments.
_OF_A_STAGE = ["stage", "task", "queue", "priority", "max_attempts", "on_lost", "timeout"]
_OF_EACH = ["args", "kwargs", "limits", "options"]


def keeps_none(job: ClaimedJob) -> bool:
    """Release every slot, for callers that run no slot groups."""
    return False


def settle(
    database: str,
    results: Sequence[AttemptResult],
    keeps_slot: Callable[[ClaimedJob], bool] = keeps_none,
) -> Settled:
    """Record the results of attempts and advance their jobs, in one transaction.

    Each attempt gets its execution. Only the owner of a job settles it: see Fence. A job that
    an operator has stopped ends here, however its attempt ended. ``keeps_slot`` returns whether
    another job of the same slot group, that the caller settles later, keeps the slot.
    """
    with writing(database):
        jobs = Job.objects.using(database)
        ids = [result.fence[0] for result in results]
        # Found by primary key alone: with the state in the WHERE, PostgreSQL may scan the index
        # of running jobs and, under a long transaction, all its dead entries (60 s instead of
        # 3 s for 100,000 jobs).
        rows = by_primary_key(jobs.filter(Among(ids)).order_by("pk"))
        columns = "pk", "attempt", "process_id", "rerun_requested", "retry_requested"
        locked = lock(rows).values_list(*columns, "stop_requested_at", "queue", "task", "state")
        running = [row[:-1] for row in locked if row[-1] == State.RUNNING]
        seen = {row[0]: row[:3] for row in running}
        # Re-enqueued jobs, with the queue and the task of that call.
        again = {row[0]: row[-2:] for row in running if row[3]}
        stopped = {row[0]: row[4] for row in running if row[5]}
        if retried := [pk for pk, is_retried in stopped.items() if is_retried]:
            jobs.filter(Among(retried)).update(stop_requested_at=None, retry_requested=False)
        owned = [result for result in results if seen.get(result.fence[0]) == result.fence]
        settled = Settled(_stop(owned, stopped) if stopped else owned, [], [], [], [])
        # With nothing to look for, no result is looked up: the hash of a UUID takes 0.3 µs.
        erased = {r.fence[0] for r in settled.written if r.erase and r.fence[0] not in again}
        kept = [r for r in settled.written if not erased or r.fence[0] not in erased]
        last = [r for r in kept if not again or r.fence[0] not in again]
        if again:
            _restart_runs(jobs, [r for r in kept if r.fence[0] in again])
        _start_next_runs(jobs, last)
        failures = _record(database, [result for result in kept if result.recorded])
        recorded = [result for result in settled.written if result.recorded]
        counted = insert_of_attempts(database, recorded, failures)
        _move_jobs(jobs, [result for result in last if not result.then], counted)
        if reports := [(r.job, r.progress) for r in kept if r.progress]:
            Progress.objects.using(database).write(reports)
        if erased:
            erase(database, list(erased))
        if repeated := [r for r in kept if r.job.key and r.fence[1] % KEPT == 0]:
            _forget_runs(database, repeated)
        left = [result.job for result in settled.written]
        if restarted := [again[job.id] for job in left if again and job.id in again]:
            count_enqueued(database, Counter(restarted))
        if limited := [job for job in left if job.limits]:
            settled.unblocked.extend(release_slots(database, limited, keeps_slot))
        settled.unblocked.extend(queue for queue, _task in restarted)
        if len(settled.written) < len(results):
            _classify_unlocked(
                database, rows, [r for r in results if seen.get(r.fence[0]) != r.fence], settled
            )
    return settled


def _stop(results: list[AttemptResult], stopped: Mapping[UUID, bool]) -> list[AttemptResult]:
    """Return the results, with those of jobs that an operator has stopped: is each retried?"""
    return [
        _stopped(r, is_retried=stopped[r.fence[0]]) if r.fence[0] in stopped else r for r in results
    ]


def _stopped(result: AttemptResult, *, is_retried: bool) -> AttemptResult:
    """Return the result for a job that an operator has stopped. A success counts, if it is last."""
    if not is_retried:
        return result.stopped() if result.continues else result
    return result if result.outcome == Outcome.SUCCESSFUL else result.retried()


def _restart_runs(jobs: JobQuerySet, results: Sequence[AttemptResult]) -> None:
    """Make jobs ready that were enqueued again during these attempts."""
    anew = defaultdict(list)
    for result in results:
        anew[result.wait].append(result.fence[0])
    # A run that is cut off before its next stage has not ended: the next one takes its place.
    if ended := [r for r in results if not r.continues]:
        close_shares(jobs.db, [EndedRun(r.fence[0], r.state, attempt=r.fence[1]) for r in ended])
    for wait, ids in anew.items():
        restart_run(jobs.filter(pk__in=ids), wait)


def _start_next_runs(jobs: JobQuerySet, results: Sequence[AttemptResult]) -> None:
    """Make ready what runs after these attempts: next stages of pipelines, and child jobs."""
    if moves := [(result.fence[0], result.then) for result in results if result.then]:
        _enter_stages(jobs, moves)
    if children := [child for result in results for child in result.children]:
        write(jobs.db, children)
        pass_shares_on(jobs.db, {r.fence[0]: r.children for r in results if r.children})


def _move_jobs(jobs: JobQuerySet, results: Sequence[AttemptResult], counted: Sql | None) -> None:
    """Move other jobs out of RUNNING, by the results of their attempts.

    ``counted`` is the statement that counts the attempts.
    """
    alike = defaultdict(list)
    for result in results:
        change = result.state, result.wait, result.is_failure, result.starts_over
        alike[change].append(result.fence[0])
    for (state, wait, failed, starts_over), ids in alike.items():
        changes: dict[str, object] = {"failures": F("failures") + 1} if failed else {}
        changes |= {"failures": 0, "expires_at": None} if starts_over else {}
        changes |= {"finished_at": Now()} if state in FINISHED else {"run_after": now_plus(wait)}
        changes |= {"state": state, "process": None}
        update(jobs.filter(Among(ids)), changes, ahead=counted)
        counted = None
    if counted:
        with connections[jobs.db].cursor() as cursor:
            cursor.execute(*counted)
    if return_values := {r.fence[0]: r.result for r in results if r.result is not None}:
        set_json(jobs, "result", return_values)


def _enter_stages(jobs: JobQuerySet, moves: Sequence[tuple[UUID, Job]]) -> None:
    """Advance running jobs of pipelines.

    Each move is a job's id, and the job as it is at its next stage. It waits at once for a limit
    that other jobs wait for.
    """
    for _pk, there in moves:
        # A settlement is repeated after a conflict; the line may have ended since.
        there.state, there.blocked_by = State.READY, None
    block_surplus(jobs.db, [there for _pk, there in moves])
    alike = defaultdict(list)
    for pk, there in moves:
        alike[tuple(getattr(there, name) for name in _OF_A_STAGE)].append((pk, there))
    for values, group in alike.items():
        jobs.filter(pk__in=[pk for pk, _there in group]).update(
            **dict(zip(_OF_A_STAGE, values, strict=True)),
            state=State.READY,
            process=None,
            run_after=Now(),
            failures=0,
            finished_at=None,
        )
        is_blocked = any(there.blocked_by for _pk, there in group)
        columns = [*_OF_EACH, "state", "blocked_by"] if is_blocked else _OF_EACH
        jobs.bulk_update(
            [Job(pk=pk, **{name: getattr(there, name) for name in columns}) for pk, there in group],
            columns,
        )


def _record(database: str, results: Sequence[AttemptResult]) -> dict[str, int]:
    """Write the executions, and return the ids of their failures by fingerprint."""
    failures = Failure.objects.using(database)
    failed = [(r.error, r.release) for r in results if r.error and r.is_failure]
    # The first error of each fingerprint represents its group.
    firsts = {error.fingerprint: (error, release) for error, release in reversed(failed)}
    groups = failures.identify(firsts) if failed else {}
    insert(Execution.objects.using(database), COLUMNS, [_row(result, groups) for result in results])
    if failed:
        failures.record([(groups[error.fingerprint], release) for error, release in failed])
    return groups


def _forget_runs(database: str, results: Iterable[AttemptResult]) -> None:
    """Keep only the newest attempts of the earlier runs of keyed jobs.

    Such a job may run without end.
    """
    for result in results:
        job, attempt = result.job, result.fence[1]
        Execution.objects.using(database).filter(
            job=job.id, attempt__lte=min(attempt - KEPT, job.attempts_before)
        )._raw_delete(database)


def _classify_unlocked(
    database: str, rows: JobQuerySet, results: Iterable[AttemptResult], settled: Settled
) -> None:
    """Classify the results whose rows were not locked here.

    The row is locked elsewhere and still owned, or the result was written before by a COMMIT
    whose success is unknown, or ownership is lost.
    """
    executions = Execution.objects.using(database)
    current = {row[0]: row for row in rows.values_list("pk", "attempt", "process_id", "state")}
    known = {
        (job, attempt): (process, outcome)
        for job, attempt, process, outcome in executions.filter(job__in=list(current)).values_list(
            "job", "attempt", "process", "outcome"
        )
    }
    for result in results:
        if current.get(result.fence[0]) == (*result.fence, State.RUNNING):
            settled.locked_elsewhere.append(result)
        elif known.get(result.fence[:2]) == (result.process, result.outcome):
            settled.written.append(result)
        else:
            settled.lost.append(result)
    # Attempts whose number runs elsewhere, or will be assigned by the next claim: a failover
    # has lost their own claim.
    given = {row[:2] for row in current.values() if row[-1] == State.RUNNING}
    given |= {
        r.fence[:2]
        for r in settled.lost
        if r.fence[0] in current and current[r.fence[0]][1] < r.fence[1]
    }
    settled.twice.extend(
        r
        for r in settled.lost
        if r.fence[:2] in given or known.get(r.fence[:2], (r.process,))[0] != r.process
    )
    # An attempt of such a number gets its execution there.
    unknown = [
        r for r in settled.lost if r.fence[0] in current and r.fence[:2] not in given | known.keys()
    ]
    executions.bulk_create([_dropped(result) for result in unknown], ignore_conflicts=True)


def _row(result: AttemptResult, groups: Mapping[str, int]) -> tuple[Any, ...]:
    job, error = result.job, result.error
    times = job.claimed_at, result.started_at, result.finished_at
    said = (error.type[:255], error.message, error.traceback) if error else ("", "", "")
    group = groups.get(error.fingerprint) if error and result.is_failure else None
    return (
        *result.fence[:2],
        job.stage,
        result.outcome.value,
        result.process,
        result.release,
        *times,
        *said,
        result.log,
        group,
    )


def _dropped(result: AttemptResult) -> Execution:
    """Return the execution of an attempt that ended after its job had passed to another owner."""
    columns = dict(zip(COLUMNS, _row(result, {}), strict=True))
    message = (
        f"It ended ({result.outcome.value}) when its job belonged to another process; "
        "that outcome was dropped."
    )
    return Execution(
        job_id=columns.pop("job"), **{**columns, "outcome": Outcome.LOST, "message": message}
    )
