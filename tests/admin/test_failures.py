"""Failures: how often in a time, since which release, what they have in common, and triage."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_dbqueue.models import Execution, Failure, FailureStatistic, Job, Process
from django_dbqueue.models.enums import State
from django_dbqueue.models.statistic import Period, start_of
from django_dbqueue.runtime.dispatcher import Dispatcher
from django_dbqueue.runtime.shared_status import SharedStatus

from .conftest import a_failure, a_job, a_process, act, an_execution, press

LIST = "/admin/dbqueue/failure/"
HOUR = timedelta(hours=1)


def seen(failure: Failure, ago: timedelta, number: int = 1, **values: str) -> None:
    """Count attempts as the dispatcher does."""
    given = {"queue": "default", "task": "shop.tasks.send_invoice", "release": "", **values}
    for period in Period.values:
        FailureStatistic.objects.create(
            failure=failure,
            period=period,
            start=start_of(period, timezone.now() - ago),
            number=number,
            **given,
        )


def listed(client: Client, query: str = "") -> list[tuple[str, int]]:
    rows = client.get(LIST + query).context["cl"].result_list
    return [(row.message, row.in_window) for row in rows]


def page_of(client: Client, failure: Failure, query: str = "") -> str:
    text = client.get(reverse("admin:dbqueue_failure_change", args=[failure.pk]) + query).text
    return re.sub(r"\s+", " ", text)


def test_failures_are_ranked_by_their_number_in_the_chosen_time(viewer: Client) -> None:
    often, lately, old = a_failure("often"), a_failure("lately"), a_failure("old")
    seen(often, 20 * HOUR, 50), seen(lately, 0 * HOUR, 7), seen(old, 100 * HOUR, 900)

    assert listed(viewer) == [("often", 50), ("lately", 7), ("old", 0)]
    assert listed(viewer, "?hours=1") == [("lately", 7), ("old", 0), ("often", 0)]
    assert listed(viewer, "?hours=168") == [("old", 900), ("often", 50), ("lately", 7)]
    assert listed(viewer, "?hours=nonsense") == listed(viewer)
    assert "50 attempts in 24 hours" in viewer.get(LIST).text


def test_number_of_a_failure_that_was_not_seen_since_is_not_looked_up(viewer: Client) -> None:
    seen(failure := a_failure("old"), 2 * HOUR, 9)
    Failure.objects.filter(pk=failure.pk).update(last_seen=timezone.now() - 30 * HOUR)

    assert listed(viewer) == [("old", 0)]


def test_only_open_failures_are_listed_unless_others_are_wanted(viewer: Client) -> None:
    a_failure("open"), a_failure("muted", state="muted"), a_failure("done", state="resolved")

    def messages(query: str) -> set[str]:
        return {message for message, _number in listed(viewer, query)}

    assert messages("") == messages("?state=open") == {"open"}
    assert messages("?state=muted") == {"muted"}
    assert messages("?state=all") == {"open", "muted", "done"}


def test_list_names_tasks_queues_and_releases(viewer: Client) -> None:
    failure = a_failure()
    for place in range(5):
        seen(failure, 0 * HOUR, 9 - place, task=f"shop.tasks.t{place}", queue="mail", release="v1")

    text = re.sub(r"<[^>]+>", "", viewer.get(LIST).text)

    assert "t0, t1, t2 and 2 more" in text
    assert "mail" in text and "v1" in text


def test_regression_and_first_release_are_marked(viewer: Client) -> None:
    a_process("worker@here:1:abc", release="v2")
    a_process("worker@here:2:abc", release="v0", expires_at=timezone.now() - HOUR)
    a_failure("again", reopened_at=timezone.now(), release="v1")
    a_failure("new", release="v2")
    a_failure("gone", release="v0")

    rows = dict(
        re.findall(r"(again|new|gone)</span>.*?(field-state.*?)</tr>", viewer.get(LIST).text, re.S)
    )

    assert "Regression" in rows["again"] and "New in" not in rows["again"]
    assert "New in v2" in rows["new"] and "Regression" not in rows["new"]
    assert "New in" not in rows["gone"]


def test_open_failure_is_red_only_while_jobs_are_failed(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    job = failed(a_failure())
    assert "dbq-badge dbq-bad" in viewer.get(LIST).text

    Job.objects.filter(pk=job.pk).update(state=State.SUCCESSFUL)

    assert "dbq-badge dbq-bad" not in viewer.get(LIST).text


def test_muted_failure_is_open_again_after_its_time(operator: Client, backend: Any) -> None:
    for_a_day, without_end = a_failure("for a day"), a_failure("without end")
    act(operator, "mute_for", [for_a_day.pk], page="failure", confirmed="yes", value="86400")
    act(operator, "mute", [without_end.pk], page="failure")
    assert Failure.objects.get(pk=for_a_day.pk).muted_until - timezone.now() > timedelta(hours=23)

    dispatcher = Dispatcher(backend, backend.config, SharedStatus.private())
    dispatcher._prune()
    assert Failure.objects.open().count() == 0

    Failure.objects.filter(muted_until__isnull=False).update(muted_until=timezone.now() - HOUR)
    dispatcher._prune_at = 0.0
    dispatcher._prune()

    assert [each.message for each in Failure.objects.open()] == ["for a day"]
    assert Failure.objects.get(pk=for_a_day.pk).muted_until is None


def test_resolve_ends_a_regression_and_a_mute(operator: Client, db: Any) -> None:
    failure = a_failure(
        reopened_at=timezone.now(), muted_until=timezone.now() + HOUR, state="muted"
    )

    press(operator, "failure", "resolve", failure.pk)

    failure.refresh_from_db()
    assert (failure.state, failure.reopened_at, failure.muted_until) == ("resolved", None, None)


def test_action_on_all_rows_follows_the_order_by_number(operator: Client) -> None:
    for place in range(3):
        seen(a_failure(f"number {place}"), 0 * HOUR, place + 1)

    act(operator, "resolve", [1], page="failure", select_across="1")

    assert Failure.objects.filter(state="resolved").count() == 3


class TestInCommon:
    """Two hundred of the failed attempts against two hundred successful ones of the same task."""

    @pytest.fixture
    def failure(self, failed: Callable[..., Job]) -> Failure:
        failure = a_failure()
        for number in range(10):
            failed(
                failure,
                task="tests.tasks.add",
                args=[number],
                kwargs={"password": "secret-1"},
                metadata={"tenant": 17, "api_token": "secret-2"},
                queue="eu",
            )
        for number in range(10):
            job = a_job(
                task="tests.tasks.add",
                state=State.SUCCESSFUL,
                args=[100 + number],
                metadata={"tenant": number},
                queue="eu" if number < 9 else "us",
            )
            an_execution(job)
        Execution.objects.filter(outcome="failed").update(process="worker@bad:1:abc", release="v2")
        return failure

    def rows(self, text: str) -> list[str]:
        table = text.partition('id="dbq-common"')[2].partition("</table>")[0]
        return [
            re.sub(r"<[^>]+>", " ", row).strip() for row in re.findall("<tr><td>.*?</tr>", table)
        ]

    def test_what_differs_most_from_successes_is_shown(
        self, viewer: Client, failure: Failure
    ) -> None:
        text = page_of(viewer, failure)

        rows = [re.sub(r"\s+", " ", row) for row in self.rows(text)]
        assert "metadata.tenant 17 100 % 0 %" in rows
        assert "release v2 100 % 0 %" in rows
        assert "host bad 100 % 0 %" in rows
        # All have the task, nine of ten successes the queue, and each its own argument.
        assert not [row for row in rows if row.startswith(("task", "queue", "a "))]
        assert "Compared: the newest 10 of these attempts, and 10 successful ones" in text

    def test_hidden_values_are_not_shown(self, viewer: Client, failure: Failure) -> None:
        text = page_of(viewer, failure)

        assert "secret" not in text
        assert "metadata.api_token" not in text

    def test_without_successes_the_commonest_are_shown(
        self, viewer: Client, failure: Failure
    ) -> None:
        Job.objects.filter(state=State.SUCCESSFUL)._raw_delete("default")

        text = page_of(viewer, failure)

        assert any(
            row.startswith("metadata.tenant") and row.endswith("–") for row in self.rows(text)
        )
        assert "and 0 successful ones" in text

    def test_arguments_need_the_permission_to_view_jobs(self, failure: Failure) -> None:
        from .conftest import a_client

        text = page_of(a_client("triage", ["view_failure"]), failure)

        assert "dbq-common" not in text and "tenant" not in text


def test_page_shows_arguments_shortened_and_redacted(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    failed(
        failure := a_failure(),
        task="tests.tasks.add",
        args=[17],
        kwargs={"token": "secret", "text": "x" * 200},
    )

    text = page_of(viewer, failure)

    assert "a=17, " in text and "secret" not in text
    assert "x" * 81 not in text


def test_frames_of_the_project_come_first(viewer: Client, failed: Callable[..., Job]) -> None:
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/srv/shop/tasks.py", line 7, in send\n'
        "    client.post(url)\n"
        "    ~~~~~~~~~~~^^^^^\n"
        '  File "/venv/lib/python3.12/site-packages/requests/api.py", line 1, in post\n'
        "    raise Timeout\n"
        "requests.Timeout\n"
    )
    job = a_job(state=State.FAILED)
    an_execution(job, failure := a_failure(), traceback=traceback)

    text = viewer.get(reverse("admin:dbqueue_failure_change", args=[failure.pk])).text

    first, _details, whole = text.partition("<details><summary>Whole traceback")
    assert "/srv/shop/tasks.py" in first and "client.post(url)" in first
    assert "site-packages" not in first and "site-packages" in whole


def test_page_has_the_times_of_a_failure_and_deploys(viewer: Client) -> None:
    from django_dbqueue.core.counts import Counts
    from django_dbqueue.models import Statistic

    seen(failure := a_failure(release="v2"), 2 * HOUR, 5)
    for ago, release in ((3, "v1"), (2, "v2")):
        row = Statistic(
            period="hour",
            start=start_of(Period.HOUR, timezone.now()) - ago * HOUR,
            queue="q",
            task="t",
            release=release,
        )
        row.counts = Counts(runs=1)
        row.save()

    text = page_of(viewer, failure)

    assert "failed attempts: 5" in text
    assert "Deploys: v2 since" in text and "v1 since" not in text
    assert "failed attempts: 0" in page_of(viewer, failure, "?hours=1")


def test_failure_without_affected_jobs_offers_no_action_on_jobs(
    operator: Client, failed: Callable[..., Job]
) -> None:
    unaffected, affected = a_failure("Out of stock"), a_failure()
    failed(affected)

    def offered(failure: Failure) -> set[str]:
        page = operator.get(f"{LIST}{failure.pk}/change/")
        return {button["action"].name for button in page.context["buttons"]}

    on_jobs = {"retry", "retry_in_steps", "discard"}
    assert offered(affected) >= on_jobs
    assert not offered(unaffected) & on_jobs
    assert "mute" in offered(unaffected)


def test_queries_do_not_grow_with_failures_or_their_numbers(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as found:
            viewer.get(LIST)
        return len(found)

    seen(a_failure("one"), HOUR)
    few = queries()
    for number in range(20):
        failed(other := a_failure(f"letter {chr(97 + number)}"))
        for hours in range(5):
            seen(other, hours * HOUR, queue=f"q{number}")

    assert queries() == few <= 12


def test_process_releases_are_those_of_live_workers(db: Any) -> None:
    a_process("worker@here:1:abc", release="v1")
    a_process(
        "worker@here:2:abc",
        release="v2",
        expires_at=datetime.now(timezone.get_default_timezone()) - HOUR,
    )
    a_process("dispatcher@here:1:abc", kind=Process.Kind.DISPATCHER, release="v3")
    a_process("worker@here:3:abc", release="")

    assert Process.objects.releases() == {"v1"}


def test_page_opened_from_a_list_shows_the_time_of_the_list(viewer: Client, db: Any) -> None:
    failure = a_failure()
    found = viewer.get(reverse("admin:dbqueue_failure_changelist"), {"hours": "1"}).text

    address = re.search(r'href="([^"]*/change/[^"]*)"', found)
    assert address
    page = viewer.get(unescape(address[1]))

    chosen = [span.hours for span, _address, is_chosen in page.context["spans"] if is_chosen]
    assert chosen == [1] and str(failure.pk) in address[1]
