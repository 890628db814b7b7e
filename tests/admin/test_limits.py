"""The page of limits: full limits, waiting jobs and slot holders."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from django.contrib.admin.utils import quote
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.models import Job, Semaphore, Slot

from .conftest import a_client, a_job

LIST = reverse("admin:dbqueue_semaphore_changelist")
State = Job.State
KEY = "shop.tasks.charge account=17"


def url(key: str = KEY) -> str:
    return reverse("admin:dbqueue_semaphore_change", args=[quote(key)])


def visible_text(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def a_full_limit(process: Any, key: str = KEY, waiting: int = 3) -> Job:
    Semaphore.objects.create(key=key, max_running=1)
    holder = a_job(
        state=State.RUNNING,
        process=process,
        limits=[{"key": key, "max_running": 1, "discard": False}],
    )
    Slot.objects.create(semaphore_id=key, job=holder, attempt=1)
    ago = timezone.now() - timedelta(minutes=5)
    for _number in range(waiting):
        a_job(state=State.BLOCKED, blocked_by=key, enqueued_at=ago)
    return holder


def test_list_shows_full_limits_and_number_of_waiting_jobs(viewer: Client, process: Any) -> None:
    a_full_limit(process)
    Semaphore.objects.create(key="idle limit", max_running=1)

    text = viewer.get(LIST).text

    assert "shop.tasks.charge account=17 1 at a time ⊘ 1 of 1 taken 3 5 min" in visible_text(text)
    assert "waits_for=shop.tasks.charge+account%3D17" in text
    assert "idle limit" not in text
    assert "idle limit 1 at a time ○ 0 of 1 taken 0 –" in visible_text(
        viewer.get(LIST + "?which=all").text
    )


def test_slot_of_ended_attempt_does_not_count(viewer: Client, process: Any) -> None:
    holder = a_full_limit(process)
    Job.objects.filter(pk=holder.pk).update(state=State.READY, process=None)

    assert "0 of 1 taken" in visible_text(viewer.get(LIST).text)


def test_rate_limit_shows_its_next_start(viewer: Client, db: Any) -> None:
    earliest = timezone.now() + timedelta(minutes=10, seconds=30)
    Semaphore.objects.create(
        key="rate mail", interval=timedelta(seconds=0.6), burst=10, earliest=earliest
    )

    text = visible_text(viewer.get(LIST + "?which=all").text)

    assert " mail one every 600 ms, burst of 10 next start in 10 min" in text
    assert "Jobs that hold its slots" not in viewer.get(url("rate mail")).text


def test_page_shows_slot_holders_and_waiting_jobs_in_order(viewer: Client, process: Any) -> None:
    holder = a_full_limit(process)
    urgent = a_job(state=State.BLOCKED, blocked_by=KEY, priority=9)

    text = viewer.get(url()).text

    slots, line = text.split("Waiting jobs</h2>")
    assert reverse("admin:dbqueue_job_change", args=[holder.pk]) in slots
    assert re.findall(r'/job/([0-9a-f-]+)/change/"', line)[0] == str(urgent.pk)
    assert len(re.findall(r'/job/([0-9a-f-]+)/change/"', line)) == 4


def test_jobs_that_share_a_slot_are_shown_as_sequential(viewer: Client, process: Any) -> None:
    holder = a_full_limit(process)
    behind = a_job(state=State.RUNNING, process=process, started_at=holder.started_at)
    Slot.objects.create(
        semaphore_id=KEY, job=behind, attempt=1, slot_group=Slot.objects.get().slot_group
    )

    text = visible_text(viewer.get(url()).text)

    assert "1 of 1 taken" in text
    assert text.count("shares the slot of the job above, and runs after it") == 1


def test_user_without_job_permission_sees_no_jobs(process: Any) -> None:
    holder = a_full_limit(process)

    text = a_client("limit viewer", ["view_semaphore"]).get(url()).text

    assert "You do not have permission to view jobs." in text and str(holder.pk) not in text


def test_list_takes_as_many_queries_for_many_limits(viewer: Client, process: Any) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            viewer.get(LIST)
        return len(seen)

    a_full_limit(process), viewer.get(LIST)
    one = queries()
    for number in range(4):
        a_full_limit(process, f"key {number}")

    assert queries() == one


def test_key_is_escaped(viewer: Client, process: Any) -> None:
    evil = "<script>alert('&')</script>"
    a_full_limit(process, evil)

    for address in (
        LIST,
        url(evil),
        reverse("admin:dbqueue_job_changelist") + "?waits_for=" + quote(evil),
    ):
        assert "<script>alert" not in viewer.get(address).text, address
