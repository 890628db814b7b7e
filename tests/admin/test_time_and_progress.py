"""What the pages say of time, of progress and of what was logged."""

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
from .test_waiting import page, why

LIST = "admin:dbqueue_job_changelist"
State = Job.State


def soon(minutes: float) -> Any:
    return timezone.now() + timedelta(minutes=minutes)


@pytest.fixture
def running(process: Any) -> Job:
    return a_job(state=State.RUNNING, process=process)


class TestExpires:
    @pytest.mark.parametrize("state", [State.READY, State.SCHEDULED, State.BLOCKED])
    def test_what_expired_while_it_waited_does_not_look_as_if_it_ran(
        self, viewer: Client, db: Any, state: State
    ) -> None:
        Queue.objects.create(name="default"), Queue.objects.pause()

        blocked = {"blocked_by": "a key"} if state == State.BLOCKED else {}
        said = why(
            viewer, a_job(state=state, expires_at=soon(-10.5), run_after=soon(-20), **blocked)
        )

        assert "It expired 10 min 30 s ago" in said
        assert "It does not run: the next worker discards it." in said
        assert "paused" not in said

    def test_what_is_due_only_after_it_expires_does_not_either(
        self, viewer: Client, db: Any
    ) -> None:
        said = why(viewer, a_job(state=State.SCHEDULED, expires_at=soon(10.5), run_after=soon(20)))

        assert "It does not run: it expires in 10 min" in said

    def test_the_list_says_it_too(self, viewer: Client, db: Any) -> None:
        a_job(expires_at=soon(10)), a_job(state=State.DISCARDED, expires_at=soon(-10))
        assert "expired" not in viewer.get(reverse(LIST)).text

        a_job(expires_at=soon(-10))
        assert viewer.get(reverse(LIST)).text.count(">expired<") == 1

    def test_the_list_says_when_what_is_scheduled_runs_and_what_is_blocked_waits_for(
        self, viewer: Client, db: Any
    ) -> None:
        (
            a_job(state=State.SCHEDULED, run_after=soon(10.5)),
            a_job(state=State.BLOCKED, blocked_by="rate mail"),
        )

        text = viewer.get(reverse(LIST)).text

        assert "in 10 min" in text and '<span class="dbq-quiet">mail</span>' in text

    def test_what_still_has_time_waits_as_ever(self, viewer: Client, db: Any) -> None:
        job = a_job(expires_at=soon(10.5))

        assert "no live worker serves the queue" in why(viewer, job)
        assert "in 10 min" in viewer.get(page(job)).text

    def test_what_has_ended_waits_for_nothing(self, viewer: Client, db: Any) -> None:
        assert why(viewer, a_job(state=State.DISCARDED, expires_at=soon(-10))) == ""


class TestPriority:
    def test_of_a_selection_it_is_asked_for_and_set(self, operator: Client, db: Any) -> None:
        jobs = [a_job(), a_job(), a_job(state=State.SUCCESSFUL)]

        asked = act(operator, "reprioritise", [job.pk for job in jobs])
        done = act(operator, "reprioritise", [job.pk for job in jobs], confirmed="yes", value="50")

        assert "Set priority: 2 jobs" in asked.text
        assert 'name="value"' in asked.text
        assert (
            "Priority set to 50: 2 jobs. Unchanged: 1."
            in operator.get(done.headers["Location"]).text
        )
        assert sorted(Job.objects.values_list("priority", flat=True)) == [0, 50, 50]

    def test_of_one_job_too(self, operator: Client, db: Any) -> None:
        job = a_job()

        press(operator, "job", "reprioritise", job.pk, confirmed="yes", value="-7")

        assert Job.objects.get().priority == -7

    @pytest.mark.parametrize("value", ["", "101", "-101", "1.5", "high"])
    def test_what_is_no_priority_is_asked_for_again(
        self, operator: Client, db: Any, value: str
    ) -> None:
        asked = act(operator, "reprioritise", [a_job().pk], confirmed="yes", value=value)

        assert (asked.status_code, Job.objects.get().priority) == (200, 0)
        assert "errorlist" in asked.text


class TestProgress:
    def test_it_is_on_the_jobs_page(self, viewer: Client, running: Job) -> None:
        Progress.objects.write([(running, ProgressValue.of(1250, 5000, "<b>customers</b>"))])

        text = viewer.get(page(running)).text

        assert (
            '<progress class="dbq-bar" value="0.2500" aria-label="1,250 of 5,000 (25 %)">' in text
        )
        assert "&lt;b&gt;customers&lt;/b&gt;" in text

    def test_without_a_total_there_is_no_bar(self, viewer: Client, running: Job) -> None:
        Progress.objects.write([(running, ProgressValue.of(1250))])

        text = viewer.get(page(running)).text

        assert "1,250 done" in text
        assert "<progress" not in text

    def test_of_an_earlier_attempt_it_is_not_shown(self, viewer: Client, running: Job) -> None:
        Progress.objects.write([(running, ProgressValue.of(1, 2))])
        Job.objects.update(attempt=2)

        assert "<progress" not in viewer.get(page(running)).text
        assert "<progress" not in viewer.get(reverse(LIST)).text

    def test_the_list_has_a_bar_for_what_runs(self, viewer: Client, running: Job) -> None:
        ended = a_job(state=State.SUCCESSFUL)
        Progress.objects.write([(job, ProgressValue.of(1, 2)) for job in (running, ended)])

        assert viewer.get(reverse(LIST)).text.count("<progress") == 1
        assert "<progress" in viewer.get(page(ended)).text

    def test_the_list_takes_no_query_more_for_it(self, viewer: Client, running: Job) -> None:
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


def test_what_was_logged_is_folded_and_escaped(viewer: Client, failed: Any) -> None:
    job = failed()
    job.executions.update(log="12:00 INFO shop: <script>alert(1)</script>")
    quiet = a_job(state=State.SUCCESSFUL)
    an_execution(quiet)

    text = viewer.get(page(job)).text

    assert re.search(
        r"<details><summary>Log</summary><pre class=.dbq-text.>12:00 INFO shop: &lt;script&gt;",
        text,
    )
    assert "<script>alert" not in text
    assert "<summary>Log" not in viewer.get(page(quiet)).text


def test_a_snoozed_attempt_has_its_word(viewer: Client, db: Any) -> None:
    job = a_job(state=State.SCHEDULED, attempt=1)
    an_execution(job, outcome="snoozed")

    assert "Snoozed" in viewer.get(page(job)).text
