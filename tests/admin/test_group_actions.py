"""What the actions of failures and of queues do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.test import Client
from django.urls import reverse

from django_dbqueue.compat import task_backends
from django_dbqueue.models import Failure, Job, Queue, TaskState

from .conftest import a_failure, a_job, act, an_execution, press, states

JOBS = reverse("admin:dbqueue_job_changelist")
State = Job.State


class TestFailures:
    def test_all_failed_jobs_of_a_failure_are_retried_after_a_confirmation(
        self, operator: Client, failed: Callable[..., Job]
    ) -> None:
        failure, other = a_failure("Out of stock"), a_failure("No such customer")
        mine = [failed(failure), failed(failure)]
        not_mine = failed(other)
        done_since = failed(failure)
        Job.objects.filter(pk=done_since.pk).update(state=State.SUCCESSFUL)
        failed_otherwise_since = failed(failure)
        Job.objects.filter(pk=failed_otherwise_since.pk).update(attempt=2, failures=2)
        an_execution(failed_otherwise_since, other, attempt=2)

        asked = press(operator, "failure", "retry", failure.pk)
        assert "Retry all failed jobs: 2 jobs" in asked.text
        done = press(operator, "failure", "retry", failure.pk, confirmed="yes")

        assert "Ready to run again: 2 jobs." in done.text
        assert set(Job.objects.ready()) == set(mine)
        assert Job.objects.get(pk=not_mine.pk).state == State.FAILED
        assert LogEntry.objects.get().object_id == str(failure.pk)

    def test_all_failed_jobs_of_a_failure_are_discarded(
        self, operator: Client, failed: Callable[..., Job]
    ) -> None:
        failure = a_failure()
        failed(failure), failed(failure), failed(a_failure("Out of stock"))

        assert "are you sure?" in press(operator, "failure", "discard", failure.pk).text
        press(operator, "failure", "discard", failure.pk, confirmed="yes")

        assert states() == [State.DISCARDED, State.DISCARDED, State.FAILED]

    def test_the_jobs_of_selected_failures_are_retried(
        self, operator: Client, failed: Callable[..., Job]
    ) -> None:
        chosen = [a_failure("Out of stock"), a_failure("Too late")]
        failed(chosen[0]), failed(chosen[1]), failed(a_failure("No such customer"))

        act(operator, "retry", [failure.pk for failure in chosen], page="failure", confirmed="yes")

        assert states() == [State.READY, State.READY, State.FAILED]

    def test_a_failure_is_muted_resolved_and_reopened(self, operator: Client, db: Any) -> None:
        failure = a_failure()

        for action, state in (("mute", "muted"), ("resolve", "resolved"), ("reopen", "open")):
            press(operator, "failure", action, failure.pk)
            assert Failure.objects.get().state == state
        act(operator, "mute", [failure.pk], page="failure")

        assert Failure.objects.get().state == "muted"

    def test_only_buttons_that_apply_are_shown(self, operator: Client, db: Any) -> None:
        failure = a_failure()

        text = operator.get(reverse("admin:dbqueue_failure_change", args=[failure.pk])).text

        assert [
            f"/{action}/" in text for action in ("mute", "resolve", "reopen", "retry", "discard")
        ] == [
            True,
            True,
            False,
            False,
            False,
        ]


class TestQueues:
    def test_a_queue_is_paused_and_resumed(self, operator: Client, db: Any) -> None:
        Queue.objects.ensure_rows(["mail"])

        assert "Paused: 1 queue." in press(operator, "queue", "pause", "mail").text
        assert Queue.objects.paused().exists()
        assert "Resumed: 1 queue." in press(operator, "queue", "resume", "mail").text
        assert not Queue.objects.paused().exists()

    def test_selected_queues_are_paused_after_a_confirmation(
        self, operator: Client, db: Any
    ) -> None:
        Queue.objects.ensure_rows(["default", "mail", "slow"])

        assert "Pause: 2 queues" in act(operator, "pause", ["mail", "slow"], page="queue").text
        act(operator, "pause", ["mail", "slow"], page="queue", confirmed="yes")
        assert list(Queue.objects.paused().order_by("name").values_list("pk", flat=True)) == [
            "mail",
            "slow",
        ]
        act(operator, "resume", ["mail", "slow"], page="queue")

        assert not Queue.objects.paused().exists()

    def test_a_queue_may_have_any_name(self, operator: Client, db: Any) -> None:
        Queue.objects.ensure_rows(["a/b c?&_é"])
        text = operator.get(reverse("admin:dbqueue_queue_changelist")).text
        address = text.split('class="field-name"><a href="')[1].split('"')[0].partition("?")[0]

        assert operator.get(address).status_code == 200
        operator.post(address.replace("/change/", "/pause/"))

        assert Queue.objects.paused().exists()

    def test_a_queue_is_paused_for_a_while(self, operator: Client, db: Any) -> None:
        Queue.objects.ensure_rows(["mail"])

        assert "Duration" in press(operator, "queue", "pause_for", "mail").text
        done = press(operator, "queue", "pause_for", "mail", confirmed="yes", value="900")

        assert "Paused for 15 min: 1 queue." in done.text
        assert "until" in done.text
        queue = Queue.objects.get()
        assert queue.resume_at and queue.paused_at
        assert (queue.resume_at - queue.paused_at).total_seconds() == 900

    def test_a_length_that_is_not_offered_is_refused(self, operator: Client, db: Any) -> None:
        Queue.objects.ensure_rows(["mail"])

        assert (
            "Select a valid choice"
            in press(operator, "queue", "pause_for", "mail", confirmed="yes", value="1").text
        )
        assert not Queue.objects.paused().exists()

    def test_what_waits_in_a_queue_is_discarded_after_a_question_that_says_how_much(
        self, operator: Client, db: Any
    ) -> None:
        Queue.objects.ensure_rows(["mail"])
        (
            a_job(queue="mail"),
            a_job(queue="mail", state=State.SCHEDULED),
            a_job(queue="mail", state=State.FAILED),
            a_job(),
        )

        assert "Discard all waiting jobs: 2 jobs" in press(operator, "queue", "clear", "mail").text
        assert (
            "Discarded: 2 jobs." in press(operator, "queue", "clear", "mail", confirmed="yes").text
        )
        assert sorted(states()) == [State.DISCARDED, State.DISCARDED, State.FAILED, State.READY]

    def test_jobs_are_moved_to_another_queue(self, operator: Client, db: Any) -> None:
        chosen = [a_job(queue="mail").pk, a_job(queue="mail", state=State.FAILED).pk]

        assert "Name of a queue that a worker serves." in act(operator, "move", chosen).text
        refused = act(operator, "move", chosen, confirmed="yes", value="a,b")
        assert "is not a queue" in refused.text
        act(operator, "move", chosen, confirmed="yes", value="slow")

        assert list(Job.objects.order_by("pk").values_list("queue", flat=True)) == ["slow", "mail"]

    def test_jobs_are_not_moved_to_a_queue_that_there_is_not(
        self, operator: Client, db: Any, settings: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(task_backends["default"], "queues", {"default", "mail"})

        refused = press(operator, "job", "move", a_job().pk, confirmed="yes", value="mial")

        assert "Unknown queue mial. Give one of default, mail." in refused.text


class TestTasks:
    def test_a_task_is_paused_from_its_jobs_page_and_resumed(
        self, operator: Client, db: Any
    ) -> None:
        job = a_job()
        text = operator.get(reverse("admin:dbqueue_job_change", args=[job.pk])).text
        address = reverse("admin:dbqueue_taskstate_change", args=[quote(job.task)])
        assert f'href="{address}"' in text
        assert operator.get(address).status_code == 200

        assert "Paused: 1 task." in press(operator, "taskstate", "pause", quote(job.task)).text
        assert TaskState.objects.names_of_paused() == [job.task]
        assert "Resumed: 1 task." in press(operator, "taskstate", "resume", quote(job.task)).text
        assert TaskState.objects.names_of_paused() == []

    def test_the_tasks_of_the_newest_jobs_are_listed(self, viewer: Client, db: Any) -> None:
        a_job(), a_job(task="shop.tasks.ship")

        text = viewer.get(reverse("admin:dbqueue_taskstate_changelist")).text

        assert "shop.tasks.send_invoice" in text and "shop.tasks.ship" in text
