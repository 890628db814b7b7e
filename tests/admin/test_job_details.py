"""Keys, limits, pipelines and batches on a job's page and in the list of jobs."""

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

from django_dbqueue.models import Job, Semaphore, Slot, TaskState

from .conftest import (
    VIEW,
    a_batch,
    a_client,
    a_failure,
    a_job,
    a_recurring_task,
    an_execution,
    press,
)
from .test_jobs import ids, page

State = Job.State
COFFEE = [
    {"task": f"shop.coffee.{name}", "queue": "default", "priority": 0}
    for name in ("grind", "brew", "pour")
]


def page_text(client: Client, job: Job) -> str:
    """Return the visible text of the job's page."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", client.get(page(job)).text))


def a_pipeline(stage: int = 0, **values: Any) -> Job:
    return a_job(task=COFFEE[stage]["task"], pipeline=COFFEE, stage=stage, **values)


def stages(client: Client, job: Job) -> list[tuple[bool, str]]:
    """Return for each stage whether it is the current one, and its text."""
    found = re.findall(
        r'<li( aria-current="step")?><span class="dbq-stage">(.*?)</li>',
        client.get(page(job)).text,
        re.S,
    )
    return [
        (bool(current), " ".join(re.sub(r"<[^>]+>", " ", text).split())) for current, text in found
    ]


def test_plain_job_shows_no_key_limit_pipeline_or_batch(
    viewer: Client, failed: Callable[..., Job]
) -> None:
    text = viewer.get(page(failed())).text

    assert not [
        word
        for word in ("dbq-stages", "dbq-limits", "dbq-children", "field-key", "field-linked_batch")
        if word in text
    ]


class TestKeys:
    def test_key_is_shown_without_task_path_and_with_version(self, viewer: Client, db: Any) -> None:
        text = viewer.get(page(a_job(key="shop.tasks.index order 42", version=7))).text

        assert re.search(r'field-key.*?<div class="readonly">order 42</div>', text, re.S)
        assert re.search(r'field-version.*?<div class="readonly">7</div>', text, re.S)

    def test_job_reenqueued_while_running_shows_that_it_reruns(
        self, viewer: Client, process: Any
    ) -> None:
        values = {"key": "shop.tasks.index 42", "rerun_requested": True}
        running, waiting = (
            a_job(state=State.RUNNING, process=process, **values),
            a_job(key="shop.tasks.index 43"),
        )

        assert (
            "It was re-enqueued while running. When this run has ended, it runs again"
            in page_text(viewer, running)
        )
        assert "re-enqueued" not in page_text(viewer, waiting)

    def test_attempts_of_earlier_runs_are_marked(self, viewer: Client, db: Any) -> None:
        job = a_job(state=State.SUCCESSFUL, key="shop.tasks.index 42", attempt=3, attempts_before=2)
        for attempt in (1, 2, 3):
            an_execution(job, attempt=attempt)

        assert "1, and 2 before it was re-enqueued" in page_text(viewer, job)
        assert viewer.get(page(job)).text.count("earlier run") == 2

    def test_list_shows_the_escaped_key(self, viewer: Client, db: Any) -> None:
        a_job(key="shop.tasks.index <b>42</b>")

        assert "&lt;b&gt;42&lt;/b&gt;" in viewer.get(reverse("admin:dbqueue_job_changelist")).text

    @pytest.mark.parametrize(
        "text",
        ["key:42", "key: 42", "key:shop.tasks.index 42", "key:index 42"],
        ids=["alone", "space", "path", "name"],
    )
    def test_job_is_found_by_its_key(self, viewer: Client, db: Any, text: str) -> None:
        job = a_job(key="shop.tasks.index 42")
        a_job(key="shop.tasks.index 421"), a_job(key="shop.tasks.index 2"), a_job()

        assert ids(viewer, f"?q={text}") == [str(job.pk)]

    def test_search_for_key_of_any_task_uses_the_index(self, viewer: Client, db: Any) -> None:
        TaskState.objects.ensure_rows(["shop.tasks.index", "shop.tasks.ship"])
        one, other = (
            a_job(key="shop.tasks.index a b"),
            a_job(key="shop.tasks.ship a b", task="shop.tasks.other_stage"),
        )
        viewer.get(reverse("admin:dbqueue_job_changelist"))

        with CaptureQueriesContext(connection) as seen:
            assert ids(viewer, "?q=key:a b") == [str(other.pk), str(one.pk)]

        assert not [query for query in seen if "LIKE" in query["sql"]]


class TestPipelines:
    def test_stages_are_listed_with_the_current_stage_marked(self, viewer: Client, db: Any) -> None:
        job = a_pipeline(1, state=State.FAILED, attempt=2)
        (
            an_execution(job, attempt=1, stage=0),
            an_execution(job, attempt=2, stage=1, outcome="failed"),
        )

        assert stages(viewer, job) == [
            (False, "grind ✓ Done"),
            (True, "brew ✕ Failed"),
            (False, "pour"),
        ]

    def test_each_attempt_shows_its_stage(self, viewer: Client, db: Any) -> None:
        job = a_pipeline(2, state=State.SUCCESSFUL, attempt=4, attempts_before=1)
        for attempt, stage in ((1, 2), (2, 0), (3, 1), (4, 2)):
            an_execution(job, attempt=attempt, stage=stage)

        text = page_text(viewer, job)

        assert re.search(r"#4 ✓ Successful stage 3 of 3, pour ", text)
        assert re.search(r"#2 ✓ Successful stage 1 of 3, grind ", text)
        assert re.search(r"#1 ✓ Successful stage 3 earlier run", text)

    def test_stages_of_an_earlier_run_are_not_marked_done(self, viewer: Client, db: Any) -> None:
        job = a_pipeline(0, attempt=3, attempts_before=3)
        for attempt in (1, 2, 3):
            an_execution(job, attempt=attempt, stage=attempt - 1)

        assert stages(viewer, job) == [(True, "grind ○ Ready"), (False, "brew"), (False, "pour")]

    def test_child_jobs_are_linked(self, viewer: Client, db: Any) -> None:
        children = [a_pipeline(2), a_pipeline(2, state=State.FAILED)]
        gone = "0190a6c0-0000-7000-8000-000000000000"
        job = a_pipeline(
            1, state=State.SUCCESSFUL, result=[*(str(child.pk) for child in children), gone]
        )

        text = viewer.get(page(job)).text

        assert [text.count(page(child)) for child in children] == [1, 1]
        assert "and 1 more" in text and gone not in re.findall(r'href="[^"]*"', text)

    @pytest.mark.parametrize("result", ["text", ["a", 1], [None], {"a": 1}, []])
    def test_result_without_job_ids_shows_no_child_jobs(
        self, viewer: Client, db: Any, result: Any
    ) -> None:
        assert (
            "dbq-children"
            not in viewer.get(page(a_pipeline(1, state=State.SUCCESSFUL, result=result))).text
        )


class TestLimits:
    ACCOUNT: dict[str, Any] = {
        "key": "shop.tasks.charge account=17",
        "max_running": 2,
        "discard": False,
    }
    RATE: dict[str, Any] = {"key": "rate mail", "interval": 0.6, "burst": 10}

    def test_each_limit_shows_taken_slots_and_maximum(self, viewer: Client, process: Any) -> None:
        Semaphore.objects.create(key="shop.tasks.charge account=17", max_running=2)
        holder = a_job(state=State.RUNNING, process=process, limits=[self.ACCOUNT])
        Slot.objects.create(semaphore_id="shop.tasks.charge account=17", job=holder, attempt=1)

        text = page_text(viewer, a_job(limits=[self.ACCOUNT, self.RATE]))

        assert "shop.tasks.charge account=17 : 2 at a time ○ 1 of 2 taken" in text
        assert "mail : one every 600 ms, burst of 10" in text

    def test_limit_of_semaphore_overrides_limit_of_job(self, viewer: Client, db: Any) -> None:
        Semaphore.objects.create(key="shop.tasks.charge account=17", max_running=5)

        assert "5 at a time ○ 0 of 5 taken" in page_text(viewer, a_job(limits=[self.ACCOUNT]))

    def test_limit_is_linked_only_with_view_permission(self, viewer: Client, db: Any) -> None:
        Semaphore.objects.create(key="rate mail", interval=timedelta(seconds=0.6))
        job, address = (
            a_job(limits=[self.RATE]),
            reverse("admin:dbqueue_semaphore_change", args=["rate mail"]),
        )

        assert address in viewer.get(page(job)).text
        assert address not in a_client("job viewer", ["view_job"]).get(page(job)).text

    def test_limits_cost_two_queries_regardless_of_their_number(
        self, viewer: Client, db: Any
    ) -> None:
        def queries(job: Job) -> int:
            viewer.get(page(job))
            with CaptureQueriesContext(connection) as seen:
                viewer.get(page(job))
            return len(seen)

        none, one, two = a_job(), a_job(limits=[self.RATE]), a_job(limits=[self.ACCOUNT, self.RATE])

        assert queries(none) + 2 == queries(one) == queries(two)

    def test_list_is_filtered_by_the_blocking_limit(self, viewer: Client, db: Any) -> None:
        job = a_job(state=State.BLOCKED, blocked_by="rate mail")
        a_job(state=State.BLOCKED, blocked_by="rate other"), a_job()

        assert ids(viewer, "?waits_for=rate mail") == [str(job.pk)]


class TestBatches:
    def test_batch_is_linked_only_with_view_permission(self, viewer: Client, db: Any) -> None:
        job = a_job()
        address = reverse("admin:dbqueue_batch_change", args=[a_batch(job).pk])

        assert f'<a href="{address}">Prices of May</a>' in viewer.get(page(job)).text
        others = a_client("without batches", [name for name in VIEW if name != "view_batch"])
        assert address not in others.get(page(job)).text

    def test_list_is_filtered_by_batch(self, viewer: Client, db: Any) -> None:
        job, _other = a_job(), a_job()
        batch = a_batch(job)

        assert ids(viewer, f"?batch={batch.pk}") == [str(job.pk)]
        assert (
            "Prices of May"
            in viewer.get(reverse("admin:dbqueue_job_changelist") + f"?batch={batch.pk}").text
        )
        assert ids(viewer, "?batch=0190a6c0-0000-7000-8000-000000000000") == []

    def test_invalid_batch_filter_redirects_to_the_list(self, viewer: Client, db: Any) -> None:
        response = viewer.get(reverse("admin:dbqueue_job_changelist") + "?batch=5")

        assert response.headers["Location"].endswith("?e=1")


def test_id_and_blocks_have_hidden_buttons_that_copy_them(viewer: Client, db: Any) -> None:
    job = a_job(state=State.FAILED, args=["<b>"], kwargs={"total": 3}, result="x")
    an_execution(job, a_failure(), log="one line")

    text = viewer.get(page(job)).text

    buttons = re.findall(r"<button[^>]*dbq-copy[^>]*>", text)
    names = [re.search(r'aria-label="(.*?)"', each)[1] for each in buttons]
    assert names == [
        *("Copy: id", "Copy: Traceback", "Copy: Log"),
        *("Copy: arguments", "Copy: keyword arguments", "Copy: result"),
    ]
    # Without the script there is nothing that does not work.
    assert all(" hidden>" in each and 'type="button"' in each for each in buttons)
    assert text.count('class="dbq-copied dbq-quiet" role="status"></span>') == len(buttons)
    assert f'<code dir="ltr">{job.pk}</code>' in text
    assert "&lt;b&gt;" in text and "<b>" not in text


def test_negative_priority_is_isolated_wherever_it_is_shown(viewer: Client, db: Any) -> None:
    # In a text from right to left, its sign would be after it.
    job = a_job(priority=-5, state=State.BLOCKED, blocked_by="bank")
    Semaphore.objects.create(key="bank", max_running=1)
    recurring = a_recurring_task(is_from_code=True, priority=-5)

    for address in (
        page(job),
        reverse("admin:dbqueue_job_changelist"),
        reverse("admin:dbqueue_semaphore_change", args=["bank"]),
        reverse("admin:dbqueue_recurringtask_change", args=[recurring.pk]),
    ):
        text = viewer.get(address).text
        assert text.count('<span dir="ltr">-5</span>') == text.count("-5<") == 1, address


def test_negative_priority_is_isolated_in_the_message_of_its_change(
    operator: Client, db: Any
) -> None:
    done = press(operator, "job", "reprioritise", a_job().pk, confirmed="yes", value="-7")

    assert "Priority set to \u2066-7\u2069: 1 job." in done.text


def test_earlier_jobs_with_the_same_arguments_are_listed(viewer: Client, db: Any) -> None:
    earlier = [a_job(kwargs={"customer": 17}) for _ in range(7)]
    a_job(kwargs={"customer": 18})
    a_job(kwargs={"customer": 17}, task="shop.tasks.other")
    job = a_job(kwargs={"customer": 17})
    a_job(kwargs={"customer": 17})

    page = viewer.get(reverse("admin:dbqueue_job_change", args=[job.pk]))

    shown = [re.search(r"job/([0-9a-f-]{36})/", each["job"])[1] for each in page.context["earlier"]]
    assert shown == [str(each.pk) for each in reversed(earlier[2:])]
    assert "Earlier jobs with the same arguments" in page.text


def test_earlier_jobs_do_not_tell_whether_a_hidden_value_is_the_same(
    viewer: Client, db: Any
) -> None:
    a_job(kwargs={"name": "ann", "password": "tiger"})
    job = a_job(kwargs={"name": "ann", "password": "tiger"})

    page = viewer.get(reverse("admin:dbqueue_job_change", args=[job.pk]))

    assert page.context["earlier"] == []


@pytest.mark.parametrize(
    "args",
    [
        "null",
        "1",
        pytest.param(
            "[" * 900 + "]" * 900,
            marks=pytest.mark.skipif(
                connection.vendor == "mysql", reason="It refuses documents that are so deep."
            ),
        ),
        pytest.param(
            '["\\udfff"]',
            marks=pytest.mark.skipif(
                connection.vendor != "sqlite", reason="Others refuse half of a character."
            ),
        ),
    ],
)
def test_odd_arguments_of_a_row_by_hand_are_shown(viewer: Client, db: Any, args: str) -> None:
    job = a_job()
    with connection.cursor() as cursor:
        cursor.execute("UPDATE dbqueue_job SET args = %s", [args])

    assert viewer.get(reverse("admin:dbqueue_job_change", args=[job.pk])).status_code == 200
    assert viewer.get(reverse("admin:dbqueue_job_changelist")).status_code == 200
