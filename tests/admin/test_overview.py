"""The first page: whether all is well, what is wrong, and how much runs, fails and waits."""

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

from django_dbqueue.admin.charts import Series, bars
from django_dbqueue.core.counts import Times
from django_dbqueue.models import Job, Process
from django_dbqueue.models.enums import State

from .conftest import a_client, a_failure, a_job, a_process, a_recurring_task, a_statistic

PAGE = "/admin/dbqueue/overview/"


@pytest.fixture
def all_alive(db: Any) -> None:
    a_process("worker@here:1:abc", details={"queues": "*", "threads": 2})
    a_process("dispatcher@here:1:abc", kind=Process.Kind.DISPATCHER)


def problems(client: Client) -> list[str]:
    return [each["what"] for each in client.get(PAGE).context["problems"]]


def test_overview_is_the_first_page_of_the_app(viewer: Client, db: Any) -> None:
    (app,) = (
        each
        for each in viewer.get(reverse("admin:index")).context["app_list"]
        if each["app_label"] == "dbqueue"
    )

    assert app["models"][0]["admin_url"] == PAGE
    assert app["models"][0]["name"].strip() == "Overview"


def test_all_is_well(viewer: Client, all_alive: None) -> None:
    page = viewer.get(PAGE)

    assert "All is well: no problem was found." in page.text
    assert "dbq-verdict dbq-good" in page.text


def test_dead_workers_and_the_jobs_that_wait_for_them_are_the_first_thing(viewer: Client) -> None:
    for _ in range(3):
        a_job()

    page = viewer.get(PAGE)

    assert "1 problem, of which critical: 1." in page.text
    assert "No runqueue is alive." in page.text
    assert "No job runs; 3 ready jobs so far." in page.text
    assert f'<a href="{reverse("admin:dbqueue_process_changelist")}">' in page.text
    assert "python manage.py runqueue" in page.text


def test_problems_link_to_the_page_that_shows_more(
    viewer: Client, all_alive: None, failed: Callable[..., Job]
) -> None:
    failed(a_failure("Out of stock"), finished_at=timezone.now())
    a_recurring_task(next_run_at=timezone.now() - timedelta(hours=1))
    a_job(
        state=State.RUNNING,
        started_at=timezone.now() - timedelta(hours=9),
        attempt=1,
        process=Process.objects.get(kind=Process.Kind.WORKER),
    )

    found = {each["what"]: each["page"] for each in viewer.get(PAGE).context["problems"]}

    pages = {
        next(page for start, page in found.items() if text in start): text
        for text in ("Out of stock", "overdue", "1 hanged job. The first one")
    }
    assert set(pages) == {
        reverse(f"admin:dbqueue_{name}_changelist")
        for name in ("failure", "recurringtask", "hangedjob")
    }


def test_jobs_of_each_state_are_counted_and_linked(
    viewer: Client, all_alive: None, failed: Callable[..., Job]
) -> None:
    a_job(), a_job(), failed()

    text = re.sub(r"\s+", " ", viewer.get(PAGE).text)

    jobs = reverse("admin:dbqueue_job_changelist")
    assert f'Ready <strong><a href="{jobs}?state=ready">2</a></strong>' in text
    assert f'Failed <strong><a href="{jobs}?state=failed">1</a></strong>' in text
    assert "Blocked <strong>0</strong>" in text


@pytest.mark.parametrize(
    ("hours", "enqueued"), [("", 3), ("24", 3), ("168", 7), ("720", 15), ("x", 3)]
)
def test_charts_add_up_the_hours_of_the_chosen_time(
    viewer: Client, all_alive: None, hours: str, enqueued: int
) -> None:
    for place, ago in enumerate((0, 23, 100, 500, 900)):
        a_statistic(ago, enqueued=2**place, runs=2**place, run_time=Times.of([0.5]))

    text = viewer.get(PAGE, {"hours": hours} if hours else {}).text

    assert f"enqueued jobs: {enqueued}" in text
    assert f"attempts without failure: {enqueued}" in text


def test_bars_are_drawn_to_one_scale_with_the_numbers_as_titles() -> None:
    text = bars(
        "Jobs <b>",
        ["10:00", "11:00"],
        [Series("done", "good", [4, 0]), Series("failed", "bad", [1, 2])],
    )

    heights = re.findall(r'height="([\d.]+)"><title>([^<]+)</title>', text)
    assert heights == [
        ("120.00", "10:00: done 4"),
        ("30.00", "10:00: failed 1"),
        ("60.00", "11:00: failed 2"),
    ]
    assert "Jobs &lt;b&gt;" in text
    assert '<tr><th scope="row">11:00</th><td>0</td><td>2</td></tr>' in text
    assert "style=" not in text


def test_charts_without_data_are_empty() -> None:
    assert "<rect" not in bars("Jobs", ["10:00"], [Series("done", "good", [0])])
    assert "<rect" not in bars("Jobs", [], [Series("done", "good", [])])


def test_overview_needs_the_permission_to_view_jobs(db: Any) -> None:
    assert a_client("other", ["view_failure"]).get(PAGE).status_code == 403
    assert a_client("viewer of jobs", ["view_job"]).get(PAGE).status_code == 200
    assert Client().get(PAGE).status_code == 302


def test_number_of_queries_does_not_depend_on_the_rows(
    viewer: Client, all_alive: None, failed: Callable[..., Job]
) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as found:
            viewer.get(PAGE)
        return len(found)

    failed(a_failure("one"), finished_at=timezone.now())
    few = queries()
    for number in range(20):
        failed(a_failure(f"another {number}"), finished_at=timezone.now(), queue=f"q{number}")
        a_job(state=State.SCHEDULED, run_after=timezone.now() + timedelta(hours=1))

    assert queries() == few


def test_each_queue_has_a_row_with_its_numbers_of_the_chosen_time(
    viewer: Client, all_alive: None
) -> None:
    a_statistic(1, queue="mail", enqueued=5, runs=4, failures=1, run_time=Times.of([0.5]))
    a_statistic(30, queue="mail", enqueued=90, runs=90)
    a_statistic(1, queue="slow", enqueued=1, runs=1, wait_time=Times.of([3600.0]))

    page = viewer.get(PAGE, {"hours": "24"})

    mail, slow = page.context["by_queue"]
    assert (mail["name"], mail["enqueued"], mail["runs"]) == ("mail", "5", "4")
    assert "25 %" in mail["failed"] and "p99" in mail["run_time"]
    assert "p95: 59 min" in slow["waiting_time"]
    assert 'href="?hours=24&amp;queue=slow"' in page.text
    assert "enqueued jobs: 6" in page.text
    assert [row["name"] for row in viewer.get(PAGE, {"queue": "slow"}).context["by_queue"]] == [
        "slow"
    ]
