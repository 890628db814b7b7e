"""The lists of failures, hanged jobs, queues and processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.core.counts import Counts, Times
from django_dbqueue.models import Failure, Job, Process, Queue, Statistic
from django_dbqueue.models.statistic import start_of
from tests.conftest import a_process

from .conftest import a_failure, a_job, an_execution

State = Job.State


def changelist(page: str) -> str:
    return reverse(f"admin:dbqueue_{page}_changelist")


def queries(client: Client, address: str) -> int:
    client.get(address)
    with CaptureQueriesContext(connection) as seen:
        assert client.get(address).status_code == 200
    return len(seen)


class TestFailures:
    def test_list_shows_counts_and_is_ordered_by_last_seen(
        self, viewer: Client, failed: Callable[..., Job]
    ) -> None:
        ago = timezone.now() - timedelta(hours=2)
        old, new = (
            a_failure("Out of stock", last_seen=ago, count=12),
            a_failure("Too late", count=7),
        )
        failed(old), failed(old), failed(new)
        Job.objects.filter(pk=failed(old).pk).update(state=State.DISCARDED)

        text = viewer.get(changelist("failure")).text

        assert text.index("Too late") < text.index("Out of stock")
        assert f'?failure={old.pk}&amp;state=failed">2</a>' in text
        assert f'?failure={new.pk}&amp;state=failed">1</a>' in text
        assert "12 in all" in text

    def test_query_count_of_list_does_not_grow_with_rows(
        self, viewer: Client, failed: Callable[..., Job]
    ) -> None:
        failed(a_failure("Error A"))
        one = queries(viewer, changelist("failure"))
        for letter in "BCDEFGHIJKLMNOPQRSTUVWXYZ":
            failed(a_failure(f"Error {letter}"))

        assert queries(viewer, changelist("failure")) == one

    def test_page_shows_newest_traceback_and_jobs_in_constant_queries(
        self, viewer: Client, failed: Callable[..., Job]
    ) -> None:
        failure = a_failure()
        jobs = [failed(failure) for number in range(3)]
        Job.objects.filter(pk=jobs[2].pk).update(attempt=2, failures=2)
        an_execution(jobs[2], failure, attempt=2, traceback="the newest traceback")

        address = reverse("admin:dbqueue_failure_change", args=[failure.pk])
        text = viewer.get(address).text

        assert "the newest traceback" in text and "shop/tasks.py:send_invoice" in text
        for job in jobs:
            assert text.count(reverse("admin:dbqueue_job_change", args=[job.pk])) == 1
        assert f"{changelist('job')}?failure={failure.pk}" in text
        few = queries(viewer, address)
        for _number in range(60):
            failed(failure)
        assert queries(viewer, address) == few

    def test_failure_is_shown_after_its_jobs_are_deleted(
        self, viewer: Client, failed: Callable[..., Job]
    ) -> None:
        failure = a_failure()
        failed(failure)
        Job.objects.all()._raw_delete("default")

        text = viewer.get(reverse("admin:dbqueue_failure_change", args=[failure.pk])).text

        assert "The jobs have been deleted." in text

    def test_failed_jobs_above_the_limit_are_shown_with_plus(
        self, viewer: Client, failed: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("MOST_ATTEMPTS", "MOST_JOBS"):
            monkeypatch.setattr(f"django_dbqueue.models.affected_jobs.{name}", 5)
        failure = a_failure()
        for _number in range(8):
            failed(failure)

        assert 'state=failed">6+</a>' in viewer.get(changelist("failure")).text


class TestHangedJobs:
    def test_jobs_over_run_time_or_of_silent_or_missing_process_are_listed(
        self, viewer: Client, db: Any
    ) -> None:
        now = timezone.now()
        alive = a_process("worker@here:1:abc")
        silent = a_process("worker@here:2:abc", expires_at=now - timedelta(minutes=5))
        within_run_time = a_job(state=State.RUNNING, process=alive)
        long = a_job(state=State.RUNNING, process=alive, started_at=now - timedelta(hours=3))
        of_silent_process = a_job(state=State.RUNNING, process=silent)
        orphan = a_job(state=State.RUNNING, process_id=404)

        text = viewer.get(changelist("hangedjob")).text

        assert str(within_run_time.pk) not in text
        for job in (long, of_silent_process, orphan):
            assert reverse("admin:dbqueue_job_change", args=[job.pk]) in text
        assert "more than 1 h" in text
        assert "3 h</td>" in text and "Silent" in text and "Gone" in text
        assert text.count("The attempt is lost") == 2 and text.count("It runs until") == 1

    def test_page_of_hanged_job_redirects_to_the_job(self, viewer: Client, db: Any) -> None:
        job = a_job()

        response = viewer.get(reverse("admin:dbqueue_hangedjob_change", args=[job.pk]))

        assert response.headers["Location"] == reverse("admin:dbqueue_job_change", args=[job.pk])

    def test_query_count_of_list_does_not_grow_with_rows(self, viewer: Client, db: Any) -> None:
        a_job(state=State.RUNNING, process_id=1)
        one = queries(viewer, changelist("hangedjob"))
        for number in range(2, 51):
            a_process(
                f"worker@here:{number}:abc",
                pk=number,
                expires_at=timezone.now() - timedelta(minutes=5),
            )
            a_job(state=State.RUNNING, process_id=number)

        assert queries(viewer, changelist("hangedjob")) == one


class TestQueues:
    def test_list_shows_jobs_and_state_of_queues_with_and_without_row(
        self, viewer: Client, db: Any
    ) -> None:
        hour = timedelta(hours=1)
        a_job(queue="mail", run_after=timezone.now() - 2 * hour), a_job(queue="mail", priority=5)
        a_job(queue="mail", state=State.SCHEDULED, run_after=timezone.now() + hour)
        a_job(queue="mail", state=State.RUNNING, process=a_process("worker@here:1:abc"))
        Queue.objects.ensure_rows(["empty"])
        Queue.objects.pause()

        text = viewer.get(changelist("queue")).text
        mail = text.split(">mail<")[1]

        assert [
            f'queue=mail&amp;state={state}">{number}</a>' in mail
            for state, number in (("ready", 2), ("scheduled", 1), ("running", 1))
        ]
        assert "2 h ago" in mail
        assert "Paused" in text.split(">empty<")[1].split("</tr>")[0]
        assert "Active" in mail.split("</tr>")[0]

    def test_last_hour_workers_and_objective_are_shown(self, viewer: Client, db: Any) -> None:
        late = timezone.now() - timedelta(minutes=30)
        for _number in range(3):
            a_job(queue="mail", run_after=late)
        Queue.objects.ensure_rows(["quiet"])
        for minutes in range(60):
            row = Statistic(
                period="minute",
                start=start_of("minute", timezone.now() - timedelta(minutes=minutes)),
                queue="mail",
                task="t",
            )
            row.counts = Counts(120, 123, 30, 0, Times.of([1.0]), Times.of([2.0]))
            row.save()

        def cells(name: str) -> str:
            text = viewer.get(changelist("queue")).text.split(f">{name}<")[1].split("</tr>")[0]
            return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))

        assert "in: 120/min" in cells("mail") and "out: 123/min" in cells("mail")
        assert "24 %" in cells("mail") and "p95: 1.98 s" in cells("mail")
        assert "Late objective: 10 min" in cells("mail")
        assert "✕ None" in cells("mail")
        # Three more end than come each minute: three jobs take one.
        assert "1 min" in cells("mail")
        assert "Late" not in cells("quiet") and "None" not in cells("quiet")

        a_process("worker@here:1:abc", details={"queues": "mail"})
        assert "None" not in cells("mail")

    def test_end_of_ready_jobs_is_estimated_by_the_last_minutes(
        self, viewer: Client, db: Any
    ) -> None:
        for _number in range(60):
            a_job(queue="mail")
        counts = {30: Counts(9000, 10), 1: Counts(0, 100), 0: Counts(0, 100)}
        for minutes, each in counts.items():
            start = start_of("minute", timezone.now() - timedelta(minutes=minutes))
            row = Statistic(period="minute", start=start, queue="mail", task="t")
            row.counts = each
            row.save()

        text = viewer.get(changelist("queue")).text

        assert "never" not in text and "3 min" in text.split(">mail<")[1]

    def test_queries_do_not_grow_with_queues(self, viewer: Client, db: Any) -> None:
        few = queries(viewer, changelist("queue"))
        Queue.objects.ensure_rows([f"q{number}" for number in range(40)])

        # Lanes of queues with ready jobs are found one by one on other databases.
        if connection.vendor == "postgresql":
            for number in range(40):
                a_job(queue=f"q{number}")
            assert queries(viewer, changelist("queue")) <= few + 2

    def test_jobs_of_large_queues_are_counted_up_to_the_limit(
        self, viewer: Client, monkeypatch: pytest.MonkeyPatch, db: Any
    ) -> None:
        for name in ("bounded_count", "queue"):
            monkeypatch.setattr(f"django_dbqueue.models.{name}.LIMIT", 20)
        Job.objects.bulk_create(
            [Job(task="a.b", queue="mail", priority=number % 2) for number in range(30)]
        )
        Job.objects.bulk_create([Job(task="a.b", queue="slow") for number in range(30)])
        later = timezone.now() + timedelta(hours=1)
        Job.objects.bulk_create(
            [
                Job(task="a.b", queue="slow", state="scheduled", run_after=later)
                for number in range(30)
            ]
        )

        text = viewer.get(changelist("queue")).text

        assert 'state=ready">20+</a>' in text.split(">mail<")[1].split("</tr>")[0]
        assert 'state=ready">20+</a>' in text.split(">slow<")[1].split("</tr>")[0]
        assert 'state=scheduled">20+</a>' in text.split(">slow<")[1].split("</tr>")[0]


class TestProcesses:
    def test_list_shows_liveness_and_running_jobs(self, viewer: Client, db: Any) -> None:
        parent = a_process("supervisor@here:1:abc", kind="supervisor")
        worker = a_process(
            "worker@here:2:abc", supervisor=parent, details={"queues": "*", "threads": 8}
        )
        a_process("worker@there:3:abc", expires_at=timezone.now() - timedelta(minutes=5))
        a_job(state=State.RUNNING, process=worker), a_job(state=State.RUNNING, process=worker)

        text = viewer.get(changelist("process")).text

        assert text.count("Alive</span>") == 2 and text.count("Silent</span>") == 1
        assert f'?process={worker.pk}">2</a>' in text
        assert reverse("admin:dbqueue_process_change", args=[parent.pk]) in text
        page = viewer.get(reverse("admin:dbqueue_process_change", args=[worker.pk])).text
        assert "&quot;threads&quot;: 8" in page

    def test_process_whose_details_are_no_object_is_shown(self, viewer: Client, db: Any) -> None:
        a_job()
        for number, details in enumerate([[], "x", {"queues": None, "threads": "many"}]):
            process = a_process(f"worker@here:{number}:abc", details=details)

        own = reverse("admin:dbqueue_process_change", args=[process.pk])
        assert own in viewer.get(changelist("process")).text
        for page in (own, changelist("queue"), changelist("job"), "/admin/dbqueue/overview/"):
            assert viewer.get(page).status_code == 200

    def test_process_with_missing_supervisor_is_shown(self, viewer: Client, db: Any) -> None:
        worker = a_process("worker@here:2:abc", supervisor_id=404)

        assert viewer.get(changelist("process")).status_code == 200
        assert (
            viewer.get(reverse("admin:dbqueue_process_change", args=[worker.pk])).status_code == 200
        )

    def test_query_count_of_list_does_not_grow_with_rows(self, viewer: Client, db: Any) -> None:
        a_process("worker@here:0:abc")
        one = queries(viewer, changelist("process"))
        for number in range(1, 50):
            worker = a_process(f"worker@here:{number}:abc", supervisor=Process.objects.first())
            a_job(state=State.RUNNING, process=worker)

        assert queries(viewer, changelist("process")) == one

    def test_admin_index_lists_all_models(self, viewer: Client, db: Any) -> None:
        text = viewer.get(reverse("admin:index")).text

        assert [
            name in text
            for name in (
                "Jobs",
                "Hanged jobs",
                "Failures",
                "Queues",
                "Processes",
                "Batches",
                "Limits",
            )
        ] == [True] * 7
        assert Failure.objects.count() == 0

    def test_address_with_nul_has_no_page(self, viewer: Client, db: Any) -> None:
        for model in ("job", "queue", "taskstate", "semaphore", "failure"):
            response = viewer.get(f"{changelist(model)}a%00/change/")

            assert response.status_code in (302, 404)
