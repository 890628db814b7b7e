"""The page of batches: progress, failed jobs, callbacks and actions."""

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


def url(row: Any) -> str:
    return reverse("admin:dbqueue_batch_change", args=[row.pk])


def visible_text(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def jobs_by_state(**counts: int) -> list[Job]:
    return [a_job(state=state) for state, count in counts.items() for _n in range(count)]


def test_list_shows_progress_and_failed_jobs(viewer: Client, db: Any) -> None:
    one = a_batch(*jobs_by_state(ready=2, failed=1, successful=5))

    text = viewer.get(LIST).text

    assert "Prices of May" in text and "In progress" in text
    assert '<progress class="dbq-bar" value="0.7500" aria-label="6 of 8 (75 %)">' in text
    assert f'{JOBS}?batch={one.pk}&amp;state=failed"' in text
    assert "✕ Failed: 1 ○ Ready: 2 ✓ Successful: 5" in visible_text(text)


def test_state_of_batch_is_shown_as_text(viewer: Client, db: Any) -> None:
    def text_after_update(row: Batch, **values: Any) -> str:
        Batch.objects.filter(pk=row.pk).update(**values)
        return visible_text(viewer.get(url(row)).text)

    one = a_batch(*jobs_by_state(successful=1))
    ended = {"finished_at": one.sealed_at}

    assert "In progress" in text_after_update(one)
    assert "Adding jobs" in text_after_update(one, sealed_at=None)
    assert "✓ Finished" in text_after_update(one, sealed_at=one.sealed_at, **ended)
    assert "✕ Finished, not all successful" in text_after_update(
        a_batch(*jobs_by_state(discarded=1)), **ended
    )
    assert "no jobs" in text_after_update(a_batch(), **ended)
    assert "✕ Abandoned" in text_after_update(a_batch(), opened_until=one.sealed_at)
    assert "✕ Finished, abandoned" in text_after_update(
        a_batch(), opened_until=one.sealed_at, **ended
    )


def test_jobs_of_large_batch_are_counted_up_to_the_limit(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_dbqueue.models.bounded_count.LIMIT", 20)
    one = a_batch(*jobs_by_state(ready=30, failed=3, successful=25))

    text = visible_text(viewer.get(url(one)).text)

    assert "✕ Failed: 3 ○ Ready: 20+ ✓ Successful: 20+" in text
    assert "too many jobs to count" in text


def test_list_takes_as_many_queries_for_many_and_large_batches(
    viewer: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            viewer.get(LIST)
        return len(seen)

    viewer.get(LIST), a_batch(*jobs_by_state(ready=3))
    one = queries()
    for _number in range(4):
        a_batch(*jobs_by_state(ready=3, failed=1))

    assert queries() == one
    monkeypatch.setattr("django_dbqueue.models.bounded_count.LIMIT", 2)
    assert queries() == one


def test_list_is_filtered_by_finished_and_searched(viewer: Client, db: Any) -> None:
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


class TestCallbacks:
    @pytest.fixture
    def batch_with_callbacks(self, transactional_db: Any) -> Any:
        def batch_with_callbacks(task: Any) -> Batch:
            with batch(on_finish=sum_up, on_success=rejoice) as made:
                task.enqueue(1)
            return Batch.objects.get(pk=made.id)

        return batch_with_callbacks

    def test_callbacks_of_unfinished_batch_are_named(
        self, viewer: Client, batch_with_callbacks: Any
    ) -> None:
        text = visible_text(viewer.get(url(batch_with_callbacks(add))).text)

        assert "When all jobs have ended sum_up Not enqueued yet." in text
        assert "If all jobs are successful rejoice Not enqueued yet." in text

    def test_callback_jobs_of_finished_batch_are_linked(
        self, viewer: Client, batch_with_callbacks: Any
    ) -> None:
        one = batch_with_callbacks(add)
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
        assert "sum_up Enqueued; the job has been deleted." in visible_text(
            viewer.get(url(one)).text
        )

    def test_skipped_callback_shows_the_reason(
        self, viewer: Client, batch_with_callbacks: Any
    ) -> None:
        one = batch_with_callbacks(fail)
        drain()

        assert "rejoice Not enqueued: not all jobs were successful." in visible_text(
            viewer.get(url(one)).text
        )

    def test_batch_without_callbacks_shows_that_it_has_none(self, viewer: Client, db: Any) -> None:
        assert "The batch has no callbacks." in viewer.get(url(a_batch())).text


class TestActions:
    def test_waiting_jobs_of_batch_are_discarded_after_confirmation(
        self, operator: Client, process: Any
    ) -> None:
        running = a_job(state=State.RUNNING, process=process)
        one = a_batch(*jobs_by_state(ready=2, successful=1), running)
        a_job()

        confirmation = press(operator, "batch", "discard", one.pk)
        assert (
            "Discard all waiting jobs: 2 jobs" in confirmation.text
            and "Running jobs continue" in confirmation.text
        )
        done = press(operator, "batch", "discard", one.pk, confirmed="yes")

        assert "Discarded: 2 jobs." in done.text
        assert sorted(states()) == ["discarded", "discarded", "ready", "running", "successful"]

    def test_failed_jobs_of_batch_are_retried_after_confirmation(
        self, operator: Client, db: Any
    ) -> None:
        one = a_batch(*jobs_by_state(failed=2, successful=1))
        jobs_by_state(failed=1)

        assert "are not enqueued again" in press(operator, "batch", "retry", one.pk).text
        press(operator, "batch", "retry", one.pk, confirmed="yes")

        assert sorted(states()) == ["failed", "ready", "ready", "successful"]

    def test_waiting_jobs_of_selected_batches_are_discarded(
        self, operator: Client, db: Any
    ) -> None:
        chosen, other = (
            [a_batch(*jobs_by_state(ready=1)) for _n in range(2)],
            a_batch(*jobs_by_state(ready=1)),
        )

        act(operator, "discard", [one.pk for one in chosen], page="batch", confirmed="yes")

        assert other.progress() == {"ready": 1}
        assert states().count("discarded") == 2


def test_user_without_job_permission_sees_no_jobs(db: Any) -> None:
    one = a_batch(*jobs_by_state(failed=1))
    client = a_client("batch viewer", ["view_batch"])

    assert "You do not have permission to view jobs." in client.get(url(one)).text
    assert str(one.jobs().get().pk) not in client.get(url(one)).text
    assert (
        a_client("without batches", [name for name in VIEW if name != "view_batch"])
        .get(LIST)
        .status_code
        == 403
    )


def test_values_of_batch_are_escaped(viewer: Client, db: Any) -> None:
    evil = "<script>alert('&')</script>"
    one = a_batch(a_job(task=evil), description=evil, on_finish={"task": evil, "args": []})

    for address in (
        LIST,
        url(one),
        f"{JOBS}?batch={one.pk}",
        reverse("admin:dbqueue_job_change", args=[one.jobs().get().pk]),
    ):
        assert "<script>alert" not in viewer.get(address).text, address
