"""Settle attempts: record how they ended, and move their jobs on, in one transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from django.db.models import F

from ..core.transactions import writing
from ..models import Execution, Failure, Job, Progress
from ..models.enums import FINISHED, Outcome, State
from ..models.expressions import Among, Now, after
from ..models.job import JobQuerySet
from ..models.locking import lock
from .attempt_result import AttemptResult, Settled
from .batches import EndedRun, close_shares
from .enqueue import write
from .fast_sql import insert, set_json
from .limits import release_slots
from .retention import erase
from .unique import restart_run

# Attempts kept of the earlier runs of a keyed job: at least this many, at most twice as many.
KEPT = 100
# The columns that are written for an attempt.
COLUMNS = [
    *["job", "attempt", "stage", "outcome", "process", "claimed_at", "started_at", "finished_at"],
    *["error_type", "message", "traceback", "log", "failure"],
]
# Columns of a pipeline's stage, equal for all jobs that enter it; each job has its own arguments.
_OF_A_STAGE = ["stage", "task", "queue", "priority", "max_attempts", "on_lost", "timeout"]
_OF_EACH = ["args", "kwargs", "limits"]


def settle(database: str, outcomes: Sequence[AttemptResult]) -> Settled:
    """Record the outcomes of attempts and advance their jobs, in one transaction.

    Each attempt gets its execution. Only the owner of a job settles it: see Fence. A job that
    an operator has stopped ends here, however its attempt ended.
    """
    with writing(database):
        jobs = Job.objects.using(database)
        ids = [outcome.fence[0] for outcome in outcomes]
        # Found by primary key alone: with the state in the WHERE, PostgreSQL may scan the index
        # of running jobs and, under a long transaction, all its dead entries (60 s instead of
        # 3 s for 100,000 jobs).
        rows = jobs.filter(Among(ids)).order_by("pk")
        columns = "pk", "attempt", "process_id", "rerun_requested", "queue", "stop_requested_at"
        running = [
            row[:-1]
            for row in lock(rows).values_list(*columns, "state")
            if row[-1] == State.RUNNING
        ]
        seen = {row[0]: row[:3] for row in running}
        # Re-enqueued jobs, with the queue of that call.
        again = {pk: queue for pk, *_fence, again, queue, _stop in running if again}
        stopped = {row[0] for row in running if row[-1]}
        owned = [outcome for outcome in outcomes if seen.get(outcome.fence[0]) == outcome.fence]
        ends = [o.stopped() if o.continues and o.fence[0] in stopped else o for o in owned]
        settled = Settled(ends, [], [], [], [])
        erased = {
            outcome.fence[0]
            for outcome in settled.written
            if outcome.erase and outcome.fence[0] not in again
        }
        kept = [outcome for outcome in settled.written if outcome.fence[0] not in erased]
        _move_jobs(jobs, kept, set(again))
        _record(database, [outcome for outcome in kept if outcome.recorded])
        if reports := [(o.job, o.progress) for o in kept if o.progress]:
            Progress.objects.using(database).write(reports)
        if erased:
            erase(database, list(erased))
        if repeated := [o for o in kept if o.job.key and o.fence[1] % KEPT == 0]:
            _forget_runs(database, repeated)
        left = [outcome.job for outcome in settled.written]
        if limited := [job for job in left if job.limits]:
            settled.unblocked.extend(release_slots(database, limited))
        settled.unblocked.extend(again[job.id] for job in left if job.id in again)
        if len(settled.written) < len(outcomes):
            _classify_unlocked(
                database, rows, [o for o in outcomes if seen.get(o.fence[0]) != o.fence], settled
            )
    return settled


def _move_jobs(jobs: JobQuerySet, outcomes: Sequence[AttemptResult], again: set[UUID]) -> None:
    """Move settled jobs out of RUNNING, by the outcomes of their attempts.

    The jobs of ``again`` were re-enqueued while they ran.
    """
    anew = defaultdict(list)
    for outcome in outcomes:
        if outcome.fence[0] in again:
            anew[outcome.wait].append(outcome.fence[0])
    if ended := [o for o in outcomes if o.fence[0] in again and (o.state in FINISHED or o.then)]:
        close_shares(jobs.db, [EndedRun(o.fence[0], o.state, attempt=o.fence[1]) for o in ended])
    for wait, ids in anew.items():
        restart_run(jobs.filter(pk__in=ids), wait)
    outcomes = [outcome for outcome in outcomes if outcome.fence[0] not in again]
    if moves := [(outcome.fence[0], outcome.then) for outcome in outcomes if outcome.then]:
        _enter_stages(jobs, moves)
    if children := [child for outcome in outcomes for child in outcome.children]:
        write(jobs.db, children)
    alike = defaultdict(list)
    for outcome in outcomes:
        if not outcome.then:
            alike[outcome.state, outcome.wait, outcome.is_failure].append(outcome.fence[0])
    for (state, wait, failed), ids in alike.items():
        changes: dict[str, object] = {"failures": F("failures") + 1} if failed else {}
        changes |= {"finished_at": Now()} if state in FINISHED else {"run_after": after(wait)}
        jobs.filter(Among(ids)).update(state=state, process=None, **changes)
    if results := {o.fence[0]: o.result for o in outcomes if o.result is not None}:
        set_json(jobs, "result", results)


def _enter_stages(jobs: JobQuerySet, moves: Iterable[tuple[UUID, Job]]) -> None:
    """Advance running jobs of pipelines.

    Each move is a job's id, and the job as it is at its next stage.
    """
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
        jobs.bulk_update(
            [
                Job(pk=pk, **{name: getattr(there, name) for name in _OF_EACH})
                for pk, there in group
            ],
            _OF_EACH,
        )


def _record(database: str, outcomes: Sequence[AttemptResult]) -> None:
    failures = Failure.objects.using(database)
    failed = [outcome.error for outcome in outcomes if outcome.error and outcome.is_failure]
    # The first error of each fingerprint represents its group.
    groups = (
        failures.identify({error.fingerprint: error for error in reversed(failed)})
        if failed
        else {}
    )
    insert(
        Execution.objects.using(database), COLUMNS, [_row(outcome, groups) for outcome in outcomes]
    )
    if failed:
        failures.record([groups[error.fingerprint] for error in failed])


def _forget_runs(database: str, outcomes: Iterable[AttemptResult]) -> None:
    """Keep only the newest attempts of the earlier runs of keyed jobs.

    Such a job may run without end.
    """
    for outcome in outcomes:
        job, attempt = outcome.job, outcome.fence[1]
        Execution.objects.using(database).filter(
            job=job.id, attempt__lte=min(attempt - KEPT, job.attempts_before)
        )._raw_delete(database)


def _classify_unlocked(
    database: str, rows: JobQuerySet, outcomes: Iterable[AttemptResult], settled: Settled
) -> None:
    """Classify the outcomes whose rows were not locked here.

    The row is locked elsewhere and still owned, or the outcome was written before by a COMMIT
    of unknown result, or ownership is lost.
    """
    executions = Execution.objects.using(database)
    current = {row[0]: row for row in rows.values_list("pk", "attempt", "process_id", "state")}
    known = {
        (job, attempt): (process, outcome)
        for job, attempt, process, outcome in executions.filter(job__in=list(current)).values_list(
            "job", "attempt", "process", "outcome"
        )
    }
    for outcome in outcomes:
        if current.get(outcome.fence[0]) == (*outcome.fence, State.RUNNING):
            settled.held.append(outcome)
        elif known.get(outcome.fence[:2]) == (outcome.process, outcome.outcome):
            settled.written.append(outcome)
        else:
            settled.lost.append(outcome)
    # Attempts whose number runs elsewhere, or will be assigned by the next claim: a failover
    # has lost their own claim.
    given = {row[:2] for row in current.values() if row[-1] == State.RUNNING}
    given |= {
        o.fence[:2]
        for o in settled.lost
        if o.fence[0] in current and current[o.fence[0]][1] < o.fence[1]
    }
    settled.twice.extend(
        o
        for o in settled.lost
        if o.fence[:2] in given or known.get(o.fence[:2], (o.process,))[0] != o.process
    )
    # An attempt of such a number gets its execution there.
    unknown = [
        o for o in settled.lost if o.fence[0] in current and o.fence[:2] not in given | known.keys()
    ]
    executions.bulk_create([_dropped(outcome) for outcome in unknown], ignore_conflicts=True)


def _row(outcome: AttemptResult, groups: Mapping[str, int]) -> tuple[Any, ...]:
    job, error = outcome.job, outcome.error
    times = job.claimed_at, outcome.started_at, outcome.finished_at
    said = (error.type[:255], error.message, error.traceback) if error else ("", "", "")
    group = groups.get(error.fingerprint) if error and outcome.is_failure else None
    return (
        *outcome.fence[:2],
        job.stage,
        outcome.outcome.value,
        outcome.process,
        *times,
        *said,
        outcome.log,
        group,
    )


def _dropped(outcome: AttemptResult) -> Execution:
    """Return the execution of an attempt that ended after its job had passed to another owner."""
    columns = dict(zip(COLUMNS, _row(outcome, {}), strict=True))
    message = (
        f"It ended ({outcome.outcome.value}) when its job belonged to another process; "
        "that outcome was dropped."
    )
    return Execution(
        job_id=columns.pop("job"), **{**columns, "outcome": Outcome.LOST, "message": message}
    )
