"""Admin actions on failures, queues and tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.test import Client
from django.urls import reverse

from django_dbqueue.compat import task_backends
from django_dbqueue.models import Failure, Job, Queue, TaskState

from .conftest import a_client, a_failure, a_job, act, an_execution, press, states

JOBS = reverse("admin:dbqueue_job_changelist")
State = Job.State


class TestFailures:
    def test_retry_of_failure_retries_its_failed_jobs_after_confirmation(
        self, operator: Client, failed: Callable[..., Job]
    ) -> None:
        failure, other = a_failure("Out of stock"), a_failure("No such customer")
        retried = [failed(failure), failed(failure)]
        failed_differently = failed(other)
        successful_since = failed(failure)
        Job.objects.filter(pk=successful_since.pk).update(state=State.SUCCESSFUL)
        failed_differently_since = failed(failure)
        Job.objects.filter(pk=failed_differently_since.pk).update(attempt=2, failures=2)
        an_execution(failed_differently_since, other, attempt=2)

        confirmation = press(operator, "failure", "retry", failure.pk)
        assert "Retry all jobs now: 2 jobs" in confirmation.text
        done = press(operator, "failure", "retry", failure.pk, confirmed="yes")

        assert "Retried: 2 jobs." in done.text
        assert set(Job.objects.ready()) == set(retried)
        assert Job.objects.get(pk=failed_differently.pk).state == State.FAILED
        assert LogEntry.objects.get().object_id == str(failure.pk)

    def test_discard_of_failure_discards_its_failed_jobs_after_confirmation(
        self, operator: Client, failed: Callable[..., Job]
    ) -> None:
        failure = a_failure()
        failed(failure), failed(failure), failed(a_failure("Out of stock"))

        assert "are you sure?" in press(operator, "failure", "discard", failure.pk).text
        press(operator, "failure", "discard", failure.pk, confirmed="yes")

        assert states() == [State.DISCARDED, State.DISCARDED, State.FAILED]

    def test_retry_of_selected_failures_retries_their_jobs(
        self, operator: Client, failed: Callable[..., Job]
    ) -> None:
        chosen = [a_failure("Out of stock"), a_failure("Too late")]
        failed(chosen[0]), failed(chosen[1]), failed(a_failure("No such customer"))

        act(operator, "retry", [failure.pk for failure in chosen], page="failure", confirmed="yes")

        assert states() == [State.READY, State.READY, State.FAILED]

    def test_failure_is_muted_resolved_and_reopened(self, operator: Client, db: Any) -> None:
        failure = a_failure()

        for action, state in (("mute", "muted"), ("resolve", "resolved"), ("reopen", "open")):
            press(operator, "failure", action, failure.pk)
            assert Failure.objects.get().state == state
        act(operator, "mute", [failure.pk], page="failure")

        assert Failure.objects.get().state == "muted"

    def test_only_applicable_buttons_are_shown(self, operator: Client, db: Any) -> None:
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
    def test_queue_is_paused_and_resumed(self, operator: Client, db: Any) -> None:
        Queue.objects.ensure_rows(["mail"])

        assert "Paused: 1 queue." in press(operator, "queue", "pause", "mail").text
        assert Queue.objects.paused().exists()
        assert "Resumed: 1 queue." in press(operator, "queue", "resume", "mail").text
        assert not Queue.objects.paused().exists()

    def test_selected_queues_are_paused_after_confirmation(self, operator: Client, db: Any) -> None:
        Queue.objects.ensure_rows(["default", "mail", "slow"])

        assert "Pause: 2 queues" in act(operator, "pause", ["mail", "slow"], page="queue").text
        act(operator, "pause", ["mail", "slow"], page="queue", confirmed="yes")
        assert list(Queue.objects.paused().order_by("name").values_list("pk", flat=True)) == [
            "mail",
            "slow",
        ]
        act(operator, "resume", ["mail", "slow"], page="queue")

        assert not Queue.objects.paused().exists()

    def test_queue_name_may_contain_special_characters(self, operator: Client, db: Any) -> None:
        Queue.objects.ensure_rows(["a/b c?&_é"])
        text = operator.get(reverse("admin:dbqueue_queue_changelist")).text
        address = text.split('class="field-name"><a href="')[1].split('"')[0].partition("?")[0]

        assert operator.get(address).status_code == 200
        operator.post(address.replace("/change/", "/pause/"))

        assert Queue.objects.paused().exists()

    def test_queue_is_paused_for_the_chosen_duration(self, operator: Client, db: Any) -> None:
        Queue.objects.ensure_rows(["mail"])

        assert "Duration" in press(operator, "queue", "pause_for", "mail").text
        done = press(operator, "queue", "pause_for", "mail", confirmed="yes", value="900")

        assert "Paused for 15 min: 1 queue." in done.text
        assert "until" in done.text
        queue = Queue.objects.get()
        assert queue.resume_at and queue.paused_at
        assert (queue.resume_at - queue.paused_at).total_seconds() == 900

    def test_unlisted_pause_duration_is_refused(self, operator: Client, db: Any) -> None:
        Queue.objects.ensure_rows(["mail"])

        assert (
            "Select a valid choice"
            in press(operator, "queue", "pause_for", "mail", confirmed="yes", value="1").text
        )
        assert not Queue.objects.paused().exists()

    def test_waiting_jobs_of_queue_are_discarded_after_confirmation_with_count(
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

    def test_question_names_jobs_only_to_those_who_may_view_them(self, db: Any) -> None:
        Queue.objects.ensure_rows(["mail"])
        a_job(queue="mail", task="shop.secret_plan")
        for permissions, is_named in ((["view_queue"], False), (["view_queue", "view_job"], True)):
            client = a_client(str(is_named), [*permissions, "discard_job"])
            text = press(client, "queue", "clear", "mail").text
            assert "1 job" in text and ("secret_plan" in text) == is_named

    def test_job_without_a_task_is_shown(self, operator: Client, db: Any) -> None:
        job = a_job(task="")
        for page in ("job_changelist", "taskstate_changelist", "queue_changelist"):
            assert operator.get(reverse(f"admin:dbqueue_{page}")).status_code == 200
        assert operator.get(reverse("admin:dbqueue_job_change", args=[job.pk])).status_code == 200

    def test_selected_jobs_are_moved_to_another_queue(self, operator: Client, db: Any) -> None:
        chosen = [a_job(queue="mail").pk, a_job(queue="mail", state=State.FAILED).pk]

        assert "Name of a queue that a worker serves." in act(operator, "move", chosen).text
        refused = act(operator, "move", chosen, confirmed="yes", value="a,b")
        assert "is not a queue" in refused.text
        act(operator, "move", chosen, confirmed="yes", value="slow")

        assert list(Job.objects.order_by("pk").values_list("queue", flat=True)) == ["slow", "mail"]

    def test_move_to_unknown_queue_is_refused(
        self, operator: Client, db: Any, settings: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(task_backends["default"], "queues", {"default", "mail"})

        refused = press(operator, "job", "move", a_job().pk, confirmed="yes", value="mial")

        assert "Unknown queue mial. Give one of default, mail." in refused.text


class TestTasks:
    def test_task_linked_from_job_page_is_paused_and_resumed(
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

    def test_tasks_of_newest_jobs_are_listed(self, viewer: Client, db: Any) -> None:
        a_job(), a_job(task="shop.tasks.ship")

        text = viewer.get(reverse("admin:dbqueue_taskstate_changelist")).text

        assert "shop.tasks.send_invoice" in text and "shop.tasks.ship" in text
