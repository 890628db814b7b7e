"""What a task has done: the charts on its page, and the history on the page of a job."""

from __future__ import annotations

import re
from typing import Any

from django.contrib.admin.utils import quote
from django.test import Client
from django.urls import reverse

from django_dbqueue.core.counts import Times
from django_dbqueue.models import TaskState

from .conftest import a_job, a_statistic
from .test_job_details import page_text
from .test_jobs import page

TASK = "shop.tasks.send_invoice"


def task_page(client: Client, query: str = "") -> str:
    TaskState.objects.ensure_rows([TASK])
    address = reverse("admin:dbqueue_taskstate_change", args=[quote(TASK)])
    return client.get(address + query).text


def test_page_of_a_task_has_its_charts(viewer: Client, db: Any) -> None:
    a_statistic(2, task=TASK, runs=30, failures=2, run_time=Times.of([0.4] * 30))
    a_statistic(2, task="shop.tasks.other", runs=500)
    a_statistic(5 * 24, task=TASK, runs=70)

    day, week = task_page(viewer), task_page(viewer, "?hours=168")

    assert "attempts without failure: 28<" in day and "failed attempts: 2<" in day
    assert "attempts without failure: 98<" in week
    assert "<strong>24 hours</strong>" in day and "<strong>7 days</strong>" in week


def test_distribution_has_all_run_times_from_the_shortest_to_the_longest(
    viewer: Client, db: Any
) -> None:
    seconds = [0.0001, 0.0012, 0.4, 0.4, 200_000.0]
    a_statistic(1, task=TASK, runs=5, run_time=Times.of(seconds))

    _before, chart = task_page(viewer).split("Distribution of run times</strong>")

    bars = re.findall(r"<title>(.*?): attempts (\d+)</title>", chart)
    assert bars == [("≤ 2 ms", "2"), ("≤ 500 ms", "2"), ("&gt; 1 d 3 h", "1")]


def test_task_without_attempts_has_no_distribution(viewer: Client, db: Any) -> None:
    assert "Distribution" not in task_page(viewer)


def test_page_of_a_job_has_the_last_day_of_its_task(viewer: Client, db: Any) -> None:
    job = a_job(task=TASK)
    assert "attempts</title>" not in viewer.get(page(job)).text

    a_statistic(2, task=TASK, runs=1200, failures=3)
    a_statistic(3, task="shop.tasks.other", runs=5)
    a_statistic(30, task=TASK, runs=5)

    assert "1,200 (3 failed)" in page_text(viewer, job)
    assert "<title>attempts</title>" in viewer.get(page(job)).text
