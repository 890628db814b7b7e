"""Retries and times: jobs that wait for a retry, first attempts and later ones, run now, reschedule."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.models import Failure, Job

from .conftest import a_failure, a_job, act, an_execution, press, states

State = Job.State
HOUR = timedelta(hours=1)


@pytest.fixture
def retried(db: Any) -> Callable[..., Job]:
    """Create a job that waits for its retry after a failure."""

    def retried(failure: Failure, **values: Any) -> Job:
        given = {"state": State.SCHEDULED, "run_after": timezone.now() + HOUR, "attempt": 1}
        job = a_job(**{**given, "failures": 1, **values})
        an_execution(job, failure)
        return job

    return retried


class TestFailurePage:
    def test_page_counts_failed_jobs_and_waiting_retries_apart(
        self, viewer: Client, failed: Callable[..., Job], retried: Callable[..., Job]
    ) -> None:
        failure = a_failure()
        failed(failure)
        retried(failure), retried(failure, state=State.READY)
        retried(a_failure("Out of stock"))

        page = viewer.get(reverse("admin:dbqueue_failure_change", args=[failure.pk]))

        assert f'?failure={failure.pk}&amp;state=failed">1<' in page.text
        assert f'?failure={failure.pk}&amp;attempts=retry">2<' in page.text
        jobs = viewer.get(
            reverse("admin:dbqueue_job_changelist"), {"failure": failure.pk, "attempts": "retry"}
        )
        assert len(jobs.context["cl"].result_list) == 2

    def test_retry_reaches_failed_jobs_and_waiting_retries(
        self, operator: Client, failed: Callable[..., Job], retried: Callable[..., Job]
    ) -> None:
        failure = a_failure()
        failed(failure), retried(failure), retried(a_failure("Out of stock"))

        question = press(operator, "failure", "retry", failure.pk)
        done = press(operator, "failure", "retry", failure.pk, confirmed="yes")

        assert "Retry all jobs now: 2 jobs" in question.text
        assert "Retried: 2 jobs." in done.text
        assert states() == [State.READY, State.READY, State.SCHEDULED]

    def test_question_about_discarded_jobs_says_which_times_are_kept(
        self, operator: Client
    ) -> None:
        hours = [timezone.now().replace(microsecond=0) + n * HOUR for n in (1, 20)]
        jobs = [a_job(run_after=each) for each in hours] + [a_job(), a_job()]
        Job.objects.discard()

        question = act(operator, "retry", [job.pk for job in jobs])

        first, last = (f"{timezone.localtime(each):%Y-%m-%d %H:%M:%S}" for each in hours)
        assert f"Scheduled, and run at their time: 2, from {first} to {last}." in question.text

    def test_discard_reaches_failed_jobs_and_waiting_retries(
        self, operator: Client, failed: Callable[..., Job], retried: Callable[..., Job]
    ) -> None:
        failure = a_failure()
        failed(failure), retried(failure), retried(a_failure("Out of stock"))

        press(operator, "failure", "discard", failure.pk, confirmed="yes")

        assert states() == [State.DISCARDED, State.DISCARDED, State.SCHEDULED]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("", ["old", "often", "new"]),
        ("count", ["often", "new", "old"]),
        ("new", ["new", "often", "old"]),
        ("old", ["old", "often", "new"]),
        ("nonsense", ["old", "often", "new"]),
    ],
)
def test_failures_are_listed_in_the_chosen_order(
    viewer: Client, order: str, expected: list[str]
) -> None:
    now = timezone.now()
    for message, count, first, last in [("old", 1, 9, 1), ("often", 9, 5, 2), ("new", 3, 4, 3)]:
        seen = {"first_seen": now - first * HOUR, "last_seen": now - last * HOUR}
        a_failure(message, count=count, **seen)

    page = viewer.get(
        reverse("admin:dbqueue_failure_changelist"), {"order": order} if order else {}
    )

    assert [row.message for row in page.context["cl"].result_list] == expected


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ("first", {"new", "first run", "new run of key", "running"}),
        ("again", {"retry", "tried twice", "running again"}),
        ("retry", {"retry"}),
    ],
)
def test_jobs_are_filtered_by_their_attempts(
    viewer: Client, process: Any, attempts: str, expected: set[str]
) -> None:
    a_job(task="new")
    a_job(task="first run", state=State.SUCCESSFUL)
    a_job(task="new run of key", attempt=7, attempts_before=7)
    a_job(task="retry", attempt=1, state=State.SCHEDULED)
    a_job(task="tried twice", attempt=9, attempts_before=7, state=State.FAILED)
    a_job(task="running", state=State.RUNNING, process=process)
    a_job(task="running again", state=State.RUNNING, process=process, attempt=2)

    page = viewer.get(reverse("admin:dbqueue_job_changelist"), {"attempts": attempts})

    assert {row.task for row in page.context["cl"].result_list} == expected


def test_queue_shows_how_many_of_its_waiting_jobs_are_retries(viewer: Client) -> None:
    for values in ({}, {"attempt": 1}, {"attempt": 1, "state": State.SCHEDULED}):
        a_job(queue="mail", **values)
    a_job(queue="other", attempt=3, attempts_before=3)

    page = viewer.get(reverse("admin:dbqueue_queue_changelist"))

    found = {row.name: row.load.retries for row in page.context["cl"].result_list}
    assert found == {"mail": 2, "other": 0}
    assert '?queue=mail&amp;attempts=retry">2<' in page.text


def test_run_now_makes_selected_scheduled_jobs_ready(operator: Client) -> None:
    later = [a_job(state=State.SCHEDULED, run_after=timezone.now() + HOUR) for _ in range(2)]
    a_job(state=State.SCHEDULED, run_after=timezone.now() + HOUR)

    question = act(operator, "run_now", [job.pk for job in later])
    act(operator, "run_now", [job.pk for job in later], confirmed="yes")

    assert "Run now: 2 jobs" in question.text
    assert states() == [State.READY, State.READY, State.SCHEDULED]


def test_reschedule_asks_for_a_time_in_the_future(operator: Client) -> None:
    job = a_job()

    form = press(operator, "job", "reschedule", job.pk)
    past = press(operator, "job", "reschedule", job.pk, confirmed="yes", value="2020-01-01T10:00")
    nonsense = press(operator, "job", "reschedule", job.pk, confirmed="yes", value="tomorrow")
    assert 'type="datetime-local"' in form.text
    assert "2020-01-01T10:00 is in the past." in past.text
    assert "Enter a valid date/time." in nonsense.text
    assert states() == [State.READY]

    press(operator, "job", "reschedule", job.pk, confirmed="yes", value="2099-01-01T10:00")

    job.refresh_from_db()
    assert (job.state, job.run_after.year) == (State.SCHEDULED, 2099)


def test_run_now_is_offered_only_for_scheduled_jobs(operator: Client) -> None:
    ready, later = a_job(), a_job(state=State.SCHEDULED, run_after=timezone.now() + HOUR)

    def buttons(job: Job) -> list[str]:
        page = operator.get(reverse("admin:dbqueue_job_change", args=[job.pk]))
        return [each["action"].name for each in page.context["buttons"]]

    assert "run_now" not in buttons(ready)
    assert "run_now" in buttons(later)


@pytest.mark.parametrize("time", ["2500-01-01T10:00", "9999-12-31T23:59"])
def test_time_that_is_too_far_away_is_refused_by_the_form(
    operator: Client, db: Any, time: str
) -> None:
    job = a_job(state=State.READY)

    page = press(operator, "job", "reschedule", job.pk, value=time, confirmed="yes")

    assert "is too far ahead" in page.text and states() == ["ready"]
