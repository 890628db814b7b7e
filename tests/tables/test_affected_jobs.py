"""The counts of the jobs of a failure: exact, or lower bounds that say so."""

from __future__ import annotations

import pytest
from django.utils import timezone

from django_dbqueue.models import Execution, Failure, Job
from django_dbqueue.models import affected_jobs as module
from django_dbqueue.models.affected_jobs import AffectedJobs
from django_dbqueue.models.bounded_count import BoundedCount
from django_dbqueue.models.enums import State

pytestmark = pytest.mark.django_db


def a_failure(name: str) -> int:
    return Failure.objects.create(fingerprint=name, error_type=name, message="", location="").pk


def jobs_of(failure: int, state: State, number: int = 1, *, then: int | None = None) -> None:
    """Create jobs whose first attempt was a failure; and the second, if ``then`` is given."""
    now = timezone.now()
    times = dict.fromkeys(("claimed_at", "started_at", "finished_at"), now)
    ended = {"finished_at": now} if state in (State.FAILED, State.SUCCESSFUL) else {}
    why = {"blocked_by": "limit"} if state == State.BLOCKED else {}
    failures = [failure, *([then] if then else [])]
    for _number in range(number):
        job = Job.objects.create(task="t", state=state, attempt=len(failures), **ended, **why)
        Execution.objects.bulk_create(
            Execution(job=job, attempt=attempt, outcome="failed", failure_id=each, **times)
            for attempt, each in enumerate(failures, 1)
        )


def counts(*failures: int) -> list[AffectedJobs]:
    return list(Execution.objects.count_affected_jobs(failures).values())


def test_jobs_are_counted_by_their_last_attempt(django_assert_num_queries):
    first, second, third = map(a_failure, ("a", "b", "c"))
    jobs_of(first, State.FAILED, 2)
    jobs_of(first, State.FAILED, then=second)
    for state in (State.SCHEDULED, State.BLOCKED, State.READY):
        jobs_of(second, state)
    jobs_of(third, State.SUCCESSFUL)
    Job.objects.create(task="t")

    with django_assert_num_queries(1):
        found = Execution.objects.count_affected_jobs([first, second, third])

    assert found == {first: (2, 0), second: (1, 3), third: (0, 0)}
    assert [each.may_exist for each in found.values()] == [True, True, False]
    assert Execution.objects.count_affected_jobs([]) == {}


@pytest.mark.parametrize("state", [State.SCHEDULED, State.BLOCKED, State.READY])
def test_a_new_run_of_a_key_is_not_affected_by_an_earlier_one(state):
    failure = a_failure("a")
    jobs_of(failure, state)
    Job.objects.update(attempts_before=1)

    assert counts(failure) == [(0, 0)]
    assert not Execution.objects.affected_jobs(Failure.objects.all())


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        # All attempts of the failure are read, or all failed jobs.
        ((20, 1), ("5", "0")),
        ((4, 5), ("5", "0")),
        ((4, 4), ("5+", "0")),
        ((1, 3), ("4+", "0")),
    ],
)
def test_counts_are_exact_if_one_of_two_sets_is_read_whole(monkeypatch, limits, shown):
    for name, limit in zip(("MOST_ATTEMPTS", "MOST_JOBS"), limits, strict=True):
        monkeypatch.setattr(module, name, limit)
    failure = a_failure("a")
    jobs_of(failure, State.FAILED, 5)

    assert tuple(map(str, counts(failure)[0])) == shown


def test_no_job_among_those_read_is_not_the_absence_of_jobs(monkeypatch):
    monkeypatch.setattr(module, "MOST_ATTEMPTS", 1)
    monkeypatch.setattr(module, "MOST_JOBS", 0)
    failure, later = a_failure("a"), a_failure("b")
    jobs_of(failure, State.FAILED, 2, then=later)

    [found] = counts(failure)

    assert type(found.failed) is BoundedCount and found.failed == 0
    assert found.may_exist
