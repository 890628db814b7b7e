"""Hanged jobs are stopped, or stopped and run again: some, or all that hang."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.models import Job, Process, Progress, StackTrace

from .conftest import a_client, a_job, act, an_execution, press

State = Job.State


@pytest.fixture
def hanged(process: Process) -> list[Job]:
    """Create two jobs that run for a day, and one that has just started."""
    day = timezone.now() - timedelta(days=1)
    running = {"state": State.RUNNING, "process": process}
    a_job(**running, task="just started")
    return [a_job(**running, started_at=day) for _ in range(2)]


@pytest.mark.parametrize(("action", "is_retried"), [("stop", False), ("stop_and_retry", True)])
class TestList:
    def test_selected_jobs_are_stopped_after_a_question(
        self, operator: Client, hanged: list[Job], action: str, is_retried: bool
    ) -> None:
        question = act(operator, action, [hanged[0].pk], page="hangedjob")
        act(operator, action, [hanged[0].pk], page="hangedjob", confirmed="yes")

        assert "1 hanged job" in question.text
        stopped = Job.objects.stop_requested().get()
        assert (stopped.pk, stopped.retry_requested) == (hanged[0].pk, is_retried)

    def test_all_jobs_that_hang_are_stopped_and_no_others(
        self, operator: Client, hanged: list[Job], action: str, is_retried: bool
    ) -> None:
        fields = {"select_across": "1", "confirmed": "yes"}

        act(operator, action, [hanged[0].pk], page="hangedjob", **fields)

        stopped = Job.objects.stop_requested()
        assert {(job.pk, job.retry_requested) for job in stopped} == {
            (job.pk, is_retried) for job in hanged
        }

    def test_action_requires_the_permission_to_stop(
        self, viewer: Client, hanged: list[Job], action: str, is_retried: bool
    ) -> None:
        page = viewer.get(reverse("admin:dbqueue_hangedjob_changelist"))

        act(viewer, action, [hanged[0].pk], page="hangedjob", confirmed="yes")

        assert f'value="{action}"' not in page.text
        assert not Job.objects.stop_requested().exists()


@pytest.mark.parametrize(
    ("retry", "text"),
    [(False, "It is being stopped."), (True, "It is being stopped, and runs again.")],
)
def test_list_says_what_happens_to_a_stopped_job(
    operator: Client, hanged: list[Job], retry: bool, text: str
) -> None:
    Job.objects.filter(pk=hanged[0].pk).stop(then="retry" if retry else "discard")

    assert text in operator.get(reverse("admin:dbqueue_hangedjob_changelist")).text


def test_page_of_a_job_shows_that_an_attempt_was_stopped_to_run_again(viewer: Client) -> None:
    job = a_job(attempt=1)
    an_execution(job, outcome="stopped")

    page = viewer.get(reverse("admin:dbqueue_job_change", args=[job.pk]))

    assert "Stopped, runs again" in page.text


def test_button_on_the_page_of_a_job_stops_it_and_runs_it_again(
    operator: Client, hanged: list[Job]
) -> None:
    done = press(operator, "job", "stop_and_retry", hanged[0].pk, confirmed="yes")

    assert "Stop requested, to run again: 1 job." in done.text
    assert Job.objects.stop_requested().get().retry_requested


def test_operator_without_view_permission_sees_no_hanged_jobs(hanged: list[Job]) -> None:
    client = a_client("stopper", ["stop_job"])

    assert client.get(reverse("admin:dbqueue_hangedjob_changelist")).status_code == 403


def test_list_shows_what_a_job_is_doing(viewer: Client, hanged: list[Job]) -> None:
    first, second = hanged
    stack = (
        '  File "/srv/shop/reports.py", line 40, in build\n    write(rows)\n'
        '  File "/venv/lib/python3.12/site-packages/db/api.py", line 7, in execute\n    wait()\n'
    )
    StackTrace.objects.record(first, stack, {})
    Progress.objects.create(job=first, attempt=first.attempt, done=30, total=120)
    StackTrace.objects.create(job=second, attempt=second.attempt + 1, text=stack)

    text = viewer.get(reverse("admin:dbqueue_hangedjob_changelist")).text

    assert text.count("reports.py:40 build") == 1
    assert "api.py" not in text
    assert "30" in text and "120" in text
