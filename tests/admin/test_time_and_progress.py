"""Expiry, priority, progress and logs in the admin."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.core.progress_value import ProgressValue
from django_dbqueue.models import Job, Progress, Queue

from .conftest import a_job, act, an_execution, press
from .test_why_waiting import page, waiting_reason

LIST = "admin:dbqueue_job_changelist"
State = Job.State


def from_now(minutes: float) -> Any:
    return timezone.now() + timedelta(minutes=minutes)


@pytest.fixture
def running(process: Any) -> Job:
    return a_job(state=State.RUNNING, process=process)


class TestExpiry:
    @pytest.mark.parametrize("state", [State.READY, State.SCHEDULED, State.BLOCKED])
    def test_expired_waiting_job_shows_only_its_expiry(
        self, viewer: Client, db: Any, state: State
    ) -> None:
        Queue.objects.create(name="default"), Queue.objects.pause()

        blocked = {"blocked_by": "a key"} if state == State.BLOCKED else {}
        reason = waiting_reason(
            viewer,
            a_job(state=state, expires_at=from_now(-10.5), run_after=from_now(-20), **blocked),
        )

        assert "It expired 10 min 30 s ago" in reason
        assert "It does not run: the next worker discards it." in reason
        assert "paused" not in reason

    def test_job_due_after_its_expiry_shows_that_it_does_not_run(
        self, viewer: Client, db: Any
    ) -> None:
        reason = waiting_reason(
            viewer, a_job(state=State.SCHEDULED, expires_at=from_now(10.5), run_after=from_now(20))
        )

        assert "It does not run: it expires in 10 min" in reason

    def test_list_marks_expired_waiting_jobs(self, viewer: Client, db: Any) -> None:
        a_job(expires_at=from_now(10)), a_job(state=State.DISCARDED, expires_at=from_now(-10))
        assert "expired" not in viewer.get(reverse(LIST)).text

        a_job(expires_at=from_now(-10))
        assert viewer.get(reverse(LIST)).text.count(">expired<") == 1

    def test_list_shows_due_time_of_scheduled_and_limit_of_blocked_jobs(
        self, viewer: Client, db: Any
    ) -> None:
        (
            a_job(state=State.SCHEDULED, run_after=from_now(10.5)),
            a_job(state=State.BLOCKED, blocked_by="rate mail"),
        )

        text = viewer.get(reverse(LIST)).text

        assert "in 10 min" in text and '<span class="dbq-quiet">mail</span>' in text

    def test_unexpired_job_shows_its_waiting_reason_and_expiry(
        self, viewer: Client, db: Any
    ) -> None:
        job = a_job(expires_at=from_now(10.5))

        assert "no live worker serves the queue" in waiting_reason(viewer, job)
        assert "in 10 min" in viewer.get(page(job)).text

    def test_discarded_job_shows_no_waiting_reason(self, viewer: Client, db: Any) -> None:
        assert waiting_reason(viewer, a_job(state=State.DISCARDED, expires_at=from_now(-10))) == ""


class TestPriority:
    def test_priority_of_selected_jobs_is_set_after_confirmation(
        self, operator: Client, db: Any
    ) -> None:
        jobs = [a_job(), a_job(), a_job(state=State.SUCCESSFUL)]

        confirmation = act(operator, "reprioritise", [job.pk for job in jobs])
        done = act(operator, "reprioritise", [job.pk for job in jobs], confirmed="yes", value="50")

        assert "Set priority: 2 jobs" in confirmation.text
        assert 'name="value"' in confirmation.text
        assert (
            "Priority set to 50: 2 jobs. Unchanged: 1."
            in operator.get(done.headers["Location"]).text
        )
        assert sorted(Job.objects.values_list("priority", flat=True)) == [0, 50, 50]

    def test_priority_of_one_job_is_set_by_its_button(self, operator: Client, db: Any) -> None:
        job = a_job()

        press(operator, "job", "reprioritise", job.pk, confirmed="yes", value="-7")

        assert Job.objects.get().priority == -7

    @pytest.mark.parametrize("value", ["", "101", "-101", "1.5", "high"])
    def test_invalid_priority_shows_the_form_again(
        self, operator: Client, db: Any, value: str
    ) -> None:
        confirmation = act(operator, "reprioritise", [a_job().pk], confirmed="yes", value=value)

        assert (confirmation.status_code, Job.objects.get().priority) == (200, 0)
        assert "errorlist" in confirmation.text


class TestProgress:
    def test_job_page_shows_bar_and_escaped_note(self, viewer: Client, running: Job) -> None:
        Progress.objects.write([(running, ProgressValue.of(1250, 5000, "<b>customers</b>"))])

        text = viewer.get(page(running)).text

        assert (
            '<progress class="dbq-bar" value="0.2500" aria-label="1,250 of 5,000 (25 %)">' in text
        )
        assert "&lt;b&gt;customers&lt;/b&gt;" in text

    def test_progress_without_total_has_no_bar(self, viewer: Client, running: Job) -> None:
        Progress.objects.write([(running, ProgressValue.of(1250))])

        text = viewer.get(page(running)).text

        assert "1,250 done" in text
        assert "<progress" not in text

    def test_progress_of_an_earlier_attempt_is_not_shown(
        self, viewer: Client, running: Job
    ) -> None:
        Progress.objects.write([(running, ProgressValue.of(1, 2))])
        Job.objects.update(attempt=2)

        assert "<progress" not in viewer.get(page(running)).text
        assert "<progress" not in viewer.get(reverse(LIST)).text

    def test_list_shows_bars_of_running_jobs_only(self, viewer: Client, running: Job) -> None:
        ended = a_job(state=State.SUCCESSFUL)
        Progress.objects.write([(job, ProgressValue.of(1, 2)) for job in (running, ended)])

        assert viewer.get(reverse(LIST)).text.count("<progress") == 1
        assert "<progress" in viewer.get(page(ended)).text

    def test_query_count_of_list_does_not_grow_with_progress(
        self, viewer: Client, running: Job
    ) -> None:
        viewer.get(reverse(LIST))
        counted = []
        for _ in range(2):
            with CaptureQueriesContext(connection) as seen:
                viewer.get(reverse(LIST))
            counted.append(len(seen))
            more = [a_job(state=State.RUNNING, process=running.process) for _ in range(5)]
            Progress.objects.write([(job, ProgressValue.of(1, 2)) for job in more])
            Queue.objects.ensure_rows(["default"])

        assert counted[0] == counted[1]


def test_log_is_collapsed_and_escaped(viewer: Client, failed: Any) -> None:
    job = failed()
    job.executions.update(log="12:00 INFO shop: <script>alert(1)</script>")
    quiet = a_job(state=State.SUCCESSFUL)
    an_execution(quiet)

    text = viewer.get(page(job)).text

    assert re.search(
        r"<details><summary>Log</summary><div class=.dbq-copyable.><pre class=.dbq-text. dir=.ltr.>12:00 INFO shop: &lt;script&gt;",
        text,
    )
    assert "<script>alert" not in text
    assert "<summary>Log" not in viewer.get(page(quiet)).text


def test_snoozed_attempt_is_labelled(viewer: Client, db: Any) -> None:
    job = a_job(state=State.SCHEDULED, attempt=1)
    an_execution(job, outcome="snoozed")

    assert "Snoozed" in viewer.get(page(job)).text
