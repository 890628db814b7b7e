"""Admin actions on one job, on selected jobs and on all filtered jobs, with their confirmations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_dbqueue.models import Job, Process

from .conftest import a_failure, a_job, act, press, states

JOBS = reverse("admin:dbqueue_job_changelist")
State = Job.State


def test_button_retries_job_without_confirmation(
    operator: Client, failed: Callable[..., Job]
) -> None:
    job = failed()

    response = press(operator, "job", "retry", job.pk)

    assert "Retried: 1 job." in response.text
    assert states() == [State.READY]
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.change_message, entry.user.username) == (
        str(job.pk),
        "Retried: 1 job.",
        "operator",
    )


def test_button_discards_job_after_confirmation(operator: Client, db: Any) -> None:
    job = a_job()

    confirmation = press(operator, "job", "discard", job.pk)
    assert "are you sure?" in confirmation.text and str(job.pk) in confirmation.text
    assert states() == [State.READY]

    done = press(operator, "job", "discard", job.pk, confirmed="yes")
    assert "Discarded: 1 job." in done.text
    assert states() == [State.DISCARDED]


def test_inapplicable_action_changes_nothing_and_reports_it(
    operator: Client, process: Process
) -> None:
    job = a_job(state=State.RUNNING, process=process)

    for action in ("retry", "discard"):
        response = press(operator, "job", action, job.pk, confirmed="yes")
        assert "Nothing was changed. Unchanged: 1." in response.text
        assert f"/{action}/" not in response.text

    assert states() == [State.RUNNING]
    assert not LogEntry.objects.exists()


def test_single_selected_job_is_retried_without_confirmation(
    operator: Client, failed: Callable[..., Job]
) -> None:
    job = failed()

    assert act(operator, "retry", [job.pk]).status_code == 302
    assert states() == [State.READY]


def test_selected_jobs_are_retried_after_confirmation_without_javascript(
    operator: Client, failed: Callable[..., Job]
) -> None:
    chosen = [failed().pk, failed().pk, a_job(state=State.SUCCESSFUL).pk]
    failed()

    confirmation = act(operator, "retry", chosen)

    assert "Retry: 2 jobs" in confirmation.text and "Unchanged: 1." in confirmation.text
    for pk in chosen:
        assert f'<input type="hidden" name="_selected_action" value="{pk}">' in confirmation.text
    done = operator.post(
        JOBS,
        {"action": "retry", "_selected_action": chosen, "select_across": "0", "confirmed": "yes"},
        follow=True,
    )
    assert "Retried: 2 jobs. Unchanged: 1." in done.text
    assert states() == [State.READY, State.READY, State.SUCCESSFUL, State.FAILED]
    entries = LogEntry.objects.values_list("object_id", "change_message")
    assert set(entries) == {(str(pk), "Retried: 2 jobs. Unchanged: 1.") for pk in chosen[:2]}


def test_change_of_very_many_jobs_is_logged_once_with_the_filters(operator: Client) -> None:
    jobs = [a_job(queue="mail") for _ in range(101)]

    act(operator, "discard", [jobs[0].pk], "?queue=mail", select_across="1", confirmed="yes")

    entry = LogEntry.objects.get()
    assert entry.change_message == "Discarded: 101 jobs."
    assert (entry.object_repr, entry.object_id, entry.user.username) == (
        "queue=mail",
        None,
        "operator",
    )
    assert "queue=mail" in operator.get(reverse("admin:index")).text


def test_action_that_changes_nothing_is_not_logged(operator: Client) -> None:
    act(operator, "retry", [a_job(state=State.SUCCESSFUL).pk], confirmed="yes")

    assert not LogEntry.objects.exists()


def test_all_filtered_jobs_are_discarded_after_confirmation_naming_the_filter(
    operator: Client, failed: Callable[..., Job]
) -> None:
    mail = [failed(queue="mail").pk for number in range(3)]
    failed(queue="default")
    query = "?queue=mail&state=failed"

    confirmation = act(operator, "discard", mail[:1], query, select_across="1")

    assert "Discard: 3 jobs" in confirmation.text
    assert (
        "<code>queue=mail</code>" in confirmation.text
        and "<code>state=failed</code>" in confirmation.text
    )
    done = operator.post(
        JOBS + query,
        {
            "action": "discard",
            "_selected_action": mail[:1],
            "select_across": "1",
            "confirmed": "yes",
        },
        follow=True,
    )
    assert "Discarded: 3 jobs." in done.text
    assert states() == [State.DISCARDED] * 3 + [State.FAILED]


def test_all_jobs_matching_search_and_failure_are_retried(
    operator: Client, failed: Callable[..., Job]
) -> None:
    failure = a_failure("Out of stock")
    one, other = failed(failure, task="shop.tasks.ship"), failed(failure)
    failed(task="shop.tasks.ship")

    act(
        operator,
        "retry",
        [one.pk],
        f"?failure={failure.pk}&q=ship",
        select_across="1",
        confirmed="yes",
    )

    assert dict(Job.objects.filter(pk__in=[one.pk, other.pk]).values_list("pk", "state")) == {
        one.pk: "ready",
        other.pk: "failed",
    }
    assert Job.objects.failed().count() == 2


def test_all_selected_jobs_are_changed_by_one_statement(operator: Client, db: Any) -> None:
    Job.objects.bulk_create([Job(task="shop.tasks.ship", queue="mail") for number in range(300)])
    pk = Job.objects.first().pk  # type: ignore[union-attr]

    with CaptureQueriesContext(connection) as seen:
        act(operator, "discard", [pk], select_across="1", confirmed="yes")

    assert (
        len(
            [
                query
                for query in seen
                if query["sql"].startswith('UPDATE "dbqueue_job"')
                or query["sql"].startswith("UPDATE `dbqueue_job`")
            ]
        )
        == 1
    )
    assert set(states()) == {State.DISCARDED}


def test_selection_above_the_count_limit_is_shown_with_plus(
    operator: Client, monkeypatch: pytest.MonkeyPatch, db: Any
) -> None:
    monkeypatch.setattr("django_dbqueue.models.bounded_count.LIMIT", 100)
    Job.objects.bulk_create([Job(task="shop.tasks.ship", queue="mail") for number in range(150)])
    pk = Job.objects.first().pk  # type: ignore[union-attr]

    confirmation = act(operator, "discard", [pk], select_across="1")
    assert "Discard: 100+ jobs" in confirmation.text

    done = operator.post(
        JOBS,
        {"action": "discard", "_selected_action": pk, "select_across": "1", "confirmed": "yes"},
        follow=True,
    )
    assert "Discarded: 150 jobs." in done.text


def test_retry_wakes_workers_of_the_queues(
    operator: Client, failed: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[tuple[str, str]] = []
    monkeypatch.setattr("django_dbqueue.core.notify.wake", lambda *given: woken.append(given))
    one, other = failed(queue="mail"), failed(queue="default")
    failed(queue="third")

    act(operator, "retry", [one.pk, other.pk], confirmed="yes")

    assert sorted(woken) == [("default", "default"), ("default", "mail")]
