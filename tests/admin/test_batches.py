"""The page of batches: how far each is, what failed in it, what follows, and what can be done about it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_dbqueue import batch
from django_dbqueue.models import Batch, Job
from django_dbqueue.testing import drain
from tests.tasks import add, fail, rejoice, sum_up

from .conftest import VIEW, a_batch, a_client, a_job, act, press, states

LIST = reverse("admin:dbqueue_batch_changelist")
JOBS = reverse("admin:dbqueue_job_changelist")
State = Job.State


def url(one: Any) -> str:
    return reverse("admin:dbqueue_batch_change", args=[one.pk])


def read(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def some(**numbers: int) -> list[Job]:
    return [a_job(state=state) for state, number in numbers.items() for _n in range(number)]


def test_the_list_says_how_far_they_are_and_what_failed(viewer: Client, db: Any) -> None:
    one = a_batch(*some(ready=2, failed=1, successful=5))

    text = viewer.get(LIST).text

    assert "Prices of May" in text and "In progress" in text
    assert '<progress class="dbq-bar" value="0.7500" aria-label="6 of 8 (75 %)">' in text
    assert f'{JOBS}?batch={one.pk}&amp;state=failed"' in text
    assert "✕ 1 Failed ○ 2 Ready ✓ 5 Successful" in read(text)


def test_each_has_a_state_in_words(viewer: Client, db: Any) -> None:
    def said(one: Batch, **values: Any) -> str:
        Batch.objects.filter(pk=one.pk).update(**values)
        return read(viewer.get(url(one)).text)

    one = a_batch(*some(successful=1))
    ended = {"finished_at": one.sealed_at}

    assert "In progress" in said(one)
    assert "Adding jobs" in said(one, sealed_at=None)
    assert "✓ Finished" in said(one, sealed_at=one.sealed_at, **ended)
    assert "✕ Finished, not all successful" in said(a_batch(*some(discarded=1)), **ended)
    assert "no jobs" in said(a_batch(), **ended)
    assert "✕ Abandoned" in said(a_batch(), opened_until=one.sealed_at)
    assert "✕ Finished, abandoned" in said(a_batch(), opened_until=one.sealed_at, **ended)


def test_very_large_ones_are_counted_up_to_the_limit(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("bounded_count", "batch"):
        monkeypatch.setattr(f"django_dbqueue.models.{module}.LIMIT", 20)
    one = a_batch(*some(ready=30, failed=3, successful=25))

    text = read(viewer.get(url(one)).text)

    assert "✕ 3 Failed ○ 20+ Ready ✓ 20+ Successful" in text
    assert "too many jobs to count" in text


def test_the_list_costs_one_query_for_each_batch_and_eight_for_a_very_large_one(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            viewer.get(LIST)
        return len(seen)

    viewer.get(LIST), a_batch(*some(ready=3))
    one = queries()
    for _number in range(4):
        a_batch(*some(ready=3))

    assert queries() == one + 4
    monkeypatch.setattr("django_dbqueue.models.batch.LIMIT", 2)
    assert queries() == one + 4 + 5 * 7


def test_the_list_is_narrowed_by_what_has_finished_and_searched(viewer: Client, db: Any) -> None:
    open_one, ended = a_batch(), a_batch(description="Prices of June")
    Batch.objects.filter(pk=ended.pk).update(finished_at=ended.sealed_at)

    def listed(query: str) -> list[bool]:
        text = viewer.get(LIST + query).text
        return [url(open_one) in text, url(ended) in text]

    assert listed("") == [True, True]
    assert listed("?finished=no") == [True, False]
    assert listed("?finished=yes") == [False, True]
    assert listed("?q=june") == [False, True]
    assert listed(f"?q={open_one.pk}") == [True, False]


class TestWhatFollows:
    @pytest.fixture
    def followed(self, transactional_db: Any) -> Any:
        def followed(task: Any) -> Batch:
            with batch(on_finish=sum_up, on_success=rejoice) as made:
                task.enqueue(1)
            return Batch.objects.get(pk=made.id)

        return followed

    def test_before_it_has_finished_it_is_named(self, viewer: Client, followed: Any) -> None:
        text = read(viewer.get(url(followed(add))).text)

        assert "When all jobs have ended sum_up Not enqueued yet." in text
        assert "If all jobs are successful rejoice Not enqueued yet." in text

    def test_afterwards_its_job_is_linked(self, viewer: Client, followed: Any) -> None:
        one = followed(add)
        drain()

        text = viewer.get(url(one)).text
        for task in (sum_up, rejoice):
            assert (
                reverse(
                    "admin:dbqueue_job_change", args=[Job.objects.get(task=task.module_path).pk]
                )
                in text
            )
        Job.objects.filter(task=sum_up.module_path).delete()
        assert "sum_up Enqueued; the job has been deleted." in read(viewer.get(url(one)).text)

    def test_what_did_not_follow_says_why(self, viewer: Client, followed: Any) -> None:
        one = followed(fail)
        drain()

        assert "rejoice Not enqueued: not all jobs were successful." in read(
            viewer.get(url(one)).text
        )

    def test_nothing_follows(self, viewer: Client, db: Any) -> None:
        assert "The batch has no callbacks." in viewer.get(url(a_batch())).text


class TestActions:
    def test_the_rest_is_discarded_after_a_confirmation(
        self, operator: Client, process: Any
    ) -> None:
        running = a_job(state=State.RUNNING, process=process)
        one = a_batch(*some(ready=2, successful=1), running)
        a_job()

        asked = press(operator, "batch", "discard", one.pk)
        assert (
            "Discard all waiting jobs: 2 jobs" in asked.text
            and "Running jobs continue" in asked.text
        )
        done = press(operator, "batch", "discard", one.pk, confirmed="yes")

        assert "Discarded: 2 jobs." in done.text
        assert sorted(states()) == ["discarded", "discarded", "ready", "running", "successful"]

    def test_all_that_failed_in_it_is_retried(self, operator: Client, db: Any) -> None:
        one = a_batch(*some(failed=2, successful=1))
        some(failed=1)

        assert "are not enqueued again" in press(operator, "batch", "retry", one.pk).text
        press(operator, "batch", "retry", one.pk, confirmed="yes")

        assert sorted(states()) == ["failed", "ready", "ready", "successful"]

    def test_the_rest_of_a_selection_is_discarded(self, operator: Client, db: Any) -> None:
        chosen, other = [a_batch(*some(ready=1)) for _n in range(2)], a_batch(*some(ready=1))

        act(operator, "discard", [one.pk for one in chosen], page="batch", confirmed="yes")

        assert other.progress() == {"ready": 1}
        assert states().count("discarded") == 2


def test_who_may_not_view_jobs_sees_none(db: Any) -> None:
    one = a_batch(*some(failed=1))
    client = a_client("of batches alone", ["view_batch"])

    assert "You do not have permission to view jobs." in client.get(url(one)).text
    assert str(one.jobs().get().pk) not in client.get(url(one)).text
    assert (
        a_client("of all but batches", [name for name in VIEW if name != "view_batch"])
        .get(LIST)
        .status_code
        == 403
    )


def test_what_a_batch_brings_is_shown_as_text(viewer: Client, db: Any) -> None:
    evil = "<script>alert('&')</script>"
    one = a_batch(a_job(task=evil), description=evil, on_finish={"task": evil, "args": []})

    for address in (
        LIST,
        url(one),
        f"{JOBS}?batch={one.pk}",
        reverse("admin:dbqueue_job_change", args=[one.jobs().get().pk]),
    ):
        assert "<script>alert" not in viewer.get(address).text, address
