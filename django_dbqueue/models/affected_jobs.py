"""How many jobs a failure has failed, and how many wait to be retried after it.

No index holds the jobs of a failure, and a failure may have very many attempts. Two sets of rows
that indexes hold are read up to a limit: the attempts of each failure, and the jobs in each state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from django.db import models
from django.db.models import Case, OuterRef, Subquery, When

from .bounded_count import BoundedCount
from .enums import WAITING, State
from .expressions import Sql, by_index, composed
from .job import ATTEMPTED, Job
from .union import union_all

AFFECTED = [State.FAILED, *WAITING]
# Maximum number of attempts, those of all failures together, and of jobs in each state. Each row
# costs the lookup of another one: 18,000 rows. With more, PostgreSQL compiles the statement
# (jit_above_cost), which takes longer than running it: 0.3 s for 25 failures.
MOST_ATTEMPTS, MOST_JOBS = 5_000, 1_000
# The order of the index that holds the jobs in a state, and its name.
_INDEXES = {
    State.FAILED: ("-finished_at", "dbqueue_job_finished"),
    State.SCHEDULED: ("run_after", "dbqueue_job_due"),
    State.BLOCKED: ("blocked_by", "dbqueue_job_blocked"),
    State.READY: ("queue", "dbqueue_job_lane"),
}


class AffectedJobs(NamedTuple):
    """Numbers of jobs that a failure has failed, and that wait to be retried after it."""

    failed: int
    waiting: int

    @property
    def may_exist(self) -> bool:
        """False if there are none. A BoundedCount of 0 means that none was among those read."""
        return any(number or type(number) is BoundedCount for number in self)


def count_affected_jobs(
    executions: models.QuerySet[Any], failures: Sequence[int]
) -> dict[int, AffectedJobs]:
    """Count the affected jobs of each of these failures, in one statement.

    A count is exact if all attempts of the failure were read, or all jobs in its states. Else it is
    a lower bound, as a BoundedCount.
    """
    if not failures:
        return {}
    most = MOST_ATTEMPTS // len(failures)
    selects = [_states_after(executions, failure, most) for failure in failures]
    selects += [_failures_of(executions, state) for state in AFFECTED]
    found = [Counter[tuple[int | None, str | None]]() for _each in selects]
    numbered = [(f"SELECT {place}, {sql}", values) for place, (sql, values) in enumerate(selects)]
    for place, failure, state, number in union_all(executions.db, numbered):
        found[place][failure, state] += number
    by_state = dict(zip(AFFECTED, found[len(failures) :], strict=True))

    def counted(failure: int, attempts: Counter[Any], states: Collection[State]) -> int:
        by_attempts = sum(attempts[failure, state.value] for state in states)
        by_jobs = sum(by_state[state][failure, state.value] for state in states)
        if attempts.total() <= most:
            return by_attempts
        if all(by_state[state].total() <= MOST_JOBS for state in states):
            return by_jobs
        return BoundedCount(max(by_attempts, by_jobs))

    return {
        failure: AffectedJobs(
            counted(failure, attempts, [State.FAILED]), counted(failure, attempts, WAITING)
        )
        for failure, attempts in zip(failures, found, strict=False)
    }


def _states_after(executions: models.QuerySet[Any], failure: int, most: int) -> Sql:
    """Select the states of the jobs whose last attempts were of a failure, with their numbers."""
    jobs = Job.objects.using(executions.db).attempted()
    jobs = jobs.filter(pk=OuterRef("job"), attempt=OuterRef("attempt"))
    rows = executions.filter(failure=failure).values(job_state=Subquery(jobs.values("state")))
    sql, values = composed(rows[: most + 1])
    return f"{int(failure)}, job_state, COUNT(*) FROM ({sql}) AS part GROUP BY job_state", values


def _failures_of(executions: models.QuerySet[Any], state: State) -> Sql:
    """Select the failures that were the last attempts of jobs in a state, with their numbers."""
    order, index = _INDEXES[state]
    last = executions.filter(job=OuterRef("pk"), attempt=OuterRef("attempt"))
    failure = Case(When(ATTEMPTED, then=Subquery(last.values("failure"))))
    jobs = by_index(Job.objects.using(executions.db).filter(state=state), index)
    sql, values = composed(jobs.order_by(order).values(of_failure=failure)[: MOST_JOBS + 1])
    return (
        f"of_failure, '{state.value}', COUNT(*) FROM ({sql}) AS part GROUP BY of_failure",
        values,
    )
