"""The page of limits: which are full, how many wait for them, who has their slots."""

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


def read(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def a_full_one(process: Any, key: str = KEY, waiting: int = 3) -> Job:
    Semaphore.objects.create(key=key, most=1)
    holder = a_job(
        state=State.RUNNING, process=process, limits=[{"key": key, "most": 1, "discard": False}]
    )
    Slot.objects.create(semaphore_id=key, job=holder, attempt=1)
    ago = timezone.now() - timedelta(minutes=5)
    for _number in range(waiting):
        a_job(state=State.BLOCKED, blocked_by=key, enqueued_at=ago)
    return holder


def test_the_list_says_which_are_full_and_how_many_wait(viewer: Client, process: Any) -> None:
    a_full_one(process)
    Semaphore.objects.create(key="nobody waits for it", most=1)

    text = viewer.get(LIST).text

    assert "shop.tasks.charge account=17 1 at a time ⊘ 1 of 1 taken 3 5 min" in read(text)
    assert "waits_for=shop.tasks.charge+account%3D17" in text
    assert "nobody waits for it" not in text
    assert "nobody waits for it 1 at a time ○ 0 of 1 taken 0 –" in read(
        viewer.get(LIST + "?which=all").text
    )


def test_a_slot_of_an_attempt_that_has_ended_counts_for_nothing(
    viewer: Client, process: Any
) -> None:
    holder = a_full_one(process)
    Job.objects.filter(pk=holder.pk).update(state=State.READY, process=None)

    assert "0 of 1 taken" in read(viewer.get(LIST).text)


def test_of_a_rate_it_says_when_the_next_starts(viewer: Client, db: Any) -> None:
    earliest = timezone.now() + timedelta(minutes=10, seconds=30)
    Semaphore.objects.create(
        key="rate mail", every=timedelta(seconds=0.6), burst=10, earliest=earliest
    )

    text = read(viewer.get(LIST + "?which=all").text)

    assert " mail one every 600 ms, burst of 10 next start in 10 min" in text
    assert "Jobs that hold its slots" not in viewer.get(url("rate mail")).text


def test_a_page_shows_who_has_the_slots_and_who_is_next(viewer: Client, process: Any) -> None:
    holder = a_full_one(process)
    urgent = a_job(state=State.BLOCKED, blocked_by=KEY, priority=9)

    text = viewer.get(url()).text

    slots, line = text.split("Waiting jobs</h2>")
    assert reverse("admin:dbqueue_job_change", args=[holder.pk]) in slots
    assert re.findall(r'/job/([0-9a-f-]+)/change/"', line)[0] == str(urgent.pk)
    assert len(re.findall(r'/job/([0-9a-f-]+)/change/"', line)) == 4


def test_jobs_that_share_a_slot_are_shown_as_one_after_the_other(
    viewer: Client, process: Any
) -> None:
    holder = a_full_one(process)
    behind = a_job(state=State.RUNNING, process=process, started_at=holder.started_at)
    Slot.objects.create(
        semaphore_id=KEY, job=behind, attempt=1, slot_group=Slot.objects.get().slot_group
    )

    text = read(viewer.get(url()).text)

    assert "1 of 1 taken" in text
    assert text.count("shares the slot of the job above, and runs after it") == 1


def test_who_may_not_view_jobs_sees_none_of_them(process: Any) -> None:
    holder = a_full_one(process)

    text = a_client("of limits alone", ["view_semaphore"]).get(url()).text

    assert "You do not have permission to view jobs." in text and str(holder.pk) not in text


def test_the_list_costs_one_query_for_each_that_is_shown(viewer: Client, process: Any) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            viewer.get(LIST)
        return len(seen)

    a_full_one(process), viewer.get(LIST)
    one = queries()
    for number in range(4):
        a_full_one(process, f"key {number}")

    assert queries() == one + 4


def test_what_a_key_says_is_shown_as_text(viewer: Client, process: Any) -> None:
    evil = "<script>alert('&')</script>"
    a_full_one(process, evil)

    for address in (
        LIST,
        url(evil),
        reverse("admin:dbqueue_job_changelist") + "?waits_for=" + quote(evil),
    ):
        assert "<script>alert" not in viewer.get(address).text, address
